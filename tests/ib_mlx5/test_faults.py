# SPDX-License-Identifier: BSD-3-Clause
"""Refusals of the device, injected: what the caller hears, what has changed, how it goes on.

A refused CREATE_MKEY is EREMOTEIO with a status and a syndrome in its reply.  The reply to
DESTROY_MKEY stays in the kernel, which makes an errno of it: there is no syndrome to tell.
"""

import errno
import gc

import pytest

import ucx_memh as um
from _sides import Wc, keys, link, opened, relink
from ucx_memh import MemFlag, MemhState, PackFlag, Status

GET = MemFlag.REMOTE_GET
RMA, AMO = PackFlag.INVALIDATE_RMA, PackFlag.INVALIDATE_AMO
SIZE = 64 << 10
SYNDROME = 0x5EED01

@pytest.fixture
def umr():
    """These are about keys that are made by command."""
    return "off"

# firmware's status -> what is raised, with which status
FIRMWARE = [
    (0x01, um.DeviceError, Status.IO_ERROR),  # INT_ERR
    (0x02, um.UnsupportedError, Status.UNSUPPORTED),  # BAD_OP
    (0x03, um.DeviceError, Status.IO_ERROR),  # BAD_PARAM
    (0x05, um.DeviceError, Status.IO_ERROR),  # BAD_RES
    (0x06, um.BusyError, Status.BUSY),  # RES_BUSY
    (0x08, um.NoMemoryError, Status.NO_MEMORY),  # LIM_ERR
    (0x0F, um.BusyError, Status.NO_RESOURCE),  # NO_RESOURCES
    (0x51, um.DeviceError, Status.IO_ERROR),  # BAD_OUTPUT_LEN
    (0xEE, um.DeviceError, Status.IO_ERROR),  # one that nobody knows
]

KERNEL = [
    (errno.ENOMEM, um.NoMemoryError, Status.NO_MEMORY),
    (errno.EAGAIN, um.BusyError, Status.NO_RESOURCE),
    (errno.EIO, um.DeviceError, Status.IO_ERROR),
]


