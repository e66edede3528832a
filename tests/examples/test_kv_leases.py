# SPDX-License-Identifier: BSD-3-Clause
"""examples/kv_leases.py: what it prints is so, and it notices when it is not."""

import os
import re
import signal
import xml.etree.ElementTree as ET
from functools import partial
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.source,
    pytest.mark.skipif(not find_spec("ucx_memh_ib_mlx5"), reason="ib_mlx5 was left out"),
]
SMALL = ("--leases", "400", "--blocks", "32", "--block-size", "1024", "--late", "4")
LONG = ("--leases", "40000", "--blocks", "64", "--block-size", "1024")


@pytest.fixture
def leases(example):
    return partial(example, "kv_leases")


def figure(text, pattern):
    (found,) = re.findall(pattern, text)
    return int(found)


@pytest.mark.parametrize("readers", [2, 4])
def test_late_readers_get_an_error_and_nothing_else(leases, readers):
    """Rows 50, 51 and 52 of what others report: reuse, re-export, an owner that is killed."""
    status, text = leases(*SMALL, "--readers", str(readers))
    assert status == 0, text
    assert "8 of 8 checks hold" in text
    untold = 2 * 4 * readers  # once after the end of a lease, once in the middle of reading
    assert figure(text, r"refused: (\d+) by the device") == untold
    assert figure(text, r"refused: (\d+) by the reader's library") >= 400
    assert figure(text, r"(\d+) reads wrong") == figure(text, r"late reads served: (\d+)") == 0
    assert figure(text, r"owner killed: (\d+) reads refused") == readers
    assert figure(text, r"next owner (\d+) old keys refused") == readers
    assert figure(text, r"(\d+) leases/s") > 100


@pytest.mark.parametrize("which", range(4), ids=["reader", "reader", "owner", "next owner"])
def test_a_process_that_is_lost_is_said_in_one_line(interrupted, which):
    status, _said, errors = interrupted(
        lambda _process, pids: os.kill(pids[which], signal.SIGKILL), "kv_leases", *LONG
    )
    assert (status, errors.count("\n")) == (1, 1), errors
    assert errors.startswith("another process of ours is gone: ")


def test_an_interrupt_ends_it_without_a_word(interrupted):
    status, _said, errors = interrupted(
        lambda process, _pids: os.killpg(process.pid, signal.SIGINT), "kv_leases", *LONG
    )
    assert (status, errors) == (130, "")


def test_the_checks_fail_where_keys_outlive_their_leases(leases):
    status, text = leases(*SMALL, "--no-revoke")
    assert status == 1
    assert "FAILED: a read gave another request's bytes" in text
    assert "FAILED: a late read was served" in text
    assert figure(text, r"(\d+) reads wrong") > 0


def test_the_picture_shows_leases_and_refusals(leases, tmp_path):
    where = tmp_path / "leases.svg"
    status, text = leases(*SMALL, "--picture", str(where))
    assert (status, f"wrote {where}" in text) == (0, True)
    titles = [each.text for each in ET.parse(where).iter("{http://www.w3.org/2000/svg}title")]
    assert sum(each.startswith("request") for each in titles) >= 8
    assert sum(each.endswith("refused") for each in titles) >= 4


def test_readers_of_another_host(two_hosts):
    """What they do is the owner's to say, and both end with his verdict."""
    (owner, text), (readers, there) = two_hosts("kv_leases", *SMALL, "--readers", "3")
    assert (owner, readers) == (0, 0), text + there
    assert figure(text, r"refused: (\d+) by the device") == 2 * 4 * 3
    assert there.endswith("3 readers; the owner says: 8 of 8 checks hold\n")
    (owner, text), (readers, there) = two_hosts("kv_leases", *SMALL, "--no-revoke")
    assert (owner, readers) == (1, 1)
    assert there.endswith("2 readers; the owner says: 5 of 8 checks hold\n")


@pytest.mark.parametrize(
    "args, said",
    [
        (["--readers", "1"], "--readers must be at least 2"),
        (["--blocks", "1"], "--blocks at least --readers"),
        (["--block-size", "100"], "--block-size must be a multiple of 64"),
        (["--backend", "cma"], "cma has no derived keys, so no lease can end"),
        (["--backend", "nobody"], "no component 'nobody'"),
        (["--picture", "/nowhere/x.svg"], "no file can be '/nowhere/x.svg'"),
        (["--listen", "7000"], "want HOST:PORT, not '7000'"),
        (["--connect", "here:port"], "want HOST:PORT, not 'here:port'"),
        (["--connect", "[::1]:1", "--listen", "[::1]:1"], "not allowed with argument --connect"),
    ],
)
def test_wrong_arguments(leases, args, said):
    assert leases(*args, stderr=f"usage: .*error: .*{said}.*\n") == (2, "")


def test_the_tutorial_shows_what_it_prints(leases, root, words):
    """But for the numbers."""
    tutorial = (root / "docs/kv-leases.md").read_text()
    shown, *_two_hosts, wrong = re.findall(
        r"^```\n(ucx_memh.*?|\d+ reads.*?)^```", tutorial, re.S | re.M
    )
    _status, text = leases(*SMALL)
    assert words(shown) == words(text)
    _status, text = leases(*SMALL, "--no-revoke")
    for line in words(wrong):
        assert line in "\n".join(words(text))
