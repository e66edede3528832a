from ucx_memh.core import Md

def open_md(
    library: str,
    md_name: str,
    *,
    software: bool,
    port: int = 0,
    gid_index: int = -1,
    queue_depth: int = 0,
    max_msg: int = 0,
    quarantine: int = 65536,
    context: int = 0,
    pd: int = 0,
    self_check: bool = True,
) -> Md: ...
