# SPDX-License-Identifier: BSD-3-Clause
"""The rules of who may use whom, read from the sources; nothing has to be built for it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

ROOT = Path(__file__).parent.parent
CORE = ROOT / "ucx_memh"
BACKENDS = sorted(path for path in ROOT.glob("backends/*/ucx_memh_*") if path.is_dir())
PARTS = CORE / "core.src"

PYTHON = (".py", ".pyi")
CYTHON = (".pyx", ".pxd", ".pxi")
C = (".c", ".h")
MADE = {".git", ".venv", "build", "dist", "__pycache__", "shared"}  # not ours or not written

# The modules of ours that a backend may use, beside its own.
PUBLIC = {"libmemh", "core", "errors", "flags", "resources", "config", "hookspecs"}
PUBLIC |= {"python_backend"}
ALSO = {"ucx_memh_ib_mlx5": {"ucx_memh_ib.options", "ucx_memh_ib.verbs"}}  # by one backend alone


def files(*rooms: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = [path for room in rooms for path in sorted(room.rglob("*")) if path.suffix in suffixes]
    return [path for path in found if not MADE & set(path.relative_to(ROOT).parts)]


_TOKENS = {
    "c": re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.S),
    "py": re.compile(
        r'[rbfRBF]{0,2}(?:"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''
        r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|#[^\n]*',
        re.S,
    ),
}


def code(path: Path, strings: bool = False) -> str:
    """A file's text without its comments, and without its strings unless `strings`."""

    def blank(match: re.Match[str]) -> str:
        text = match[0]
        comment = text[0] == "#" or text[:2] in ("/*", "//")
        return text if strings and not comment else re.sub(r"[^\n]", " ", text)

    return _TOKENS["c" if path.suffix in C else "py"].sub(blank, path.read_text())


def found(pattern: str, paths: list[Path], strings: bool = False) -> list[str]:
    """The places in code where `pattern` is, as "file:line: text" for a failing assert."""
    assert paths, "no files: the rule looks at nothing"
    places = []
    for path in paths:
        lines = code(path, strings).splitlines()
        places += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in enumerate(lines, 1)
            if re.search(pattern, line)
        ]
    return places


IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(\([^)]*\)|[^\n]*)|c?import[ \t]+([^\n]*))",
    re.M,
)


def imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(module, names) for each import and cimport; no names: the module itself."""
    for match in IMPORT.finditer(code(path)):
        module, names, plain = match.groups()
        if plain is None:
            yield (
                module,
                [name.split()[0] for name in re.split(r"[,()\s]*[,()]\s*|\n", names) if name],
            )
        else:
            yield from ((name.split()[0], []) for name in plain.split(",") if name.strip())


def ours(paths: list[Path]) -> Iterator[tuple[Path, str, list[str]]]:
    """The imports of this project's modules, absolute ones."""
    for path in paths:
        for module, names in imports(path):
            if module.partition(".")[0].startswith("ucx_memh"):
                yield path, module, names


# ---- the headers ----


def test_python_h_is_for_pyapi_alone():
    places = found(r"\bPython\.h\b", files(CORE, ROOT / "backends", suffixes=C), strings=True)
    assert [
        place for place in places if not place.startswith("ucx_memh/include/ucx_memh/pyapi.h")
    ] == []


FOR_BACKENDS = {"symbol_table.h", "process.h"}  # helpers, which use the system


def test_headers_include_only_standard_ones_and_each_other():
    apart = {"pyapi.h", *FOR_BACKENDS}
    headers = [p for p in files(CORE / "include", suffixes=C) if p.name not in apart]
    used = {m for path in headers for m in re.findall(r"#\s*include\s+(\S+)", code(path, True))}
    assert used <= {"<stddef.h>", "<stdint.h>", "<ucx_memh/memh.h>", "<ucx_memh/backend.h>"}


def test_headers_hold_no_storage():
    storage = r"\bstatic\b(?!\s+inline\b)|\bextern\b(?! \"C\")"
    assert found(storage, files(CORE / "include", suffixes=C), strings=True) == []


def test_libmemh_is_externs_only():
    lines = code(CORE / "libmemh.pxd").splitlines()
    blocks = [line for line in lines if line.startswith("cdef ")]
    assert len(blocks) == 2
    assert all(line.startswith("cdef extern from") for line in blocks)


# ---- the core ----


