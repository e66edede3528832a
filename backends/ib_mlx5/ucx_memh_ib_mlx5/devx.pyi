from typing import Literal

from ucx_memh.core import Md

def devices(verbs_path: str, mlx5_path: str) -> list[str]: ...
def create_mkey_mailbox(
    kind: Literal["derived", "indirect", "atomic"],
    address: int,
    length: int,
    rights: int,
    *,
    lkey: int,
    pdn: int,
    qpn: int = 0xFFFFFF,
    tag: int = 0,
    page: int = 4096,
    atomic_align: int = 8,
) -> bytes: ...
def open_md(
    verbs_path: str,
    mlx5_path: str,
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
    umr: Literal["auto", "off"],
) -> Md: ...
