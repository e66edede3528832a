# SPDX-License-Identifier: BSD-3-Clause
"""examples/pgas: what comes out is NumPy's, also when a rank is lost in the middle."""

import os
import re
import shutil
import signal
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.source,
    pytest.mark.skipif(not find_spec("ucx_memh_ib_mlx5"), reason="ib_mlx5 was left out"),
]
HEAP = ("--heap", str(4 << 20))
SMALL = {
    "gups": ("--table", "1001", "--updates", "500", *HEAP),
    "histogram": ("--bins", "103", "--numbers", "5000", *HEAP),
    "stencil": ("--rows", "31", "--columns", "20", "--steps", "12", "--every", "4", *HEAP),
}
SAYS = {
    "gups": "words that differ from NumPy's: 0",
    "histogram": "bins that differ from NumPy's, in what all ranks see: 0",
    "stencil": "the grid is NumPy's, to the last bit: True",
}


@pytest.fixture
def pgas(example):
    return lambda program, *args, **options: example(f"pgas/{program}", *args, **options)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("program", SMALL)
def test_it_is_numpys(pgas, program, ranks):
    status, text = pgas(program, "--ranks", str(ranks), *SMALL[program])
    assert status == 0, text
    assert SAYS[program] in text
    assert f", {ranks} ranks" in text
    assert "2 of 2 checks hold" in text


@pytest.mark.parametrize(
    "ranks, fail, victim", [(2, "kill", 1), (4, "kill", 2), (2, "hang", 0), (4, "hang", 3)]
)
def test_a_lost_rank_is_cut_off_and_the_others_finish(pgas, ranks, fail, victim):
    """A SIGKILL, or a SIGSTOP and late writes after SIGCONT, in the middle of a stream of puts."""
    more = ("--ranks", str(ranks), "--fail", fail, "--victim", str(victim))
    status, text = pgas("stencil", *more, *SMALL["stencil"])
    assert status == 0, text
    assert SAYS["stencil"] in text
    assert f"rank {victim} goes mad in step 6" in text
    assert f"revoked by {ranks - 1} others" in text
    assert re.search(r"its writes: [1-9]\d* to each had come before that, 0 came after it", text)
    assert f"{ranks - 1} left: back to step 4" in text
    assert text.count("REMOTE_ACCESS") == (ranks - 1 if fail == "hang" else 0)


@pytest.mark.parametrize("program", SMALL)
def test_half_of_the_ranks_on_another_host(two_hosts, program):
    (here, text), (there, more) = two_hosts(f"pgas/{program}", "--ranks", "3", *SMALL[program])
    assert (here, there) == (0, 0), text + more
    assert SAYS[program] in text
    assert "ranks 1, 2 of 3\nThe launcher says:\n2 of 2 checks hold\n" in more


@pytest.mark.parametrize("fail, victim", [("hang", 3), ("hang", 0), ("kill", 2)])
def test_a_rank_of_either_host_may_be_lost(two_hosts, fail, victim):
    options = ("--fail", fail, "--victim", str(victim), *SMALL["stencil"])
    (here, text), (there, more) = two_hosts("pgas/stencil", *options)
    assert (here, there) == (0, 0), text + more
    assert SAYS["stencil"] in text
    assert re.search(r"its writes: [1-9]\d* to each had come before that, 0 came after it", text)
    assert text.count("REMOTE_ACCESS") == (3 if fail == "hang" else 0)


def test_the_picture_shows_the_revocations(pgas, tmp_path):
    where = tmp_path / "stencil.svg"
    more = ("--fail", "hang", "--picture", str(where))
    status, text = pgas("stencil", *more, *SMALL["stencil"])
    assert (status, f"wrote {where}" in text) == (0, True)
    titles = [each.text for each in ET.parse(where).iter("{http://www.w3.org/2000/svg}title")]
    for rank in range(3):
        assert f"rank {rank}: revoked 3" in titles
    for what in ("stopped", "woken", "refused"):
        assert f"rank 3: {what}" in titles


