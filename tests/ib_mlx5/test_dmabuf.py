# SPDX-License-Identifier: BSD-3-Clause
"""Memory of a GPU by its dmabuf, on softmlx5: revocable keys to a KV cache are what it is for.

A memfd stands in for the dmabuf, and the address is one that this process cannot touch, as a GPU's.
"""

import mmap
import os

import pytest

import ucx_memh as um
from _rows import SIZE, text
from _sides import Attacker, Library, Wc, Where, keys, link, opened, relink
from _tensors import Interface, Tensor
from ucx_memh import EpState, MdFlag, MemFlag, MemType

PAGE = mmap.PAGESIZE
GPU = 0x7F3C_0000_0000  # nothing is mapped there
GET, PUT = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT


class DmaBuf:
    """Memory behind a descriptor, at `offset` of it."""

    def __init__(self, data, offset=0, size=4 << 20):
        self.fd = os.memfd_create("dmabuf")
        os.ftruncate(self.fd, size)
        self.offset, self.size = offset, size
        self.write(data)

    def write(self, data, at=0):
        os.pwrite(self.fd, data, self.offset + at)

    def read(self, size, at=0):
        return os.pread(self.fd, size, self.offset + at)

    def reg(self, md, length=SIZE, flags=None, address=GPU, **more):
        """Where the address is in its page is where the bytes are in theirs."""
        given = {"mem_type": MemType.CUDA, "dmabuf_fd": self.fd, "dmabuf_offset": self.offset}
        at = address + self.offset % PAGE
        return md.mem_reg(address=at, length=length, flags=flags, **given | more)


@pytest.fixture
def buffer():
    made = []

    def make(*args, **more):
        made.append(DmaBuf(*args, **more))
        return made[-1]

    yield make
    for each in made:
        os.close(each.fd)


# A memory window cannot be bound to it: the call that registers it takes no IBV_ACCESS_MW_BIND.
derives = pytest.mark.parametrize("where", ["ib_mlx5"], indirect=True)
windows = pytest.mark.parametrize("where", ["ib"], indirect=True)


@pytest.fixture(params=["ib_mlx5", "ib"])
def where(request, software):
    return Where() if request.param == "ib_mlx5" else Where("ib", {"library": software})


@pytest.fixture
def md(where, tidy):
    with opened(where) as opened_md:
        yield opened_md


@pytest.fixture
def library(peer, where):
    return Library(peer, where)


@derives
def test_a_kv_cache_in_gpu_memory(md, library, buffer):
    """One registration, a key for each block; one is taken back, the others move on."""
    data = text()
    memory = buffer(data)
    assert MdFlag.REG_DMABUF in md.attr.flags
    assert MemType.CUDA in md.attr.mem_types
    base = memory.reg(md, flags=MemFlag.DERIVED_ONLY)
    ep = link(md, library)
    blocks = [base.derive(i * 4096, 4096, GET | PUT) for i in range(4)]
    packed = [block.mkey_pack() for block in blocks]
    for i, key in enumerate(packed):
        assert library.unpack(key)[:2] == (GPU + i * 4096, 4096)
        assert library.get(key, 0, 4096) == data[i * 4096 : (i + 1) * 4096]
        library.put(key, 100, b"written by the peer")
        assert memory.read(19, i * 4096 + 100) == b"written by the peer"
    frozen = memory.read(4096)
    blocks[0].invalidate()
    with pytest.raises(um.RemoteAccessError):
        library.put(packed[0], 0, b"late")
    assert ep.state is EpState.ERROR
    relink(ep, library)
    with pytest.raises(um.RemoteAccessError):
        library.get(packed[0], 0, 8)
    relink(ep, library)
    assert memory.read(4096) == frozen
    for i in (1, 2, 3):
        assert library.get(packed[i], 100, 19) == b"written by the peer"
    with pytest.raises(um.UnsupportedError):
        base.mkey_pack()
    base.dereg(cascade=True)


@derives
def test_the_device_refuses_below_our_library(md, where, buffer, peer):
    """Raw verbs: beyond the range, for a right that is not there, after the end."""
    data = text()
    memory = buffer(data)
    attacker = Attacker(peer, where)
    ep = link(md, attacker)
    base = memory.reg(md, flags=MemFlag.DERIVED_ONLY)
    win = base.derive(4096, 4096, GET)
    rkey, _ = keys(win.mkey_pack())
    assert attacker.read(rkey, win.address, 4096) == (Wc.SUCCESS, data[4096:8192])
    for attack in (
        lambda: attacker.read(rkey, win.address - 1, 8)[0],
        lambda: attacker.read(rkey, win.address + 4090, 8)[0],
        lambda: attacker.write(rkey, win.address, b"x"),
        lambda: win.invalidate() or attacker.read(rkey, win.address, 8)[0],
    ):
        assert attack() is Wc.REM_ACCESS_ERR
        relink(ep, attacker)
    assert memory.read(SIZE) == data


