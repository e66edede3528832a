from collections.abc import Iterable
from typing import Literal

from typing_extensions import disjoint_base

from ucx_memh.core import Md

OPERATIONS: tuple[str, ...]

@disjoint_base
class FakeDevice:
    @property
    def guid(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def counts(self) -> dict[str, int]: ...
    def count(self, op: str) -> int: ...
    def gil_held(self, op: str) -> int: ...
    def reset_counts(self) -> None: ...
    @property
    def violations(self) -> dict[str, int]: ...
    def fail(
        self,
        op: str,
        status: int,
        *,
        after: int = 0,
        count: int = 1,
        text: str = "",
        errno: int = 0,
        syndrome: int = 0,
        bytes_done: int = 0,
    ) -> None: ...
    def clear_faults(self) -> None: ...
    def slow(self, op: str, seconds: float) -> None: ...
    def next_values(self, values: Iterable[int]) -> None: ...
    @property
    def live_keys(self) -> dict[int, tuple[str, int, int, int]]: ...
    @property
    def destroying(self) -> int: ...
    def complete(self, n: int | None = None, status: int = 0) -> int: ...
    @property
    def in_flight(self) -> int: ...
    def hold(self) -> None: ...
    def release(self) -> int: ...
    def step(self, n: int = 1, chunk: int = 0) -> int: ...
    def raw_access(
        self,
        value: int,
        op: Literal["get", "put", "fetch_add", "compare_swap"],
        address: int,
        *,
        data: bytes | bytearray | memoryview | None = None,
        length: int = 0,
        operand: int = 0,
        compare: int = 0,
        endpoint: int = 0,
    ) -> tuple[int, bytes | int | None]: ...

def open_fake(
    *,
    component: str = "fake",
    md_name: str = "fake0",
    reg: bool = True,
    rkey: bool = True,
    derive: bool = True,
    derive_endpoint: bool = True,
    invalidate: bool = True,
    endpoint: bool = True,
    atomic: bool = True,
    rkey_ptr: bool = True,
    event: bool = True,
    need_memh: bool = False,
    dmabuf: bool = False,
    flags: int | None = None,
    max_reg: int = 0,
    mem_types: int = 1,
    reg_alignment: int = 1,
    rkey_packed_size: int | None = None,
    rkey_raw_size: int | None = None,
    payload_length: int | None = None,
    bounce_size: int = 0,
    quarantine: int = 64,
    software: bool = True,
    python: bool = False,
    fast_reg: bool = False,
    placeholders: bool = False,
    tail_inherit_size: int = 0,
    tail_own_size: int = 0,
    destroy: Literal["now", "progress", "manual"] = "now",
    deferred: bool = False,
    connectionless: bool = False,
    lies: Iterable[
        Literal["rights", "range", "revoke", "in_flight", "endpoint", "guess"]
    ] = (),
    claim: int = 2,
    without_ops: Iterable[str] = (),
    stub_ops: Iterable[str] = (),
    abi: int | None = None,
    ops_size: int = 0,
    ep_ops_size: int = 0,
    attr_size: int = 0,
) -> tuple[Md, FakeDevice]: ...