def test_core_includes_its_parts_once_and_all():
    included = re.findall(r'^include "core\.src/(\w+\.pxi)"', code(CORE / "core.pyx", True), re.M)
    assert len(included) == len(set(included)) > 5
    assert set(included) == {path.name for path in PARTS.iterdir()}
    assert found(r"^\s*include\b", files(PARTS, suffixes=CYTHON)) == []


FUNCTIONS = re.compile(r"^(?:cdef|cpdef|def)\b[^\n(:=]*?(\w+)\(", re.M)
TYPES = re.compile(r"^(?:cdef|ctypedef|class)\b(?:.*\b(?:struct|union|enum|class))?\s+(\w+):", re.M)


def test_core_parts_do_not_look_back():
    """Each part calls functions and names types that stand above it; core.pxd declares ahead."""
    order = re.findall(r'^include "core\.src/(\w+\.pxi)"', code(CORE / "core.pyx", True), re.M)
    ahead = set(re.findall(r"\w+", code(CORE / "core.pxd")))
    for part in order:  # and so does a type that is named before it is described
        ahead |= set(re.findall(r"^(?:cdef|ctypedef) struct (\w+)$", code(PARTS / part), re.M))
    places, below = [], {}  # name -> the part, further down, that defines it
    for part in reversed(order):
        text = code(PARTS / part)
        functions, types = set(FUNCTIONS.findall(text)), set(TYPES.findall(text))
        used = set(re.findall(r"(?<![\w.])(\w+)(?=\()", text)) | set(re.findall(r"\w+_t\b", text))
        places += [f"{part} uses {name} of {below[name]}" for name in used & set(below) - functions]
        below |= dict.fromkeys((functions | types) - ahead, part)
    assert len(below) > 20, "the rule sees no definitions"
    assert places == []


def test_core_has_no_vendors_word():
    paths = [*CORE.glob("core*.p*"), CORE / "libmemh.pxd", *files(PARTS, suffixes=CYTHON)]
    vendors = r"(?i)ibv|mlx|cuda|infiniband|rdma|devx|process_vm|nvidia|rocm"
    places = found(vendors, paths, strings=True)
    # A memory type of UCX's and the protocol of that name, of which a docstring speaks.
    neutral = r"UCXM_MEM_TYPE_CUDA|`__cuda_array_interface__`"
    assert [place for place in places if not re.search(neutral, place)] == []


LEAVES = {
    "flags.py": set(),
    "buffers.py": {"ucx_memh.errors", "ucx_memh.flags"},
    "errors.py": {"ucx_memh.flags"},
    "config.py": {"ucx_memh.errors"},
    "resources.py": {"ucx_memh.config", "ucx_memh.flags"},
    "hookspecs.py": {"ucx_memh.resources", "ucx_memh.core"},  # the latter for types only
}


@pytest.mark.parametrize("name", LEAVES)
def test_light_modules(name):
    assert {module for _, module, _ in ours([CORE / name])} <= LEAVES[name]


LIGHT = ("libmemh", "buffers", "errors", "flags", "resources")


def test_core_imports_light_modules_only():
    paths = [CORE / "core.pyx", *files(PARTS, suffixes=CYTHON)]
    used = set()
    for _, module, names in ours(paths):
        used |= {f"ucx_memh.{name}" for name in names} if module == "ucx_memh" else {module}
    assert used <= {f"ucx_memh.{name}" for name in LIGHT}


# ---- plugins ----


def test_pluggy_is_imported_by_two_files():
    paths = files(CORE, *BACKENDS, suffixes=PYTHON + CYTHON)
    users = {
        path.name for path in paths for module, _ in imports(path) if module.startswith("pluggy")
    }
    assert users == {"hookspecs.py", "plugins.py"}


def test_hooks_are_not_compiled():
    """pluggy does not see a function that Cython compiled, and says nothing."""
    assert found(r"\bhookimpl\b", files(CORE, *BACKENDS, suffixes=CYTHON)) == []


# ---- backends ----


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda path: path.name)
def test_backend_uses_public_names_only(backend):
    places = []
    for path, module, names in ours(files(backend, suffixes=PYTHON + CYTHON)):
        top, _, rest = module.partition(".")
        if top == backend.name:
            continue
        allowed = (
            module in ALSO.get(backend.name, ())
            or any(f"{module}.{n}" in ALSO.get(backend.name, ()) for n in names)
            or (top == "ucx_memh" and (rest in PUBLIC or not rest))
        )
        if not allowed or any(part.startswith("_") for part in [*rest.split("."), *names]):
            places.append(f"{path.relative_to(ROOT)}: {module} {names}")
    assert places == []


