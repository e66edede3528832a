from ucx_memh.core import Md

def open_md(
    library: str,
    md_name: str,
    *,
    software: bool,
    port: int,
    gid_index: int,
    queue_depth: int,
    max_msg: int,
    quarantine: int,
    context: int,
    pd: int,
    self_check: bool,
) -> Md: ...