@pytest.fixture
def memory():
    return bytearray(range(256)) * (SIZE // 256)


@pytest.fixture
def base(owner, memory):
    return owner.mem_reg(memory)


def sent(md, *names):
    stats = md.stats()
    return [stats[f"device.{name}"] for name in names]


def holds(soft):
    return [soft.stat(f"{name}.live") for name in ("mkeys", "mrs", "qps", "cqs", "pds", "contexts")]


def said(caught, error, status, system_errno, syndrome=None):
    """The exception tells all that is known."""
    assert type(caught.value) is error
    assert (caught.value.status, caught.value.errno) == (status, system_errno)
    assert caught.value.component == "ib_mlx5"
    assert caught.value.context.get("syndrome") == syndrome
    text = str(caught.value)
    assert errno.errorcode[system_errno] in text
    if syndrome is not None:
        assert f"{syndrome:#x}" in text
    return text


# ---- CREATE_MKEY ----


@pytest.mark.parametrize(("word", "error", "status"), FIRMWARE)
def test_create_mkey_refused_by_firmware(owner, soft, base, word, error, status):
    win = base.derive()
    before = holds(soft)
    soft.fault(f"create_mkey:status={word},syndrome={SYNDROME}")
    with pytest.raises(error) as caught:
        win.mkey_pack()
    text = said(caught, error, status, errno.EREMOTEIO, SYNDROME)
    assert f"0x{word:02x}" in text and "CREATE_MKEY" in text
    assert (win.state, holds(soft)) == (MemhState.LIVE, before)
    win.mkey_pack()  # the fault is over
    win.invalidate()
    assert sent(owner, "create_mkey", "destroy_mkey") == [2, 1]


@pytest.mark.parametrize(("number", "error", "status"), KERNEL)
def test_create_mkey_refused_by_the_kernel(
    owner, soft, base, library, memory, number, error, status
):
    link(owner, library)
    win = base.derive(64, 64, GET)
    soft.fault(f"create_mkey:errno={number},count=2")
    for _ in range(2):
        with pytest.raises(error) as caught:
            win.mkey_pack()
        said(caught, error, status, number)
    assert library.get(win.mkey_pack(), 0, 64) == memory[64:128]
    assert sent(owner, "create_mkey") == [3]


def test_a_base_keeps_the_key_that_it_got(owner, soft, base, library, memory):
    """Of two keys the second is refused: the first is not made again, and not lost."""
    link(owner, library)
    plain = base.mkey_pack()
    soft.fault(f"create_mkey:status=1,syndrome={SYNDROME},after=1")
    with pytest.raises(um.DeviceError):
        base.mkey_pack(RMA | AMO)
    assert base.mkey_pack() == plain
    assert library.get(base.mkey_pack(RMA), 0, 256) == memory[:256]
    assert sent(owner, "create_mkey") == [2]
    both = base.mkey_pack(RMA | AMO)
    assert keys(both)[0] == keys(base.mkey_pack(RMA))[0]
    assert library.fetch_add(both, 0, 0) == int.from_bytes(memory[:8], "little")
    assert sent(owner, "create_mkey") == [3]
    base.dereg()
    assert sent(owner, "destroy_mkey", "dereg_mr") == [2, 1]


def test_a_handle_that_never_got_a_key_is_revoked_without_a_command(owner, soft, base):
    win = base.derive()
    soft.fault("create_mkey:status=1")
    with pytest.raises(um.DeviceError):
        win.mkey_pack()
    seen = []
    win.invalidate(seen.append)
    assert (win.state, seen) == (MemhState.REVOKED, [Status.OK])
    assert sent(owner, "destroy_mkey") == [0]


# ---- DESTROY_MKEY ----

DESTROY = [
    ("status=0x01,syndrome=7", um.DeviceError, Status.IO_ERROR, errno.EIO),
    ("status=0x05", um.DeviceError, Status.IO_ERROR, errno.EINVAL),
    ("status=0x06", um.BusyError, Status.BUSY, errno.EBUSY),
    ("errno=16", um.BusyError, Status.BUSY, errno.EBUSY),
    ("errno=5", um.DeviceError, Status.IO_ERROR, errno.EIO),
    ("errno=12", um.DeviceError, Status.IO_ERROR, errno.ENOMEM),
]
REVOKE = {"invalidate": MemhState.REVOKED, "dereg": MemhState.CLOSED}


@pytest.mark.parametrize("call", REVOKE)
@pytest.mark.parametrize(("fault", "error", "status", "number"), DESTROY)
def test_destroy_mkey(owner, soft, base, library, memory, call, fault, error, status, number):
    link(owner, library)
    win, sibling = base.derive(), base.derive(64, 64, GET)
    number_of_key = keys(win.mkey_pack())[0]
    soft.fault(f"destroy_mkey:{fault},count=3")
    for _ in range(3):
        with pytest.raises(error) as caught:
            getattr(win, call)()
        text = said(caught, error, status, number)
        assert f"DESTROY_MKEY of key {number_of_key:#x}" in text
        assert win.state is MemhState.REVOKING
        with pytest.raises(um.RevokedError):
            win.mkey_pack()
        with pytest.raises(um.RevokedError):
            win.derive()
        with pytest.raises(um.BusyError):
            base.dereg()
        with pytest.raises(um.BusyError):
            owner.close()
    assert library.get(sibling.mkey_pack(), 0, 64) == memory[64:128]
    getattr(win, call)()
    assert win.state is REVOKE[call]
    win.dereg()
    assert sent(owner, "create_mkey", "destroy_mkey") == [2, 4]
    assert owner.stats()["live_derived"] == 1


def test_completion_once_and_after_the_last_try(owner, soft, base, attacker, memory):
    """A call that raises keeps its callback to itself; the one that succeeds runs its own."""
    ep = link(owner, attacker)
    win = base.derive()
    rkey, _ = keys(win.mkey_pack())
    first, second = [], []
    soft.fault("destroy_mkey:status=1")
    with pytest.raises(um.DeviceError):
        win.invalidate(first.append)
    while owner.progress():
        pass
    win.invalidate(second.append)
    for _ in range(10):
        owner.progress()
    win.dereg()
    assert (first, second) == ([], [Status.OK])
    assert attacker.read(rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR
    relink(ep, attacker)


@pytest.mark.parametrize("after", [0, 1])
def test_a_base_goes_on_where_it_stopped(owner, soft, base, memory, after):
    """Two keys and the region: what is gone stays gone, and nothing is destroyed twice."""
    live = soft.stat("mkeys.live")
    base.mkey_pack(RMA | AMO)
    soft.fault(f"destroy_mkey:status=1,after={after}")
    with pytest.raises(um.DeviceError):
        base.dereg()
    assert soft.stat("mkeys.live") == live + 2 - after
    assert sent(owner, "destroy_mkey", "dereg_mr") == [1 + after, 0]
    with pytest.raises(BufferError):
        memory.append(0)
    base.dereg()
    assert sent(owner, "destroy_mkey", "dereg_mr") == [3, 1]
    assert (base.state, soft.stat("mkeys.live")) == (MemhState.CLOSED, live - 1)
    memory.append(0)


def test_cascade_stops_at_the_first_that_resists(owner, soft, base):
    """And goes on with the rest when it is repeated."""
    wins = [base.derive() for _ in range(5)]
    wins += [wins[0].derive() for _ in range(2)]
    for win in wins:
        win.mkey_pack()
    soft.fault("destroy_mkey:status=1,after=3")
    with pytest.raises(um.DeviceError):
        base.dereg(cascade=True)
    states = [win.state for win in wins]
    assert states.count(MemhState.REVOKING) == 1
    assert states.count(MemhState.LIVE) == 3
    assert base.state is MemhState.LIVE
    base.dereg(cascade=True)
    assert sent(owner, "create_mkey", "destroy_mkey", "dereg_mr") == [7, 8, 1]


def test_a_handle_that_is_dropped_is_not_forgotten(soft, tidy):
    """Its key would not go when nobody held it any more: the Md sees to it when it is closed."""
    with opened(umr="off") as md:
        base = md.mem_reg(bytearray(SIZE))
        live = soft.stat("mkeys.live")
        win = base.derive()
        win.mkey_pack()
        soft.fault("destroy_mkey:status=1")
        del win
        gc.collect()
        assert soft.stat("mkeys.live") == live + 1
        with pytest.raises(um.BusyError):
            base.dereg()
        del base


# ---- regions ----


@pytest.mark.parametrize(
    ("number", "error", "status"),
    [
        *KERNEL,
        (errno.EFAULT, um.DeviceError, Status.INVALID_ADDR),
        (errno.EINVAL, um.InvalidParamError, Status.INVALID_PARAM),
        (errno.EOPNOTSUPP, um.UnsupportedError, Status.UNSUPPORTED),
        (errno.EPERM, um.AccessError, Status.ACCESS),
    ],
)
def test_reg_mr(owner, soft, memory, number, error, status):
    before = holds(soft)
    soft.fault(f"reg_mr:errno={number}")
    with pytest.raises(error) as caught:
        owner.mem_reg(memory)
    said(caught, error, status, number)
    assert caught.value.context["length"] == SIZE
    assert holds(soft) == before
    assert owner.stats()["live_bases"] == 0
    memory.append(0)  # nobody holds it
    owner.mem_reg(memory).dereg()


@pytest.mark.parametrize(
    ("number", "error", "status"),
    [
        (errno.EBUSY, um.BusyError, Status.BUSY),
        (errno.EIO, um.DeviceError, Status.IO_ERROR),
        (errno.EINVAL, um.DeviceError, Status.IO_ERROR),
    ],
)
def test_dereg_mr(owner, soft, base, memory, number, error, status):
    base.mkey_pack(RMA)
    soft.fault(f"dereg_mr:errno={number},count=2")
    for _ in range(2):
        with pytest.raises(error) as caught:
            base.dereg()
        said(caught, error, status, number)
        assert base.state is MemhState.REVOKING
        with pytest.raises(BufferError):
            memory.append(0)
        with pytest.raises(um.RevokedError):
            base.mkey_pack()
    base.dereg()
    assert base.state is MemhState.CLOSED
    assert sent(owner, "destroy_mkey", "dereg_mr") == [1, 3]
    memory.append(0)


def test_a_base_that_is_dropped_keeps_its_memory(soft, tidy):
    """The device still has it, so it must stay where it is."""
    memory = bytearray(SIZE)
    with opened() as md:
        soft.fault("dereg_mr:errno=5")
        md.mem_reg(memory)
        gc.collect()
        with pytest.raises(BufferError):
            memory.append(0)
    memory.append(0)


# ---- opening ----


@pytest.mark.parametrize("command", ["alloc_pd", "create_cq", "query_hca_cap"])
def test_opening(soft, tidy, command):
    before = holds(soft)
    soft.fault(f"{command}:errno=12")
    with pytest.raises(um.MemhError) as caught:
        um.open_md("ib_mlx5", device="software")
    assert caught.value.errno == errno.ENOMEM
    assert holds(soft) == before
    with opened() as md:
        md.mem_reg(bytearray(8))


def test_opening_refused_by_firmware(soft, tidy):
    for after in (0, 1):
        before = holds(soft)
        soft.fault(f"query_hca_cap:status=0x04,syndrome={SYNDROME},after={after}")
        with pytest.raises(um.MemhError) as caught:
            um.open_md("ib_mlx5", device="software")
        said(caught, um.DeviceError, Status.IO_ERROR, errno.EREMOTEIO, SYNDROME)
        assert holds(soft) == before


def test_opened_and_closed_at_once(soft, tidy):
    """The device's thread may not have looked around yet."""
    soft.fault("alloc_pd:errno=12,count=0")
    for _ in range(100):
        with pytest.raises(um.NoMemoryError):
            um.open_md("ib_mlx5", device="software")


@pytest.mark.parametrize("fault", ["reg_mr", "create_qp", "modify_qp"])
def test_endpoint(owner, soft, library, memory, fault):
    """The bounce buffers, the queue pair, its first state."""
    before = holds(soft)
    soft.fault(f"{fault}:errno=12")
    with pytest.raises(um.NoMemoryError):
        owner.endpoint()
    made = holds(soft)
    assert made[2:] == before[2:]
    link(owner, library)
    with owner.mem_reg(memory) as base:
        assert library.get(base.mkey_pack(), 0, 64) == memory[:64]


@pytest.mark.parametrize("after", [0, 1])
def test_connect(owner, soft, library, memory, after):
    """To either state; then it is as before, and connecting again is all it takes."""
    ep = owner.endpoint()
    soft.fault(f"modify_qp:errno=110,after={after}")
    with pytest.raises(um.UnreachableError):
        ep.connect(library.address)
    assert ep.state is um.EpState.IDLE
    ep.connect(library.address)
    library.connect(ep.address)
    with owner.mem_reg(memory) as base:
        assert library.get(base.mkey_pack(), 0, 64) == memory[:64]
