# SPDX-License-Identifier: BSD-3-Clause
"""The pages: their programs run and print what they say, and the reference leaves nothing out."""

import ast
import inspect
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

import ucx_memh as um
from _pages import blocks
from embed.test_consumers import link_flags
from ucx_memh import errors, flags, hookspecs, plugins, resources

pytestmark = pytest.mark.source

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def pages_with(language):
    pages = [page for page in PAGES if any(not block.by for block in blocks(page, language))]
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


# ---- what the pages say ----


@pages_with("python")
def test_python_prints_what_the_page_says(page, python):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "examples")}
    printed = json.loads(python(HERE / "_pages.py", page, env=env).stdout)
    assert printed == [block.prints for block in blocks(page, "python") if not block.by]


@pages_with("c")
def test_c_prints_what_the_page_says(page, tmp_path):
    found = blocks(page, "c")
    source = tmp_path / "program.c"
    source.write_text("".join(block.code for block in found))
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
    include = [f"-I{um.get_include()}", f"-I{sysconfig.get_path('include')}"]
    made = tmp_path / "program"
    command = [*compiler, "-Wall", "-Wextra", "-Werror", *include, source, "-o", made]
    done = subprocess.run([*command, *link_flags()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Py_Initialize() takes the Python that is first on PATH.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([made], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(block.prints for block in found)


def test_programs_that_others_run_are_run_by_them():
    by = [(page, block.by) for page in PAGES for block in blocks(page, "python") if block.by]
    assert len(by) > 2
    for page, test in by:
        assert page.name in (ROOT / test).read_text(), f"{test} does not run {page.name}"


def test_blocks_of_other_languages_are_none():
    """A misspelt language would be a block that nobody runs."""
    known = {"", "c", "python", "sh", "text", "console", "toml"}
    for page in PAGES:
        languages = set(re.findall(r"^```([\w+]+)$", page.read_text(), re.M))
        assert languages <= known, page


def test_the_key_has_the_size_that_the_readme_says(python):
    (size,) = re.findall(r"`win.mkey_pack\(\)`, (\d+) bytes", (ROOT / "README.md").read_text())
    code = (
        "import ucx_memh as um; md = um.open_md('ib_mlx5'); "
        "print(len(md.mem_reg(bytearray(9)).derive().mkey_pack()))"
    )
    assert python("-c", code).stdout.strip() == size


def test_the_tests_that_embedding_names_exist():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/embedding.md").read_text())
    assert len(named) > 20
    for file, test in named:
        assert f"\ndef {test}(" in (HERE / file).read_text(), f"{file}::{test}"


@pytest.mark.parametrize("page", ["embedding", "migrating"])
def test_the_calls_that_a_page_names_exist(page):
    header = (ROOT / "ucx_memh/include/ucx_memh/memh.h").read_text()
    calls = set(re.findall(r"\(\*(\w+)\)\(", header))
    known = calls | set(re.findall(r"\b(?:UCXM|ucxm)_\w+", header))
    text = (ROOT / f"docs/{page}.md").read_text()
    table = text.split("## Which call for which" if page == "embedding" else "## Call by call")[1]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", table, re.M)
    named = {word for row in rows for word in re.findall(r"`((?:UCXM_)?\w+_\w+)\b", row)}
    assert len(named) > 15
    known |= {"buffer_release"}  # of UCX, which embedding.md says that there is none of
    assert {word for word in named if not word.endswith("_")} - known == set()


def row_of(table, *cells):
    """The rest of the row of a Markdown table that begins with these cells."""
    start = "".join(f"| {cell} " for cell in cells) + "|"
    (row,) = [line for line in table.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in row[len(start) :].strip(" |").split("|")]


def test_the_key_kinds_are_those_of_the_code():
    from ucx_memh.core import key_kinds

    text = (ROOT / "docs/guarantees.md").read_text()
    for kind in key_kinds():
        made, wants, rights, revoked, destroyed = row_of(text, kind["kind"])
        assert made.strip("`") in (kind["made"], kind["made"].replace("mkey_pack", "`mkey_pack"))
        assert wants.strip("`") == (kind["needs"].name or "")
        granted = um.MemFlag(0)
        for word in rights.split(", "):
            granted |= um.MemFlag[f"REMOTE_{word.upper()}"]
        assert granted == kind["rights"]
        assert (revoked, destroyed.replace("`", "")) == (kind["revocable_by"], kind["destroyed"])


@pytest.mark.parametrize(
    ("component", "where"),
    [
        ("ib_mlx5", "softmlx5"),
        ("ib", "softmlx5"),
        ("cma", "any Linux"),
        ("cuda_ipc", "any CUDA driver"),
    ],
)
def test_the_guarantees_are_those_of_the_domain(component, where, softcuda):
    from ucx_memh_ib_mlx5._find import software_library

    config = {"library": software_library()} if where == "softmlx5" else {}
    if component == "cuda_ipc":
        config = {"driver": softcuda()}
    text = (ROOT / "docs/guarantees.md").read_text()
    *promises, atomics = row_of(text, f"`{component}`", where)
    with um.open_md(component, **config) as md:
        table = md.attr.enforcement
        for said, row in zip(promises, (table.rights, table.range, table.revoke), strict=True):
            assert {said} == {row.get.name, row.put.name}
            assert atomics == "no" or row.atomic == row.get
        assert (atomics == "yes") == (um.MdFlag.ATOMIC in md.attr.flags)


def test_the_guarantees_of_every_component_are_told():
    text = (ROOT / "docs/guarantees.md").read_text()
    told = set(re.findall(r"^\| `(\w+)` \|", text, re.M))
    assert told == {info.name for info in um.components()}


# ---- the reference ----


@dataclass
class Entry:
    kind: str
    signature: str
    text: str


@pytest.fixture(scope="session")
def entries(tmp_path_factory):
    """{id: Entry} of all that the built reference describes; a warning of the build fails."""
    from docutils import nodes
    from sphinx import addnodes

    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-b", "html"]
    command += ["-d", out / "doctrees", ROOT / "docs", out / "html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    found = {}
    for path in (out / "doctrees" / "reference").glob("*.doctree"):
        for desc in pickle.loads(path.read_bytes()).findall(addnodes.desc):
            for line in desc.findall(addnodes.desc_signature):
                if line.parent is desc:
                    content = desc.next_node(addnodes.desc_content)
                    entry = Entry(
                        desc["objtype"],
                        " ".join(text.astext() for text in line.findall(nodes.Text)),
                        content.astext(),
                    )
                    found |= dict.fromkeys(line["ids"], entry)
    assert len(found) > 500
    return found


def words(text):
    return re.sub(r"\W+", " ", text).split()


def described(entries, name, *signature):
    """The entry of that id; it has a text, and what is given of the signature."""
    entry = entries.get(name)
    assert entry, f"{name} is not in the reference"
    assert entry.text.strip(), f"{name} has no text"
    missing = [part for part in signature if part not in words(entry.signature)]
    assert not missing, f"{name} is documented as {entry.signature}, without {missing}"
    return entry


def test_every_hook_is_documented(entries):
    hooks = [name for name in hookspecs.__all__ if name.startswith("ucx_memh_")]
    assert len(hooks) == 3
    for name in hooks:
        arguments = inspect.signature(getattr(hookspecs, name)).parameters
        described(entries, f"ucx_memh.hookspecs.{name}", name, *arguments)


TABLES = [
    ("backend.h", "ucxm_md_ops_t"),
    ("backend.h", "ucxm_ep_ops_t"),
    ("memh.h", "ucxm_api_t"),
    ("pyapi.h", "ucxm_python_t"),
]


@pytest.mark.parametrize(("header", "table"), TABLES)
def test_every_call_of_the_headers_is_documented(entries, header, table):
    text = (ROOT / "ucx_memh/include/ucx_memh" / header).read_text()
    body = re.search(rf"typedef struct {table[:-2]} \{{(.*?)^\}} {table};", text, re.S | re.M)[1]
    calls = re.findall(r"^    (\w[\w ]*\**)\(\*(\w+)\)\((.*?)\);", body, re.S | re.M)
    assert len(calls) > 5
    for returns, name, arguments in calls:
        described(entries, f"c.{table}.{name}", *words(returns), name, *words(arguments))


@pytest.mark.parametrize("header", ["memh.h", "backend.h", "windows.h", "pyapi.h"])
def test_every_name_of_the_headers_is_documented(entries, header):
    text = (ROOT / "ucx_memh/include/ucx_memh" / header).read_text()
    macros = re.findall(r"^#define (UCXM_\w+) ", text, re.M)
    types = re.findall(r"^\}? ?(?:typedef .* )?(ucxm_\w+_t);", text, re.M)
    functions = re.findall(r"^static inline .*?(ucxm_\w+)\(", text, re.M)
    assert macros and types
    assert {f"c.{name}" for name in macros + types + functions} - set(entries) == set()


def test_every_flag_is_documented(entries):
    enums = [getattr(flags, name) for name in flags.__all__ if name != "UCT_MD_FLAG_REG_DERIVED"]
    assert len(enums) == 8
    for enum in enums:
        assert issubclass(enum, Enum)
        for name, member in enum.__members__.items():
            described(
                entries, f"ucx_memh.flags.{enum.__name__}.{name}", name, *words(str(int(member)))
            )


def test_every_error_is_documented(entries):
    for name in errors.__all__:
        entry = described(entries, f"ucx_memh.errors.{name}", name)
        thing = getattr(errors, name)
        if inspect.isclass(thing) and thing is not um.MemhError:
            parents = [base.__name__ for base in thing.__bases__]
            assert "Bases:" in entry.text and all(parent in entry.text for parent in parents)


def test_every_option_is_documented(entries):
    options = [(info.name, option) for info in um.components(load=True) for option in info.options]
    assert len(options) > 15
    for component, option in options:
        entry = described(entries, f"confval-{component}.{option.name}")
        assert option.wanted in entry.text and repr(option.default) in entry.text


def test_every_state_and_every_way_to_choose_is_documented():
    text = (ROOT / "docs/reference/configuration.rst").read_text()
    states = [getattr(resources, name) for name in resources.__all__ if name.isupper()]
    ways = re.findall(r"^    (\S+) {2,}\S", plugins.__doc__, re.M)
    assert (len(states), ways) == (5, ["name", "^name", "name@origin", "+path", "+name=path"])
    for word in [*states, *ways]:
        assert re.search(rf"^``{re.escape(word)}`` ", text, re.M), word


def test_every_public_name_is_documented(entries):
    names = [name for name in um.__all__ if name not in (*errors.__all__, *flags.__all__)]
    known = {name.rpartition(".")[2] for name in entries}
    assert len(names) > 20
    assert set(names) - known == set()


def test_signatures_are_those_of_the_stubs(entries):
    tree = ast.parse((ROOT / "ucx_memh/core.pyi").read_text())
    checked = 0
    for cls in tree.body:
        if isinstance(cls, ast.ClassDef) and cls.name in um.__all__:
            for method in cls.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    arguments = words(ast.unparse(method.args))[1:]
                    returns = words(ast.unparse(method.returns))
                    described(entries, f"ucx_memh.{cls.name}.{method.name}", *arguments, *returns)
                    checked += 1
    assert checked > 60


def test_the_testing_modules_examples_run(python):
    code = "import doctest, ucx_memh.testing as t; print(*doctest.testmod(t))"
    failed, tried = map(int, python("-c", code).stdout.split())
    assert (failed, tried > 2) == (0, True)
