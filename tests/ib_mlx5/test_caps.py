# SPDX-License-Identifier: BSD-3-Clause
"""The domain's flags follow the device's capabilities, which the software device can change."""

import mmap
import resource
from contextlib import contextmanager

import pytest

import ucx_memh as um
from ucx_memh import MdFlag, MemFlag, PackFlag
from ucx_memh.errors import InvalidParamError, UnsupportedError

KEYS = (
    MdFlag.REG_DERIVED
    | MdFlag.DERIVE_ENDPOINT
    | MdFlag.INVALIDATE
    | MdFlag.INVALIDATE_RMA
    | MdFlag.INVALIDATE_AMO
)
MAP_NORESERVE = 0x4000
ALWAYS = MdFlag.REG | MdFlag.NEED_MEMH | MdFlag.NEED_RKEY | MdFlag.ENDPOINT | MdFlag.EVENT_FD


@pytest.fixture
def umr():
    """These are about keys that are made by command."""
    return "off"


@contextmanager
def opened(soft, **caps):
    """An Md on a device with these capabilities."""
    for name, value in caps.items():
        soft.set(name, value)
    try:
        with um.open_md("ib_mlx5", device="software") as md:
            yield md
    finally:
        for name in caps:
            soft.set(name, "default")


def test_everything_by_default(md):
    assert md.attr.flags & KEYS == KEYS
    assert md.attr.flags & ALWAYS == ALWAYS
    assert md.attr.flags & MdFlag.ATOMIC
    assert md.attr.software
    assert md.attr.component == "ib_mlx5"
    assert md.attr.rkey_packed_size == 16


@pytest.mark.parametrize(
    ("caps", "lost"),
    [
        (
            {"fixed_buffer_size": 0},
            MdFlag.INVALIDATE_RMA | MdFlag.INVALIDATE_AMO | MdFlag.INVALIDATE,
        ),
        ({"umr_modify_atomic_disabled": 1}, MdFlag.INVALIDATE_AMO | MdFlag.INVALIDATE),
        ({"atomic": 0}, MdFlag.ATOMIC | MdFlag.INVALIDATE_AMO | MdFlag.INVALIDATE),
        ({"max_indirection": 0}, KEYS),
        ({"log_max_klm_list_size": 1}, MdFlag.REG_DERIVED | MdFlag.DERIVE_ENDPOINT),
        ({"log_max_klm_list_size": 2}, MdFlag(0)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_flags_follow_the_capabilities(soft, caps, lost):
    with opened(soft, **caps) as md:
        assert md.attr.flags & (KEYS | MdFlag.ATOMIC) == (KEYS | MdFlag.ATOMIC) & ~lost


def test_without_klm_derive_is_unsupported_and_changes_nothing(soft):
    with opened(soft, max_indirection=0) as md, md.mem_reg(bytearray(4096)) as base:
        packed, before = base.mkey_pack(), md.stats()
        with pytest.raises(UnsupportedError):
            base.derive()
        with pytest.raises(UnsupportedError):
            base.mkey_pack(PackFlag.INVALIDATE_RMA)
        assert base.derived_count == 0
        assert base.mkey_pack() == packed
        after = md.stats()
        assert after == before
        revoke = md.attr.enforcement.revoke
        assert {revoke.get, revoke.put, revoke.atomic} == {um.Enforcement.NONE}


def test_without_ksm_a_base_has_no_revocable_key(soft):
    with opened(soft, fixed_buffer_size=0) as md, md.mem_reg(bytearray(4096)) as base:
        with pytest.raises(UnsupportedError):
            base.mkey_pack(PackFlag.INVALIDATE_RMA)
        with base.derive() as window:  # KLM does not need it
            window.mkey_pack()


def test_without_indirect_atomics_no_atomic_window(soft):
    with opened(soft, umr_modify_atomic_disabled=1) as md, md.mem_reg(bytearray(4096)) as base:
        with pytest.raises(UnsupportedError, match="atomics through indirect keys"):
            base.derive()
        with base.derive(flags=MemFlag.REMOTE_GET | MemFlag.REMOTE_PUT) as window:
            window.mkey_pack()
        assert base.derived_count == 0


def test_a_list_too_long_is_refused_before_any_command(soft):
    """Four entries of 2 GiB cover 8 GiB and no page more.  Reading maps the zero page only."""
    size = (8 << 30) + 4096
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE
    with opened(soft, log_max_klm_list_size=2) as md:
        with mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ) as area:
            with md.mem_reg(area) as base:
                with pytest.raises(InvalidParamError, match="translation entries"):
                    base.derive()
                assert md.stats()["device.create_mkey"] == 0
                with base.derive(length=8 << 30) as window:
                    window.mkey_pack()
                assert md.stats()["device.create_mkey"] == 1


def test_counters_have_stable_names(md):
    names = {name for name in md.stats() if name.startswith("device.")}
    assert names == {
        f"device.{name}"
        for name in (
            "create_mkey destroy_mkey query_hca_cap init_obj bind_mw local_inv doorbells "
            "control_qp pool_free pool_used pool_resting reg_mr dereg_mr create_qp destroy_qp "
            "modify_qp query_qp post_send completions error_completions async_events"
        ).split()
    }


def test_commands_are_what_the_device_counted(md, soft):
    """Our counters and the device's own agree, so that tests may use either."""
    before, ours = {n: soft.stat(f"cmd.{n}") for n in ("create_mkey", "destroy_mkey")}, md.stats()
    with md.mem_reg(bytearray(4096)) as base, base.derive() as window:
        window.mkey_pack()
        window.mkey_pack()
        window.invalidate()
    for name, count in before.items():
        assert soft.stat(f"cmd.{name}") - count == 1
        assert md.stats()[f"device.{name}"] - ours[f"device.{name}"] == 1


def test_refusals_carry_status_and_syndrome(md, soft):
    with md.mem_reg(bytearray(4096)) as base, base.derive() as window:
        soft.fault("create_mkey:status=3,syndrome=0xbeef")
        with pytest.raises(um.MemhError, match=r"BAD_PARAM \(0x03\), syndrome 0xbeef") as caught:
            window.mkey_pack()
        assert caught.value.status == um.Status.IO_ERROR
        assert caught.value.context["syndrome"] == 0xBEEF
        window.mkey_pack()  # the fault was for one command


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("status=2,syndrome=1", um.Status.UNSUPPORTED),
        ("status=6,syndrome=1", um.Status.BUSY),
        ("status=8,syndrome=1", um.Status.NO_MEMORY),
        ("status=15,syndrome=1", um.Status.NO_RESOURCE),
        ("status=9,syndrome=1", um.Status.IO_ERROR),
        ("errno=12", um.Status.NO_MEMORY),
        ("errno=5", um.Status.IO_ERROR),
    ],
)
def test_what_a_refusal_means(md, soft, fault, status):
    with md.mem_reg(bytearray(64)) as base, base.derive() as window:
        soft.fault(f"create_mkey:{fault}")
        with pytest.raises(um.MemhError) as caught:
            window.mkey_pack()
        assert caught.value.status == status


