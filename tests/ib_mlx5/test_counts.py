# SPDX-License-Identifier: BSD-3-Clause
"""What each step costs, counted: device commands, system calls, allocations.  No times."""

import ctypes
import mmap
import os
import platform
import resource
import signal
import struct

import pytest

import ucx_memh as um
from _capi import Table, pointers
from _sides import Wc, keys, link
from ucx_memh import MemFlag, PackFlag
from ucx_memh.testing import PoisonAllocator

GET, PUT = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT
RMA, AMO = PackFlag.INVALIDATE_RMA, PackFlag.INVALIDATE_AMO
SIZE = 64 << 10


@pytest.fixture
def umr():
    """These are about keys that are made by command."""
    return "off"


class Counter:
    """What the device executed since it was last asked, and what the backend says it sent."""

    COMMANDS = (
        "total create_mkey destroy_mkey query_mkey query_hca_cap reg_mr dereg_mr alloc_pd "
        "create_cq create_qp modify_qp umem_reg"
    ).split()
    REQUESTS = "read write atomic send recv bind_mw local_inv".split()

    def __init__(self, soft, md):
        self.soft, self.md = soft, md
        self.last = self._look()

    def _look(self):
        counts = {name: self.soft.stat(f"cmd.{name}") for name in self.COMMANDS}
        counts |= {f"wr.{name}": self.soft.stat(f"wr.{name}") for name in self.REQUESTS}
        stats = self.md.stats()
        return counts | {n: v for n, v in stats.items() if n.startswith("device.")}

    def __call__(self):
        """{command or work request: how often}; the device's count and the backend's must agree."""
        now = self._look()
        change = {name: now[name] - self.last[name] for name in now if now[name] != self.last[name]}
        self.last = now
        sent = {name[7:]: change.pop(name) for name in [*change] if name.startswith("device.")}
        sent = {f"wr.{name}" if name in self.REQUESTS else name: n for name, n in sent.items()}
        rings = {name: sent.pop(name) for name in ("doorbells", "control_qp") if name in sent}
        sent = {name: n for name, n in sent.items() if not name.startswith("pool_")}
        total = change.pop("total", 0)
        assert total == sum(n for name, n in change.items() if not name.startswith("wr."))
        assert sent == {name: n for name, n in change.items() if name != "create_cq"}
        return change | rings


@pytest.fixture
def count(owner, soft):
    owner.endpoint().close()  # registers the bounce buffers of the domain
    return Counter(soft, owner)


# ---- device commands ----


def test_commands_of_a_life(owner, count):
    base = owner.mem_reg(bytearray(SIZE))
    assert count() == {"reg_mr": 1}
    win = base.derive(64, 4096)
    small = win.derive(64, 64, GET)
    assert count() == {}
    win.mkey_pack()
    assert count() == {"create_mkey": 1}
    for flags in (0, RMA, AMO, RMA | AMO, PackFlag.RAW):
        win.mkey_pack(flags)
    base.mkey_pack()
    assert count() == {}
    small.invalidate()  # was never packed
    assert count() == {}
    win.invalidate()
    assert count() == {"destroy_mkey": 1}
    win.dereg()
    assert count() == {}
    base.mkey_pack(RMA)
    assert count() == {"create_mkey": 1}
    base.mkey_pack(RMA | AMO)
    assert count() == {"create_mkey": 1}
    base.mkey_pack(RMA), base.mkey_pack(AMO), base.mkey_pack()
    assert count() == {}
    base.dereg()
    assert count() == {"destroy_mkey": 2, "dereg_mr": 1}


@pytest.mark.parametrize("umr", ["auto"])
def test_work_requests_of_a_life(owner, count):
    """One command makes a key for good; then each life of one is a BIND_MW and a LOCAL_INV."""
    base = owner.mem_reg(bytearray(SIZE))
    assert count() == {"reg_mr": 1}
    first, second = base.derive(64, 4096), base.derive(64, 64, GET)
    assert count() == {}
    first.mkey_pack()
    control = {"create_cq": 1, "create_qp": 1, "modify_qp": 3, "control_qp": 1}
    assert count() == {"create_mkey": 1, "wr.bind_mw": 1, "doorbells": 1} | control
    second.mkey_pack()
    assert count() == {"create_mkey": 1, "wr.bind_mw": 1, "doorbells": 1}
    for flags in (0, RMA, AMO, RMA | AMO, PackFlag.RAW):
        first.mkey_pack(flags)
    base.derive().invalidate()  # was never packed
    base.mkey_pack()
    assert count() == {}
    first.invalidate()
    assert count() == {"wr.local_inv": 1, "doorbells": 1}
    second.dereg()
    assert count() == {"wr.local_inv": 1, "doorbells": 1}
    for _ in range(20):
        win = base.derive()
        win.mkey_pack()
        assert count() == {"wr.bind_mw": 1, "doorbells": 1}
        win.invalidate()
        assert count() == {"wr.local_inv": 1, "doorbells": 1}
    base.mkey_pack(RMA | AMO)
    assert count() == {"create_mkey": 2}
    base.dereg()
    assert count() == {"destroy_mkey": 2, "dereg_mr": 1}


