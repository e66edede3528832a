# SPDX-License-Identifier: BSD-3-Clause
"""Stand between the backend and a device's window verbs: count them, refuse them, spoil them.

alloc_mw, bind_mw, dealloc_mw and post_send are no symbols but pointers in an ibv_context.  On a
context that the test has opened they can be replaced, whatever device it is.

    with Hooks(where) as hooks, hooks.opened() as md:
        hooks.refuse("dealloc_mw", errno.EBUSY, times=3)
        hooks.counts["alloc_mw"]
"""

import ctypes as c
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import ucx_memh as um
from _rawqp import RawPeer, SendWr
from _sides import Where, opened

LOCAL_INV, BIND_MW = 7, 8  # enum ibv_wr_opcode


class BindInfo(c.Structure):
    """struct ibv_mw_bind_info"""

    _fields_ = [
        ("mr", c.c_void_p),
        ("addr", c.c_uint64),
        ("length", c.c_uint64),
        ("access", c.c_uint),
    ]


class Bind(c.Structure):
    """struct ibv_mw_bind"""

    _fields_ = [("wr_id", c.c_uint64), ("flags", c.c_uint), ("info", BindInfo)]


PROTOTYPES = {
    "alloc_mw": (64, c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.c_int, use_errno=True)),
    "bind_mw": (72, c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, use_errno=True)),
    "dealloc_mw": (80, c.CFUNCTYPE(c.c_int, c.c_void_p, use_errno=True)),
    "post_send": (208, c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, use_errno=True)),
}


class Hooks:
    """A device context of the test's own, with all window verbs on hooks."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.counts: Counter[str] = Counter()
        self.refusals: dict[str, list[int]] = {}  # verb: [to let through, how often, errno]
        self.spoil: Callable[[BindInfo], None] | None = None  # for the next binds of type 1
        self.spoiled = 0
        self.pretending = False
        self.pretended: list[int] = []
        self.originals: dict[str, tuple[int, Any, Any]] = {}
        self.stack = ExitStack()

    def __enter__(self) -> "Hooks":
        self.raw = self.stack.enter_context(RawPeer(self.where.library, self.where.gid_index))
        for name, (offset, prototype) in PROTOTYPES.items():
            slot = c.c_void_p.from_address(self.raw.context.value + offset)
            original = prototype(slot.value)
            hook = prototype(getattr(self, f"_{name}"))
            self.originals[name] = slot.value, original, hook
            slot.value = c.cast(hook, c.c_void_p).value
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name, (address, _, _) in self.originals.items():
            offset = PROTOTYPES[name][0]
            c.c_void_p.from_address(self.raw.context.value + offset).value = address
        self.stack.close()

    def opened(self, **config: Any) -> AbstractContextManager[um.Md]:
        """An Md on the context."""
        return opened(
            self.where, context=self.raw.context.value, pd=self.raw.pd.value, **config
        )

    def refuse(self, verb: str, number: int, times: int = 1, after: int = 0) -> None:
        """So many calls fail with that errno, after so many that pass; local_inv is a verb, too."""
        self.refusals[verb] = [after, times, number]

    def spoil_next(self, change: Callable[[BindInfo], None], times: int = 1) -> None:
        """So many binds of type 1 ask the device for what it must refuse."""
        self.spoil, self.spoiled = change, times

    @contextmanager
    def pretend_freed(self) -> Iterator[None]:
        """Windows that are freed inside are not, but the backend hears that they are."""
        self.pretending = True
        yield
        self.pretending = False

    def free_pretended(self) -> None:
        while self.pretended:
            assert self.originals["dealloc_mw"][1](self.pretended.pop()) == 0

    def _refused(self, verb: str) -> int:
        self.counts[verb] += 1
        after, times, number = self.refusals.get(verb, (0, 0, 0))
        if after:
            self.refusals[verb][0] -= 1
            return 0
        if times:
            self.refusals[verb][1] -= 1
            return number
        return 0

    def _alloc_mw(self, pd: int, kind: int) -> int | None:
        number = self._refused("alloc_mw")
        if number:
            c.set_errno(number)
            return None
        return self.originals["alloc_mw"][1](pd, kind)

    def _bind_mw(self, qp: int, mw: int, bind: int) -> int:
        number = self._refused("bind_mw")
        if number:
            return number
        if self.spoiled:
            self.spoiled -= 1
            request = Bind.from_buffer_copy(c.string_at(bind, c.sizeof(Bind)))
            self.spoil(request.info)
            return self.originals["bind_mw"][1](qp, mw, c.addressof(request))
        return self.originals["bind_mw"][1](qp, mw, bind)

    def _dealloc_mw(self, mw: int) -> int:
        if self.pretending:
            self.pretended.append(mw)
            return 0
        return self._refused("dealloc_mw") or self.originals["dealloc_mw"][1](mw)

    def _post_send(self, qp: int, wr: int, bad: int) -> int:
        verb = {LOCAL_INV: "local_inv", BIND_MW: "bind_mw"}.get(SendWr.from_address(wr).opcode)
        number = self._refused(verb) if verb else 0
        return number or self.originals["post_send"][1](qp, wr, bad)