@pytest.mark.parametrize(
    "program, args, said",
    [
        ("gups", ["--ranks", "0"], "--ranks must be at least 1"),
        ("gups", ["--updates", "0"], "--updates must be at least 1"),
        ("histogram", ["--bins", "-1"], "--bins must be at least 1"),
        ("stencil", ["--ranks", "1", "--fail", "kill"], "--fail needs at least 2 ranks"),
        ("stencil", ["--victim", "4"], "there is no rank 4"),
        ("stencil", ["--rows", "3"], "the grid needs a row for each rank"),
        ("stencil", ["--picture", "."], "no file can be '.'"),
        ("stencil", ["--fail", "sleep"], "invalid choice: 'sleep'"),
        ("stencil", ["--backend", "cma"], "cma has no derived keys"),
        ("stencil", ["--picture", "x.svg", "--listen", "[::1]:1"], "--picture needs one clock"),
        ("gups", ["--ranks", "1", "--listen", "[::1]:1"], "--listen needs at least 2 ranks"),
        ("gups", ["--connect", ":1"], "want HOST:PORT, not ':1'"),
    ],
)
def test_wrong_arguments(pgas, program, args, said):
    assert pgas(program, *args, stderr=f"usage: .*error: .*{said}.*\n")[0] == 2


@pytest.mark.parametrize("program", ["gups", "histogram"])
def test_a_heap_that_is_too_small_says_so(pgas, program):
    said = "(the heap has 64 bytes, and they are used up\n){4}"
    status, text = pgas(program, "--heap", "64", stderr=said)
    assert status == 1
    assert "FAILED: a rank failed" in text and "0 of 2 checks hold" in text


LONG = {
    "gups": ("--updates", "100000"),
    "stencil": ("--steps", "5000"),
}


@pytest.mark.parametrize("program", LONG)
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_dies_unasked_fails_the_program_in_few_words(interrupted, program, victim):
    status, said, errors = interrupted(
        lambda _process, pids: os.kill(pids[victim], signal.SIGKILL),
        f"pgas/{program}",
        *LONG[program],
    )
    assert status == 1 and "FAILED: a rank failed" in said and "0 of 2 checks hold" in said
    assert re.fullmatch(r"(rank \d gives up: .*\n){3}", errors), errors


@pytest.mark.parametrize("program", LONG)
def test_an_interrupt_ends_it(interrupted, program):
    status, _said, errors = interrupted(
        lambda process, _pids: os.killpg(process.pid, signal.SIGINT),
        f"pgas/{program}",
        *LONG[program],
    )
    assert status == 130
    assert "Traceback" not in errors


def test_a_lost_update_is_noticed(root, python, tmp_path):
    """GUPS with one update of 2000 left out, by one rank."""
    shutil.copytree(root / "examples", tmp_path / "examples")
    world = tmp_path / "examples/pgas/world.py"
    first = "ranks, places = np.divmod(indices, self.block)"
    text = world.read_text()
    assert text.count(first) == 1
    lose = "if self.part.world.rank == 1: indices, values = indices[1:], values[1:]\n        "
    world.write_text(text.replace(first, lose + first))
    done = python(tmp_path / "examples/pgas/gups.py", *SMALL["gups"], check=False)
    assert done.returncode == 1, done.stderr
    assert "words that differ from NumPy's: 1\n" in done.stdout
    assert "FAILED: the table is not NumPy's" in done.stdout


def test_the_tutorial_shows_what_it_prints(pgas, root, words):
    """But for the numbers."""
    tutorial = (root / "docs/pgas.md").read_text()
    gups, hang, *_two_hosts = re.findall(r"^```\n(ucx_memh.*?)^```", tutorial, re.S | re.M)
    assert words(gups) == words(pgas("gups", *SMALL["gups"])[1])
    assert words(hang) == words(pgas("stencil", "--fail", "hang", *SMALL["stencil"])[1])
