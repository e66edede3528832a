# SPDX-License-Identifier: BSD-3-Clause
"""`.. header:: memh.h`: the reference of a C header, from its comments and declarations.

A comment above a declaration or behind it says what it is, one with an empty line below is text of
its own, and `---- words ----` begins a section.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

INCLUDE = Path(__file__).parents[2] / "ucx_memh" / "include" / "ucx_memh"
NOISE = re.compile(
    r"\A/\* SPDX.*\n|^#ifdef __cplusplus\n[^#]*#endif\n|^#ifndef \w+_H\n.*\n|^#include .*\n"
    r"|^#endif\n\Z",
    re.M,
)
TOKEN = re.compile(
    r"""(?P<gap>\n[ ]*\n)
    | (?P<comment>/\*.*?\*/)
    | (?P<macro>\#define\ \w+(?:[^\n/\\]|\\\n)*)
    | (?P<function>static\ inline\ [^{}]*(?=\n\{))\n\{.*?^\}
    | (?P<enum>typedef\ enum\ [^{}]*\{.*?^\}[^;]*;)
    | (?P<struct>(?:typedef\ )?struct\ \w+\ \{.*?^\}[^;]*;)
    | (?P<name>[^\s;{}\#/][^;{}\#/]*;)""",
    re.X | re.S | re.M,
)
TITLE = re.compile(r"---- (.*?) -{3,}\s*\*?")


def prose(comment: str) -> str:
    """A comment as reStructuredText, which has its own ideas of stars and underscores."""
    text = re.sub(r"(?m)^ *\* ?", "", TITLE.sub("", comment[2:-2])).strip()
    text = re.sub(r"(?m)^((?! *- ).*\S)\n(?= *- )", r"\1\n\n", text)  # before a list
    text = re.sub(r":\n\n(?= {4})", "::\n\n", text)  # before an example, which is as it is
    return re.sub(r"(?m)^ {4}.*|`([^`]*)`|([*\\]|(?<=\w)_(?!\w))", plain, text)


def plain(match: re.Match[str]) -> str:
    return f"``{match[1]}``" if match[1] else f"\\{match[2]}" if match[2] else match[0]


def items(text: str) -> Iterator[tuple[str, str, str, str]]:
    """(kind, declaration, text above, text behind) of all in a header or in a struct's body."""
    held: list[str] = []
    above = ""

    def flush() -> Iterator[tuple[str, str, str, str]]:
        nonlocal above
        if held:
            yield held[0], held[1], held[2], "\n\n".join(held[3:])
        elif above:  # nothing is declared under it
            yield from (("section", title, "", "") for title in TITLE.findall(above))
            yield "prose", "", prose(above), ""
            above = ""
        held.clear()

    for token in TOKEN.finditer(text):
        kind, words = str(token.lastgroup), token[token.lastgroup or 0]
        behind = text[text.rfind("\n", 0, token.start()) + 1 : token.start()].strip()
        if kind == "comment" and behind and held:
            held.append(prose(words))
        elif kind in ("comment", "gap"):
            yield from flush()
            above = words if kind == "comment" else ""
            if kind == "gap":
                yield "gap", "", "", ""
        else:
            if held:
                yield from flush()
            held += [kind, words, prose(above) if above else ""]
            above = ""
    yield from flush()


def entry(kind: str, signature: str, *texts: str) -> str:
    body = indent("\n\n".join(filter(None, texts)), "   ")
    return f".. c:{kind}:: {' '.join(signature.split()).removesuffix(';')}\n\n{body}\n\n"


def row(macro: str, text: str) -> str:
    _, name, value = " ".join(macro.replace("\\\n", "").split()).split(" ", 2)
    value = re.sub(r"^\((.*)\)$", r"\1", value)
    cell = indent(text or "\\ ", "       ").strip()
    return f"   * - .. c:macro:: {name}\n     - ``{value}``\n     - {cell}\n"


def render(text: str, inside: bool = False) -> str:
    """All of a header, or (inside) of the body of a struct, as reStructuredText."""
    out, before = [], ""
    for kind, words, above, behind in items(text):
        if kind == "macro":
            if before != "macro":  # what stands above a group is about all of it
                out.append(f"{above}\n\n.. list-table::\n   :class: macros\n\n")
                above = ""
            out.append(row(words, f"{above}{behind}"))
        elif kind == "section":
            title = words[0].upper() + words[1:]
            line = "-" * len(title)
            out.append(f".. rubric:: {title}\n\n" if inside else f"{title}\n{line}\n\n")
        elif kind in ("struct", "enum"):
            head, _, rest = words.partition("{")
            body, _, name = rest.rpartition("}")
            name = name.strip(" ;") or head.split()[1]
            constants = re.findall(r"(\w+),? *(/\*.*?\*/)?", body) if kind == "enum" else []
            body = "".join(entry("enumerator", value, prose(c)) for value, c in constants)
            body = body or render(words.partition("{")[2].rpartition("}")[0], inside=True)
            out.append(entry(kind, name, above, behind, body))
        elif kind == "function":
            out.append(entry("function", words, above, behind))
        elif kind == "name" and not inside:
            out.append(entry("type", words.removeprefix("typedef "), above, behind))
        elif kind == "name":  # `uint64_t one, other;` are two members
            of, names = re.fullmatch(r"(?s)(\w+ (?=\w+,))?(.*)", words).groups("")  # type: ignore
            for name in names.split(",") if of else [names]:
                out.append(entry("member", f"{of}{name}", above, behind))
        else:
            out.append(f"{above}\n\n")
        before = kind
    return "".join(out)


class Header(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = INCLUDE / self.arguments[0]
        self.env.note_dependency(str(path))
        text = NOISE.sub("", path.read_text())
        return self.parse_text_to_nodes(render(text), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("header", Header)
    return {"parallel_read_safe": True}