def test_a_failed_destruction_can_be_tried_again(md, soft):
    with md.mem_reg(bytearray(64)) as base:
        window = base.derive()
        window.mkey_pack()
        soft.fault("destroy_mkey:status=9,syndrome=2")
        with pytest.raises(um.MemhError, match="DESTROY_MKEY"):
            window.invalidate()
        assert window.state == um.MemhState.REVOKING
        window.invalidate()
        assert window.state == um.MemhState.REVOKED
        assert md.stats()["device.destroy_mkey"] == 2


def test_locked_memory_limit_is_named(md, soft):
    old = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    soft.set("memlock", "enforce")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, old[1]))
    try:
        with pytest.raises(MemoryError, match=r"RLIMIT_MEMLOCK \(ulimit -l\) is 64 KiB"):
            md.mem_reg(bytearray(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, old)
        soft.set("memlock", "auto")


def test_registration_errors(md):
    with pytest.raises(um.MemhError) as caught:
        md.mem_reg(address=4096, length=4096, flags=MemFlag.REMOTE_GET | MemFlag.LOCAL_READ)
    assert caught.value.status == um.Status.INVALID_ADDR


def test_explain_says_what_is_what(md):
    text = md.explain()
    for word in ("software device", "KLM", "KSM", "ibv_fork_init"):
        assert word in text
    with md.mem_reg(bytearray(4096), MemFlag.ACCESS_ALL | MemFlag.DERIVED_ONLY) as base:
        assert "DERIVED_ONLY" in base.explain()
        assert "atomic right" in base.explain()
        with md.endpoint() as ep, base.derive(endpoint=ep) as window:
            window.mkey_pack()
            assert "bound to queue pair 0x" in window.explain()
            assert "unproven on hardware" in window.explain()
