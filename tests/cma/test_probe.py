# SPDX-License-Identifier: BSD-3-Clause
"""Available, or not for a reason; never a crash (user reports 8, 9)."""

import errno
import os
import tempfile

import pytest

import ucx_memh as um
from _cma import NOBODY, become
from ucx_memh_cma._probe import Calls, probe


class Spy:
    """Pretended system calls, and what was asked of them."""

    def __init__(self, self_test=0, ptracer=0, cap=False):
        self.asked = []
        self.calls = Calls(
            lambda: self.note("self_test", self_test),
            lambda: self.note("ptracer", ptracer),
            lambda: self.note("cap", cap),
        )

    def note(self, name, answer):
        self.asked.append(name)
        return answer


ABSENT, UNREADABLE = object(), object()


@pytest.fixture
def scope_file(tmp_path):
    def make(content):
        path = tmp_path / "ptrace_scope"
        if content is UNREADABLE:
            path.mkdir()  # root can read every file, but no directory
        elif content is not ABSENT:
            path.write_bytes(content)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("content", "spy", "available", "scope", "reason", "asked"),
    [
        (ABSENT, {}, True, None, "no Yama", []),
        (UNREADABLE, {}, True, None, "unreadable", []),
        (b"", {}, True, None, "not understood", []),
        (b"many\n", {}, True, None, "not understood", []),
        (b"\xff\xfe", {}, True, None, "not understood", []),
        (b"4\n", {}, True, None, "not known (4)", []),
        (b"-1", {}, True, None, "not known (-1)", []),
        (b"0\n", {}, True, 0, "scope 0", []),
        (b"0", {}, True, 0, "scope 0", []),
        (b"1\n", {}, True, 1, "PR_SET_PTRACER_ANY is set", ["ptracer"]),
        (b"1", {}, True, 1, "PR_SET_PTRACER_ANY is set", ["ptracer"]),
        (b"1", {"ptracer": errno.EINVAL}, True, 1, "knows no PR_SET_PTRACER", ["ptracer"]),
        (b"1", {"ptracer": errno.EPERM}, False, 1, "PR_SET_PTRACER was refused", ["ptracer"]),
        (b"2\n", {"cap": True}, True, 2, "scope 2", ["cap"]),
        (b"2\n", {"cap": False}, False, 2, "CAP_SYS_PTRACE", ["cap"]),
        (b"3\n", {"cap": True}, False, 3, "nobody", []),
        (ABSENT, {"self_test": errno.ENOSYS}, False, None, "Function not implemented", []),
        (b"0", {"self_test": errno.EPERM}, False, None, "not permitted", []),
    ],
)
def test_probe_table(scope_file, content, spy, available, scope, reason, asked):
    spy = Spy(**spy)
    result = probe(scope_file(content), opening=True, calls=spy.calls)
    assert (result.available, result.scope) == (available, scope)
    assert reason in result.reason
    assert "\n" not in result.reason
    assert spy.asked == ["self_test", *asked]
    assert result.ptracer_calls == asked.count("ptracer")


def test_asking_changes_nothing(scope_file):
    spy = Spy()
    result = probe(scope_file(b"1"), calls=spy.calls)
    assert result.available
    assert spy.asked == ["self_test"]


@pytest.mark.parametrize("content", [ABSENT, UNREADABLE, b"0", b"1\n", b"x"])
def test_opens_and_the_probe_ran(scope_file, content):
    with um.open_md("cma", yama_scope_path=scope_file(content)) as md:
        assert md.stats()["device.ptracer_calls"] == (content == b"1\n")
        assert "probe: " in md.explain()


def test_refused_with_a_reason(scope_file):
    with pytest.raises(um.NoDeviceError, match="Yama scope 3"):
        um.open_md("cma", yama_scope_path=scope_file(b"3"))


def without_capabilities(conn):
    become(NOBODY)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"2\n")
        file.flush()
        try:
            um.open_md("cma", yama_scope_path=file.name)
        except um.NoDeviceError as error:
            return str(error)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_scope_2_without_the_capability(peer, scope_file):
    with um.open_md("cma", yama_scope_path=scope_file(b"2")) as md:  # root has it
        assert "scope 2" in md.explain()
    assert "CAP_SYS_PTRACE" in peer(without_capabilities).result()


@pytest.mark.parametrize(
    "config",
    [
        {"unknown": 1},
        {"peer_check_interval": "often"},
        {"peer_check_interval": -1},
        {"peer_check_interval": float("nan")},
        {"peer_check_interval": 1e9},
        {"peer_check_interval": None},
    ],
)
def test_wrong_configuration(config):
    with pytest.raises(um.InvalidParamError):
        um.open_md("cma", **config)


def test_no_other_domain():
    with pytest.raises(um.NoDeviceError, match="mlx5_0"):
        um.open_md("cma/mlx5_0")


def test_what_it_says_of_itself(md):
    assert um.query_mds("cma") == [um.MdResource("cma", "memory", software=False)]
    assert md.attr.flags == um.MdFlag.REG | um.MdFlag.NEED_RKEY | um.MdFlag.ENDPOINT
    assert md.attr.rkey_packed_size == 0
    assert not md.attr.software
    table = md.attr.enforcement
    cooperative, none = um.Enforcement.COOPERATIVE, um.Enforcement.NONE
    for row in (table.rights, table.range):
        assert (row.get, row.put, row.atomic) == (cooperative, cooperative, none)
    assert {table.revoke.get, table.revoke.put, table.revoke.atomic} == {none}
    memh = md.mem_reg(bytearray(64))
    assert memh.enforcement == table
    text = md.explain(memh)
    assert "COOPERATIVE" in text
    assert "revoke: NONE" in text
