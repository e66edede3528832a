# SPDX-License-Identifier: BSD-3-Clause
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, final

from ucx_memh.core import Md
from ucx_memh.flags import MdFlag, MemFlag, MemType, Status
from ucx_memh.resources import EnforcementTable

class KeyKind(IntEnum):
    DIRECT = 0
    INDIRECT = 1
    ATOMIC = 2
    DERIVED = 3

class OpKind(IntEnum):
    GET = 0
    PUT = 1
    FETCH_ADD = 2
    COMPARE_SWAP = 3

@final
class Registration:
    data: Any
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def flags(self) -> MemFlag: ...
    @property
    def grant(self) -> MemFlag: ...
    @property
    def direct_rights(self) -> MemFlag: ...
    @property
    def mem_type(self) -> MemType: ...
    @property
    def dmabuf_fd(self) -> int: ...
    @property
    def dmabuf_offset(self) -> int: ...
    @property
    def adopt(self) -> int: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...

@final
class Ep:
    data: Any

@final
class Handle:
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def rights(self) -> MemFlag: ...
    @property
    def grant(self) -> MemFlag: ...
    @property
    def key_id(self) -> int: ...
    @property
    def derived(self) -> bool: ...
    @property
    def reg(self) -> Registration: ...
    @property
    def endpoint(self) -> Ep | None: ...

@final
class Key:
    data: Any
    @property
    def value(self) -> int: ...
    @property
    def kind(self) -> KeyKind: ...

@final
class RemoteKey:
    data: Any
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def rights(self) -> MemFlag: ...
    @property
    def key_id(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def owner(self) -> bytes: ...

@final
class Completion:
    def __call__(self, status: Status | int = ...) -> None: ...

@final
class Transfer:
    result: int
    bytes_done: int
    @property
    def kind(self) -> OpKind: ...
    @property
    def remote_address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def operand(self) -> int: ...
    @property
    def compare(self) -> int: ...
    @property
    def lkey(self) -> int | None: ...
    @property
    def local(self) -> memoryview: ...
    @property
    def rkey(self) -> RemoteKey: ...
    def complete(self, status: Status | int = ..., detail: str = "") -> None: ...

def bind(
    backend: object,
    *,
    component: str,
    md_name: str,
    flags: MdFlag | int,
    rkey_packed_size: int = 0,
    rkey_raw_size: int = 0,
    max_reg: int = 0,
    mem_types: Iterable[MemType | int] = ...,
    reg_alignment: int = 1,
    bounce_size: int = 0,
    quarantine: int = 65536,
    software: bool = False,
    enforcement: EnforcementTable = ...,
) -> Md: ...
