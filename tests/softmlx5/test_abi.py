# SPDX-License-Identifier: BSD-3-Clause
"""The library as a loader sees it: nodes, names, inline layouts, unmodified programs."""

import ctypes as C
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from softmlx5 import sm5

REAL = [Path("/usr/lib/x86_64-linux-gnu") / n for n in ("libibverbs.so.1", "libmlx5.so.1")]
NEWER = {"MLX5_1.25"}


def exported(path):
    out = subprocess.run(["readelf", "-W", "--dyn-syms", path], capture_output=True, text=True)
    return set(
        re.findall(r"(?:FUNC|OBJECT)\s+GLOBAL\s+DEFAULT\s+(?!UND)\S+\s+(\S+?@@?\S+)", out.stdout)
    )


def nodes(path):
    out = subprocess.run(["readelf", "-W", "-V", path], capture_output=True, text=True).stdout
    out = out.split("Version definition section")[1].split("Version needs section")[0]
    return set(re.findall(r"Name: (\S+)", out)) - {
        "libsoftmlx5.so",
        "libibverbs.so.1",
        "libmlx5.so.1",
    }


needs_readelf = pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
needs_real = pytest.mark.skipif(not all(p.exists() for p in REAL), reason="no rdma-core to compare")


@needs_readelf
@needs_real
def test_every_name_has_the_node_of_the_real_library():
    ours = {s for s in exported(sm5.library_path()) if not s.endswith("SOFTMLX5_1.0")}
    real = exported(REAL[0]) | exported(REAL[1])
    assert ours
    strangers = {s for s in ours - real if s.split("@")[-1] not in NEWER}
    assert not strangers


@needs_readelf
@needs_real
def test_every_node_is_there():
    real = nodes(REAL[0]) | nodes(REAL[1])
    assert real
    assert real <= nodes(sm5.library_path())


@needs_readelf
def test_own_soname_libc_only_and_no_inner_binding():
    d = subprocess.run(["readelf", "-W", "-d", sm5.library_path()], capture_output=True, text=True)
    assert "[libsoftmlx5.so]" in d.stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", d.stdout)) <= {"libc.so.6", "libpthread.so.0"}
    assert "NODELETE" in d.stdout
    r = subprocess.run(["readelf", "-W", "-r", sm5.library_path()], capture_output=True, text=True)
    assert not re.search(r"\b(ibv_|mlx5dv_|softmlx5_)\w+", r.stdout)


def test_structures_have_the_size_of_the_headers(tmp_path):
    if not shutil.which("gcc") or not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("no compiler or headers")
    pairs = {
        "ibv_send_wr": sm5.SendWr,
        "ibv_recv_wr": sm5.RecvWr,
        "ibv_wc": sm5.Wc,
        "ibv_mr": sm5.Mr,
        "ibv_qp_attr": sm5.QpAttr,
        "ibv_qp_init_attr": sm5.QpInit,
        "ibv_mw": sm5.Mw,
        "ibv_port_attr": sm5.PortAttr,
        "ibv_mw_bind": sm5.MwBind,
    }
    src = tmp_path / "s.c"
    body = "".join(f'printf("%zu\\n", sizeof(struct {n}));' for n in pairs)
    src.write_text(
        "#include <infiniband/verbs.h>\n#include <stdio.h>\nint main(void) {" + body + "return 0; }"
    )
    subprocess.run(["gcc", src, "-o", tmp_path / "s"], check=True)
    out = subprocess.run(
        [tmp_path / "s"], capture_output=True, text=True, check=True
    ).stdout.split()
    sizes = dict(zip(pairs, map(int, out), strict=True))
    if sizes["ibv_port_attr"] == sm5.PortAttr.active_speed_ex.offset:
        sizes["ibv_port_attr"] = C.sizeof(sm5.PortAttr)
    assert sizes == {name: C.sizeof(struct) for name, struct in pairs.items()}


@pytest.fixture
def links(tmp_path):
    for n in ("libibverbs.so.1", "libmlx5.so.1"):
        (tmp_path / n).symlink_to(sm5.library_path())
    return {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}


def tool(name):
    p = shutil.which(name)
    if not p:
        pytest.skip(f"{name} is not installed")
    return p


def test_ibv_devices(links):
    p = subprocess.run(
        [tool("ibv_devices")],
        env={**links, "SOFTMLX5_DEVICES": "2"},
        capture_output=True,
        text=True,
    )
    assert p.returncode == 0 and not p.stderr
    guids = re.findall(r"softmlx5_\d\s+([0-9a-f]{16})", p.stdout)
    assert len(guids) == 2 and guids[0] != guids[1]


def test_ibv_devinfo(links):
    p = subprocess.run([tool("ibv_devinfo"), "-v"], env=links, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    for want in ("softmlx5_0", "0x02c9", "4123", "PORT_ACTIVE", "ATOMIC_HCA", "GID[  0]"):
        assert want in p.stdout


@pytest.mark.parametrize("options", [[], ["-g", "0"], ["-e"]])
def test_ibv_rc_pingpong(links, options):
    """By LID, by GID, and sleeping for completion events."""
    exe = [tool("ibv_rc_pingpong"), "-n", "200", "-p", str(20000 + os.getpid() % 10000), *options]
    server = subprocess.Popen(exe, env=links, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        for _ in range(50):
            client = subprocess.run([*exe, "localhost"], env=links, capture_output=True, timeout=20)
            if client.returncode == 0 or server.poll() is not None:
                break
            time.sleep(0.05)  # it does not listen yet
        assert client.returncode == 0, client.stderr
        out = server.communicate(timeout=20)[0]
        assert server.returncode == 0 and b"200 iters" in out
    finally:
        server.kill()
        server.wait()


def test_no_output_no_files(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from sm5 import *\n"
        "d = Device(); qa, qb = pair(d); b = Buf(64); m = d.reg(b)\n"
        "assert qa.run(READ, [(b.addr, 8, m.contents.lkey)], b.addr, 0xdead) == REM_ACCESS\n"
    )
    before = set(os.listdir("/dev/shm")), set(os.listdir("/tmp"))
    p = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], capture_output=True, cwd=tmp_path
    )
    assert (p.returncode, p.stdout, p.stderr) == (0, b"", b"")
    assert not os.listdir(tmp_path)
    assert set(os.listdir("/dev/shm")) <= before[0]
    assert not [f for f in set(os.listdir("/tmp")) - before[1] if "softmlx5" in f]


def test_stat_names_are_all_readable():
    names = sm5.stat_names()
    assert len(names) == len(set(names)) > 20
    for n in names:
        sm5.stat(n)
    with pytest.raises(AssertionError):
        sm5.stat("no.such.counter")
