# SPDX-License-Identifier: BSD-3-Clause
"""The demo, as a person runs it."""

import os

import pytest

SMALL = ("--size", "4")


@pytest.fixture
def demo(python):
    def run(*args, env=None, **options):
        env = {**os.environ, **(env or {})}
        return python("-m", "ucx_memh", "demo", *args, env=env, **options)

    return run


def verdict(done):
    good, _, rest = done.stdout.splitlines()[-1].partition(" of ")
    return int(good), int(rest.split()[0])


def row(done, title):
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(title)]
    return line


def test_cuts_one_peer_off(demo):
    done = demo(*SMALL)
    good, all_of_them = verdict(done)
    assert good == all_of_them > 20
    assert done.stderr == ""
    assert "made of SOFTWARE" in done.stdout
    assert row(done, "register, once").endswith("1 REG_MR                   grows with size")
    assert "no command" in row(done, "derive 3 handles")
    assert "4 CREATE_MKEY" in row(done, "pack their keys (first time)")
    assert "no command" in row(done, "pack them again")
    assert row(done, "revoke the writer, while it streams writes").endswith("1 DESTROY_MKEY")
    assert "refused by the device: REMOTE_ACCESS" in row(done, "writer's write number")
    assert "refused by its own library: REVOKED" in row(done, "writer tries again")


def test_cma_shows_what_it_refuses(demo):
    done = demo(*SMALL, "--backend", "cma")
    good, all_of_them = verdict(done)
    assert good == all_of_them > 8
    assert "SOFTWARE" not in done.stdout
    assert "UNSUPPORTED" in row(done, "derive a key for each peer")
    assert "UNSUPPORTED" in row(done, "deregister, promising that no key works")


@pytest.mark.parametrize("size", [0, 1, 4097, 1_000_003])
@pytest.mark.parametrize("backend", ["ib_mlx5", "cma"])
def test_files_of_any_size(demo, tmp_path, size, backend):
    path = tmp_path / "served"
    path.write_bytes(os.urandom(size))
    content = path.read_bytes()
    done = demo("--file", str(path), "--backend", backend)
    good, all_of_them = verdict(done)
    assert good == all_of_them
    assert f"file served: {size} bytes" in done.stdout
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("--file", "/does/not/exist"), 1, "No such file"),
        (("--backend", "nix"), 2, "no component 'nix'"),
        (("--size", "0"), 2, "--size must be at least 1"),
    ],
)
def test_mistakes_are_one_line(demo, args, status, says):
    done = demo(*args, check=False)
    assert done.returncode == status
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_broken_promise_is_told(demo):
    """A device that cannot destroy the key: the demo does not say that all is well."""
    env = {"SOFTMLX5_CONF": "fault=destroy_mkey:status=0x0b,syndrome=0x1234"}
    done = demo(*SMALL, env=env, check=False)
    assert done.returncode == 1
    assert "DESTROY_MKEY of key" in done.stderr
