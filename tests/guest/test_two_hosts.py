# SPDX-License-Identifier: BSD-3-Clause
"""Programs on two hosts, two guests: keys by TCP or by MPI, accesses by the kernel's RDMA."""

import re

import pytest

# The first use installs an MPI.
pytestmark = [pytest.mark.guest, pytest.mark.source, pytest.mark.timeout(900)]


@pytest.fixture
def lines(two):
    """`lines(name)`: what each of the two printed; it must have ended well."""

    def lines(name):
        both = [two.parts[number].get(name) for number in (1, 2)]
        assert all(part and part.status == 0 for part in both), two.stdout + two.stderr
        return [part.lines for part in both]

    return lines


@pytest.fixture
def shown(root):
    """`shown(page)`: the output in the section "On two hosts" of that page of docs/."""

    def shown(page):
        text = (root / "docs" / page).read_text()
        (section,) = re.findall(r"^## On two hosts\n(.*?)(?=^## |\Z)", text, re.S | re.M)
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.S | re.M)
        return [block for language, block in blocks if language in ("", "text")]

    return shown


def figure(lines, pattern):
    (found,) = re.findall(pattern, "\n".join(lines))
    return int(found)


def test_demo_across_two_hosts(lines):
    """Keys by TCP, accesses by the kernel's RDMA; each side has its account, and one verdict."""
    owner, peers = lines("demo")
    good, _, all_of_them, *_ = owner[-1].split()
    assert int(good) == int(all_of_them) > 20
    assert peers[-1] == owner[-1]
    assert owner[0].endswith(": ib/rxe0")

    def one(lines, start):
        (line,) = (line for line in lines if line.startswith(start))
        return line

    greeting = one(peers, "ucx_memh ")  # not the first line if the owner was later
    assert greeting.endswith(": ib/rxe0, peers of the owner at 10.77.0.1:7000")
    assert one(owner, "revoke the writer, while it streams").endswith("1 DEALLOC_MW")
    assert one(peers, "writer  write number ").endswith("refused by the device, REMOTE_ACCESS")
    # rxe does not look at a window's range: the library does, and the demo says so.
    assert "not by the device" in one(owner, "range ")
    assert "refused by its own library: RANGE" in one(owner, "writer reads outside its part")
    around = "writer reads outside, around its library"
    assert one(owner, around).endswith("let through by the device")


def test_leases_across_two_hosts(lines, shown, words):
    """Late readers on the other host are refused, told or not, and no byte is another's."""
    owner, readers = lines("leases")
    assert owner[-1] == "8 of 8 checks hold"
    assert figure(owner, r"(\d+) reads wrong") == figure(owner, r"late reads served: (\d+)") == 0
    assert figure(owner, r"refused: (\d+) by the device") == 2 * 4 * 2
    assert figure(owner, r"refused: (\d+) by the reader's library") >= 400
    assert figure(owner, r"owner killed: (\d+) reads refused") == 2
    assert figure(owner, r"next owner (\d+) old keys refused") == 2
    assert words("\n".join(owner + readers)) == words("".join(shown("kv-leases.md")))


def test_a_rank_on_the_other_host_is_cut_off(lines, shown, words):
    """It is stopped in the middle of its writes; nothing of those after it woke up arrives."""
    launcher, other = lines("stencil")
    assert launcher[-1] == other[-1] == "6 of 6 checks hold"
    assert other[1] == "ranks 2, 3 of 4"
    assert "rank 3 goes mad in step 6, and is stopped and taken for dead" in launcher
    before = r"its writes: (\d+) to each had come before that, 0 came after it"
    assert figure(launcher, before) > 0
    (woken,) = (line for line in launcher if line.startswith("it wakes up and writes on: "))
    assert woken.count("REMOTE_ACCESS") == 3
    assert "the grid is NumPy's, to the last bit: True" in launcher
    assert words("\n".join(launcher + other)) == words("".join(shown("pgas.md")))


def test_a_window_under_mpis_own_launcher(lines, shown):
    """Two ranks in each guest; rank 2, in the second one, is cut off and let in again."""
    printed, _ = lines("mpi")
    programs = [f"{name} done" for name in ("data", "atomics", "revoke", "regrant")]
    assert printed[-4:] == programs
    (text,) = shown("mpi.md")
    assert printed[:-4] == text.splitlines()
    assert printed[0] == "<Window ib, rank 0 of 4, revocable>"