@pytest.mark.parametrize("offset", [0, 64, PAGE, PAGE + 64, (1 << 20) + 8])
def test_memory_that_begins_somewhere_in_the_dmabuf(md, library, buffer, offset):
    data = text()
    memory = buffer(data, offset)
    base = memory.reg(md)
    link(md, library)
    assert library.get(base.mkey_pack(), 0, SIZE) == data
    library.put(base.mkey_pack(), 8, b"eight on")
    assert memory.read(24) == data[:8] + b"eight on" + data[16:24]


@derives
@pytest.mark.parametrize("offset", [64, PAGE + 64])
def test_a_key_to_a_part_that_begins_somewhere(md, library, buffer, offset):
    data = text()
    memory = buffer(data, offset)
    link(md, library)
    win = memory.reg(md).derive(8, 64, GET | PUT)
    library.put(win.mkey_pack(), 0, b"eight on")
    assert memory.read(24) == data[:8] + b"eight on" + data[16:24]


@windows
def test_no_window_can_be_bound_to_it(md, soft, library, buffer):
    """It has its own key, and nothing can be derived."""
    memory = buffer(text())
    before = soft.live()
    with pytest.raises(um.UnsupportedError, match="DERIVED_ONLY, but no windows"):
        memory.reg(md, flags=MemFlag.DERIVED_ONLY)
    assert soft.live() == before
    base = memory.reg(md)
    with pytest.raises(um.UnsupportedError, match="no windows on memory of a dmabuf"):
        base.derive(0, 4096, GET)
    assert "ibv_reg_dmabuf_mr allows no windows" in base.explain()
    link(md, library)
    library.put(base.mkey_pack(), 4, b"by its own key")
    assert memory.read(14, 4) == b"by its own key"


def test_it_is_the_local_side_of_a_transfer(md, library, buffer):
    """By its handle: its bytes go by the device and not by the processor, however few they are."""
    memory = buffer(b"ours" + bytes(60))
    ep = link(md, library)
    address, key = library.buffer(64)
    base = memory.reg(md, 64)
    with md.rkey_unpack(key) as rkey:
        ep.put(rkey, address, base)
        assert library.get(base.mkey_pack(), 0, 4) == b"ours"
        memory.write(bytes(64))
        ep.get(rkey, address, base)
        assert memory.read(4) == b"ours"
        for thing in (Interface(base.address, 64), Tensor(base.address, (64,))):
            with pytest.raises(um.UnsupportedError, match="takes that of a Memh only"):
                ep.get(rkey, address, thing)


@pytest.mark.parametrize("protocol", [Interface, lambda at, size: Tensor(at, (size,))])
def test_an_array_and_its_dmabuf(md, library, buffer, protocol):
    data = text()
    memory = buffer(data)
    base = md.mem_reg(protocol(GPU, SIZE), dmabuf_fd=memory.fd, dmabuf_offset=0)
    assert (base.address, base.length) == (GPU, SIZE)
    link(md, library)
    assert library.get(base.mkey_pack(), 5, 100) == data[5:105]
    base.dereg()


def test_without_a_dmabuf_it_is_refused_before_any_call(md, soft):
    before = soft.stat("cmd.reg_mr"), md.stats()["device.reg_mr"]
    for call in (
        lambda: md.mem_reg(Interface(GPU, SIZE)),
        lambda: md.mem_reg(Tensor(GPU, (SIZE,))),
        lambda: md.mem_reg(address=GPU, length=SIZE, mem_type=MemType.CUDA),
    ):
        with pytest.raises(um.UnsupportedError, match="device memory needs a dmabuf"):
            call()
    assert (soft.stat("cmd.reg_mr"), md.stats()["device.reg_mr"]) == before


def test_a_dmabuf_that_does_not_fit(md, soft, buffer):
    memory = buffer(b"data")
    before = soft.live()
    with pytest.raises(um.InvalidParamError, match="same place in a page"):
        memory.reg(md, address=GPU + 8)
    with pytest.raises(um.InvalidParamError, match="same place in a page"):
        memory.reg(md, dmabuf_offset=8)
    assert soft.live() == before
    for more in ({"dmabuf_offset": 4 << 20}, {"length": (4 << 20) + 1}):
        with pytest.raises(um.MemhError):
            memory.reg(md, **more)
    closed = os.dup(memory.fd)
    os.close(closed)
    with pytest.raises(um.MemhError, match="ibv_reg_dmabuf_mr"):
        memory.reg(md, dmabuf_fd=closed)
    assert soft.live() == before
    memory.reg(md).dereg()


def test_the_descriptor_may_be_closed_after_the_registration(md, library):
    """The kernel holds the memory for as long as the registration lives."""
    memory = DmaBuf(b"still there")
    base = memory.reg(md)
    os.close(memory.fd)
    link(md, library)
    assert library.get(base.mkey_pack(), 0, 11) == b"still there"