DEPTH = 64  # what one doorbell takes


@pytest.mark.parametrize("umr", ["auto"])
@pytest.mark.parametrize("many", [1, DEPTH, DEPTH + 1, 200, 256, 300])
def test_doorbells_of_many(owner, count, many):
    """A batch of the embedders' table; it goes to the device in parts of 256."""
    base = owner.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
    base.derive().mkey_pack()
    count()
    wins = [base.derive(i * 64, 64) for i in range(many)]
    for win in wins:
        win.mkey_pack()
    made = count()
    assert (made["wr.bind_mw"], made["doorbells"]) == (many, many)
    items = pointers(*wins)
    table = Table()
    assert table.mem_invalidate_many(items, ctypes.c_size_t(many), ctypes.c_uint32(0), None) == 0
    rings = sum(-(-min(256, many - at) // DEPTH) for at in range(0, many, 256))
    assert count() == {"wr.local_inv": many, "doorbells": rings}
    assert all(win.state is um.MemhState.REVOKED for win in wins)


@pytest.mark.parametrize("umr", ["auto", "off"])
@pytest.mark.parametrize("call", ["invalidate", "dereg"])
@pytest.mark.parametrize("many", [1, DEPTH + 1, 256, 257, 600])
def test_doorbells_of_an_array(owner, count, umr, call, many):
    """The same from Python, and nothing for what has no key, is gone already or comes twice."""
    base = owner.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
    base.derive().mkey_pack()
    count()
    array = base.derive_many([i * 64 for i in range(many)], 64)
    assert count() == {}
    array.mkey_pack()
    made = count()
    if umr == "auto":
        assert (made["wr.bind_mw"], made["doorbells"]) == (many, many)
    else:
        assert made == {"create_mkey": many}
    keyless = base.derive_many([0] * 10, 8)
    revoke = getattr(owner, f"{call}_many")
    revoke([*keyless, *array, *array, *keyless], partial=True)
    ended = count()
    if umr == "auto":
        # Of the second time around the first waits for the parts that are under way.
        at_most = -(-(2 * many + 20) // 256) + -(-many // DEPTH) + 1
        rings = ended.pop("doorbells")
        assert -(-many // DEPTH) <= rings <= at_most
        assert ended == {"wr.local_inv": many}
    else:
        assert ended == {"destroy_mkey": many}
    assert {memh.state for memh in array} == {
        um.MemhState.CLOSED if call == "dereg" else um.MemhState.REVOKED
    }
    array = base.derive_many([i * 64 for i in range(many)], 64)
    array.mkey_pack()
    count()
    getattr(array, call)()
    rings = sum(-(-min(256, many - at) // DEPTH) for at in range(0, many, 256))
    wanted = {"wr.local_inv": many, "doorbells": rings}
    assert count() == (wanted if umr == "auto" else {"destroy_mkey": many})
    getattr(array, call)(partial=True)
    array.dereg()
    assert count() == {}


def test_commands_of_many_bases(owner, count):
    """One for each, whatever the batch."""
    regions = [bytearray(4096) for _ in range(300)]
    array = owner.mem_reg_many(regions, MemFlag.DERIVED_ONLY)
    assert count() == {"reg_mr": 300}
    array.dereg()
    assert count() == {"dereg_mr": 300}


@pytest.mark.parametrize("umr", ["auto"])
def test_work_requests_do_not_depend_on_size(owner, count, attacker):
    """4 KiB and 1 GiB: the same, one for each step."""
    link(owner, attacker)
    costs = []
    for size in (4096, 4096, 1 << 30):
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        memory.madvise(mmap.MADV_HUGEPAGE)
        base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY | MemFlag.LOCAL_READ | GET)
        win = base.derive()
        count()
        rkey, _ = keys(win.mkey_pack())
        steps = [count()]
        last = win.address + size - 1
        assert attacker.read(rkey, last, 1) == (Wc.SUCCESS, b"\0")
        count()
        win.invalidate()
        costs.append([*steps, count()])
        base.dereg()
        memory.close()
    assert costs[1] == costs[2]
    assert costs[1] == [
        {"wr.bind_mw": 1, "doorbells": 1},
        {"wr.local_inv": 1, "doorbells": 1},
    ]


def test_commands_of_a_peer(owner, count):
    """Unpacking asks nobody."""
    base = owner.mem_reg(bytearray(SIZE))
    key = base.derive().mkey_pack()
    count()
    with owner.rkey_unpack(key), owner.rkey_unpack(key):
        pass
    assert count() == {}


def test_commands_of_many(owner, count):
    """Linear, and the base pays nothing."""
    base = owner.mem_reg(bytearray(SIZE), MemFlag.DERIVED_ONLY)
    count()
    wins = [base.derive(i * 64, 64) for i in range(500)]
    assert count() == {}
    for win in wins:
        win.mkey_pack()
    assert count() == {"create_mkey": 500}
    base.dereg(cascade=True)
    assert count() == {"destroy_mkey": 500, "dereg_mr": 1}


def test_commands_do_not_depend_on_size(owner, count, attacker):
    """4 KiB and 1 GiB: the same commands, one for each step."""
    link(owner, attacker)
    costs = []
    for size in (4096, 1 << 30):
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        memory.madvise(mmap.MADV_HUGEPAGE)
        base = owner.mem_reg(memory, MemFlag.DERIVED_ONLY | MemFlag.LOCAL_READ | GET)
        count()
        steps = []
        win = base.derive()
        steps.append(count())
        rkey, _ = keys(win.mkey_pack())
        steps.append(count())
        last = win.address + size - 1
        assert attacker.read(rkey, last, 1) == (Wc.SUCCESS, b"\0")
        count()
        win.invalidate()
        steps.append(count())
        costs.append(steps)
        base.dereg()
        memory.close()
    assert costs[0] == costs[1] == [{}, {"create_mkey": 1}, {"destroy_mkey": 1}]


def test_a_refused_call_sends_nothing(owner, count):
    base = owner.mem_reg(bytearray(SIZE))
    win = base.derive(0, 64, GET)
    win.mkey_pack()
    count()
    for call in (
        lambda: win.derive(0, 65),
        lambda: win.derive(flags=PUT),
        lambda: win.mkey_pack(PackFlag.EXPORT),
        lambda: base.invalidate(),
        lambda: base.dereg(),
        lambda: owner.close(),
    ):
        with pytest.raises(um.MemhError):
            call()
    assert count() == {}


# ---- allocations ----


@pytest.mark.parametrize("umr", ["auto", "off"])
def test_allocations(owner):
    base = owner.mem_reg(bytearray(SIZE))
    first = base.derive()
    first.mkey_pack()  # what is made once: the quarantine
    first.invalidate()
    with PoisonAllocator() as allocator:
        win = base.derive(64, 64, GET)
        assert allocator.allocs == 1
        win.mkey_pack()
        assert allocator.allocs == 2  # the finished bytes
        win.mkey_pack(), win.mkey_pack(RMA)
        win.invalidate()
        assert (allocator.allocs, allocator.frees) == (2, 0)
        del win
        assert allocator.live == 0


# ---- system calls ----

EXIT_GROUP = {"x86_64": 231, "aarch64": 94}
GOOD, WRONG = 3, 4


def forbid_system_calls():
    """From now on this thread may only end the process: any other system call kills it."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    def instruction(code, k, yes=0, no=0):
        return struct.pack("=HBBI", code, yes, no, k)

    text = (
        instruction(0x20, 0)  # load the number of the call
        + instruction(0x15, EXIT_GROUP[platform.machine()], 0, 1)  # equal: next, else one further
        + instruction(0x06, 0x7FFF0000)  # SECCOMP_RET_ALLOW
        + instruction(0x06, 0x80000000)  # SECCOMP_RET_KILL_PROCESS
    )
    code = ctypes.create_string_buffer(text, len(text))
    program = Program(len(text) // 8, ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    argument = ctypes.addressof(program)
    if prctl(22, 2, ctypes.c_void_p(argument), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def steps():
    """{name: a function that answers whether it went well}, all warm."""
    md = um.open_md("ib_mlx5", device="software")
    base = md.mem_reg(bytearray(SIZE))
    win = base.derive(64, 4096)
    key = win.mkey_pack()
    rkey = md.rkey_unpack(key)
    into = bytearray(len(key))
    made = [None] * 20

    def derive():
        for i in range(20):
            made[i] = base.derive(i, 64, GET)
        return made[19].address == base.address + 19

    def pack():
        return all(win.mkey_pack(flags) == key for flags in (0, 1, 2, 3) for _ in range(20))

    def pack_into():
        return win.mkey_pack_into(into) == len(key) and into == key

    def unpack():
        for _ in range(20):
            with md.rkey_unpack(key) as again:
                if again.compare(rkey):
                    return False
        return True

    def explicit():
        return os.getppid() > 0

    return {step.__name__: step for step in (derive, pack, pack_into, unpack, explicit)}


def silent(conn, name):
    step = steps()[name]
    for _ in range(3):
        assert step()
    forbid_system_calls()
    os._exit(GOOD if step() else WRONG)


@pytest.mark.parametrize("name", ["derive", "pack", "pack_into", "unpack"])
def test_no_system_call(peer, name):
    """derive, the cached pack, the cached unpack: under a filter that kills at the first one."""
    assert peer(silent, name).process.wait(60) == GOOD


def test_the_filter_kills(peer):
    assert peer(silent, "explicit").process.wait(60) == -signal.SIGSYS
