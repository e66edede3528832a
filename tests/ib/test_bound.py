# SPDX-License-Identifier: BSD-3-Clause
"""Keys of one endpoint: windows of type 2, bound over its queue pair.

Destroying a queue pair with a window bound to it takes rxe 51 s, so windows must go first.
"""

import pytest

import ucx_memh as um
from _rows import text
from _sides import Attacker, Wc, join, keys, link, relink, wait_for
from ucx_memh import EpState, MemFlag, MemhState

GET, PUT = MemFlag.REMOTE_GET, MemFlag.REMOTE_PUT
pytestmark = pytest.mark.timeout(45, func_only=True)  # ends what has hung


@pytest.fixture
def memory():
    return text()


@pytest.fixture
def base(owner, memory):
    return owner.mem_reg(memory, MemFlag.DERIVED_ONLY)


def test_before_its_endpoint_is_connected(owner, base, attacker, memory):
    """It is derived, but a window cannot be bound yet: the pack says so, and succeeds later."""
    ep = owner.endpoint()
    win = base.derive(64, 64, GET, endpoint=ep)
    for _ in range(2):
        with pytest.raises(um.MemhError) as caught:
            win.mkey_pack()
        assert caught.value.status is um.Status.INVALID_PARAM
        assert "not connected" in str(caught.value)
        assert win.state is MemhState.LIVE
    stats = owner.stats()
    assert stats["device.alloc_mw"] == stats["device.dealloc_mw"]
    join(ep, attacker)
    rkey, _ = keys(win.mkey_pack())
    assert attacker.read(rkey, win.address, 64) == (Wc.SUCCESS, memory[64:128])
    ep.close()
    assert win.state is MemhState.REVOKED


def test_a_life(owner, base, attacker, memory):
    """Bound once over the endpoint, ended by one verb, and gone; the endpoint lives on."""
    ep = link(owner, attacker)
    win = base.derive(64, 64, GET, endpoint=ep)
    before = owner.stats()
    rkey, _ = keys(win.mkey_pack())
    win.mkey_pack()
    assert "type 2" in win.explain()
    assert attacker.read(rkey, win.address, 64) == (Wc.SUCCESS, memory[64:128])
    win.invalidate()
    after = owner.stats()
    change = {n[7:]: after[n] - before[n] for n in after if n.endswith(("_mw", "_inv"))}
    assert change == {"alloc_mw": 1, "bind_mw": 1, "dealloc_mw": 1, "local_inv": 0}
    assert ep.state is EpState.CONNECTED
    assert attacker.read(rkey, win.address, 64)[0] is Wc.REM_ACCESS_ERR


def test_no_other_queue_pair_may_use_it(owner, base, side, memory):
    """Refused on another connection of the same domain, and still good on its own."""
    friend, foe = side(Attacker), side(Attacker)
    ep, other = link(owner, friend), link(owner, foe)
    win = base.derive(endpoint=ep)
    rkey, amo = keys(win.mkey_pack())
    before = bytes(memory)
    for attack in (
        lambda: foe.read(rkey, base.address, 8)[0],
        lambda: foe.write(rkey, base.address, b"x"),
        lambda: foe.fetch_add(amo, base.address, 1)[0],
    ):
        assert attack() is Wc.REM_ACCESS_ERR
        relink(other, foe)
        assert memory == before
        assert friend.read(rkey, base.address, 8) == (Wc.SUCCESS, memory[:8])


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_closing_an_endpoint_ends_its_windows_first(owner, base, attacker, memory, broken):
    """Also one whose connection has failed; it does not hang, and other keys do not notice."""
    ep = link(owner, attacker)
    wins = [base.derive(i * 64, 64, endpoint=ep) for i in range(20)]
    free = base.derive()
    values = [keys(win.mkey_pack())[0] for win in wins]
    if broken:
        assert attacker.read(0x123456, base.address, 8)[0] is Wc.REM_ACCESS_ERR
        wait_for(lambda: ep.state is EpState.ERROR)
    ep.close()
    assert {win.state for win in wins} == {MemhState.REVOKED}
    attacker.reset()
    again = link(owner, attacker)
    assert attacker.read(keys(free.mkey_pack())[0], base.address, 8) == (Wc.SUCCESS, memory[:8])
    for rkey in (values[0], values[-1]):
        assert attacker.read(rkey, base.address, 8)[0] is Wc.REM_ACCESS_ERR
        relink(again, attacker)


def test_closing_the_domain_with_bound_windows(tidy, device, attacker, memory):
    """By force, with all that is left of it, in the right order."""
    with device.opened() as md:
        base = md.mem_reg(memory, MemFlag.DERIVED_ONLY)
        ep = link(md, attacker)
        wins = [base.derive(endpoint=ep) for _ in range(5)]
        for win in wins:
            win.mkey_pack()
        md.close(force=True)
    memory.append(0)


def test_a_reset_keeps_or_ends_it_and_nothing_in_between(owner, base, attacker, memory):
    """A handle that says LIVE after its endpoint's reset has a key that works; none hangs."""
    ep = link(owner, attacker)
    win = base.derive(64, 64, GET, endpoint=ep)
    rkey, _ = keys(win.mkey_pack())
    relink(ep, attacker)
    status, data = attacker.read(rkey, win.address, 64)
    if win.state is MemhState.LIVE:
        assert (status, data) == (Wc.SUCCESS, memory[64:128])
        assert keys(win.mkey_pack())[0] == rkey
        win.invalidate()
        status, _ = attacker.read(rkey, win.address, 64)
    assert status is Wc.REM_ACCESS_ERR
    assert win.state is MemhState.REVOKED
    relink(ep, attacker)
    fresh = base.derive(64, 64, GET, endpoint=ep)
    number, _ = keys(fresh.mkey_pack())
    assert number != rkey
    assert attacker.read(number, fresh.address, 64) == (Wc.SUCCESS, memory[64:128])
    ep.close()


def test_a_narrower_one_is_bound_as_well(owner, base, side, memory):
    friend, foe = side(Attacker), side(Attacker)
    ep, _ = link(owner, friend), link(owner, foe)
    small = base.derive(endpoint=ep).derive(64, 64, GET)
    rkey, _ = keys(small.mkey_pack())
    assert friend.read(rkey, small.address, 64) == (Wc.SUCCESS, memory[64:128])
    assert foe.read(rkey, small.address, 64)[0] is Wc.REM_ACCESS_ERR
    assert friend.write(rkey, small.address, b"x") is Wc.REM_ACCESS_ERR
    assert memory == text()