def test_backends_do_not_look_into_the_core():
    paths = files(ROOT / "backends", suffixes=PYTHON + CYTHON + C)
    assert found(r"core\.src|ucx_memh/_", paths, strings=True) == []


def test_backend_folders_have_the_packages_name():
    """Cython ignores a .pxd in a folder of another name than its package."""
    assert BACKENDS
    for path in BACKENDS:
        assert path.name == f"ucx_memh_{path.parent.name}"


# ---- testing ----


def test_testing_uses_public_names_and_no_backend():
    for path, module, names in ours(files(CORE / "testing", suffixes=PYTHON + CYTHON)):
        own = module.startswith("ucx_memh.testing")
        assert own or module.partition(".")[0] == "ucx_memh", (path, module)
        assert own or not [n for n in [*module.split("."), *names] if n.startswith("_")], (
            path,
            module,
        )


# ---- manners ----


CALLS = r"(?<![\w.>])(f?printf|puts|putchar|perror|print|abort|assert|_?exit|signal|sigaction)\s*\("
PYTHON_CALLS = (
    r"\b(sys\.exit|os\._exit|os\.abort|signal\.signal|logging\.basicConfig|warnings\.warn)\b"
)


def test_quiet_and_alive():
    """The library neither prints nor ends the process, and leaves signals and logging alone."""
    rooms = [CORE.joinpath(name) for name in ("core.pyx", "plugins.py", "hookspecs.py")]
    rooms += files(PARTS, CORE / "include", ROOT / "backends", suffixes=PYTHON + CYTHON + C)
    assert found(CALLS, rooms) == []
    assert found(PYTHON_CALLS, [path for path in rooms if path.suffix not in C]) == []


def test_no_compile_time_conditions():
    """DEF and IF are deprecated in Cython 3: C macros do it."""
    assert found(r"^\s*(DEF|IF|ELIF|ELSE)\b", files(CORE, *BACKENDS, suffixes=CYTHON)) == []


# The names are put together here so that this file does not have what it looks for.
ELSEWHERE = [
    r"\.\./" + "shared",
    "/" + r"(work|root|home)/",
    "py" + "env",
    r"index[-_]" + "url",
    r"https?://[\w.]*" + r"(pypi|pythonhosted|debian\.org)",
    r"\b(architecture|semantics|models|user_reports|softmlx5_probe|rxe_lane)" + r"\.md\b",
]


def test_names_nothing_outside_the_repository():
    paths = [
        path
        for path in sorted(ROOT.rglob("*"))
        if path.is_file()
        and not MADE & set(path.relative_to(ROOT).parts)
        and not any(part.endswith((".egg-info", "_cache", ".hypothesis")) for part in path.parts)
        and path.suffix not in (".so", ".pyc")
    ]
    assert len(paths) > 30
    places = []
    for path in paths:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if any(re.search(pattern, line) for pattern in ELSEWHERE):
                places.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert places == []


# ---- the rules can fail ----


@pytest.mark.parametrize(
    ("name", "text", "pattern", "lines"),
    [
        ("x.c", 'int f(void) { /* abort() */ return puts("abort()"); }', r"abort", []),
        ("x.c", "/* one\ntwo */ abort();", r"abort", [2]),
        ("x.py", '"""abort()"""\n# abort()\nabort()', r"abort", [3]),
        ("x.pyx", "f('it''s # not')  # abort\nabort()", r"abort", [2]),
    ],
)
def test_comments_and_strings_do_not_count(tmp_path, name, text, pattern, lines):
    path = tmp_path / name
    path.write_text(text)
    seen = [n for n, line in enumerate(code(path).splitlines(), 1) if re.search(pattern, line)]
    assert seen == lines


def test_imports_are_seen(tmp_path):
    path = tmp_path / "x.pyx"
    path.write_text(
        "cimport cython\nimport os, sys as s\nfrom a.b cimport c as d, e\n"
        "from f import (\n    g,  # why\n    _h as h,\n)\nfrom .i import *\n"
    )
    assert list(imports(path)) == [
        ("cython", []),
        ("os", []),
        ("sys", []),
        ("a.b", ["c", "e"]),
        ("f", ["g", "_h"]),
        (".i", ["*"]),
    ]
