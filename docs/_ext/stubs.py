# SPDX-License-Identifier: BSD-3-Clause
"""`.. stub:: ucx_memh.Md`: the reference of a class or function of a Cython module.

Signatures are those of the .pyi, docstrings those of the compiled module, and the order is the
stub's.  A public function without a docstring is a warning, and so an error.
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from textwrap import indent

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

EMBEDDED = re.compile(r"\A[\w.]+\(.*\)(?: -> .*)?(?:\n+|\Z)")  # Cython's embedsignature

ARGUMENT = re.compile(r"(?<!`)`(?:flags|config|errors)`")  # a module's name, too: no link to that


def signature(node: ast.FunctionDef, name: str, method: bool) -> str:
    if method:  # self goes without saying
        (node.args.posonlyargs or node.args.args).pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name == node.name else ""
    return f"{name}({ast.unparse(node.args)}){returns}"


class Stub(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, _, name = self.arguments[0].rpartition(".")
        thing = getattr(import_module(module), name)
        source = import_module(thing.__module__)
        path = Path(str(source.__file__)).with_name(source.__name__.rpartition(".")[2] + ".pyi")
        self.env.note_dependency(str(path))
        for node in ast.parse(path.read_text()).body:
            if getattr(node, "name", "") == name:
                described = self.described(node, thing)
                return self.parse_text_to_nodes(f".. py:currentmodule:: {module}\n\n{described}")
        raise self.error(f"{path.name} has no {name}")

    def described(self, node: ast.stmt, thing: object, inside: bool = False) -> str:
        """`node` of the stub as a directive, with the docstring that `thing` has."""
        options = body = ""
        if isinstance(node, ast.AnnAssign):  # its class says what it is, and may of a property
            kind, head = "attribute", ast.unparse(node.target)
            options = f"   :type: {ast.unparse(node.annotation)}\n"
        elif isinstance(node, ast.ClassDef):
            kind, head = "class", node.name
            for member in node.body:
                name = getattr(member, "name", "")
                if name == "__init__":
                    head = signature(member, node.name, method=True)
                elif not name.startswith("_"):
                    body += self.described(member, getattr(thing, name, None), inside=True)
        elif not isinstance(node, ast.FunctionDef):
            return ""
        elif any(ast.unparse(mark) == "property" for mark in node.decorator_list):
            kind, head = "property", node.name
            options = f"   :type: {ast.unparse(node.returns)}\n"
        else:
            kind, head = "method" if inside else "function", signature(node, node.name, inside)
        text = "" if kind == "attribute" else EMBEDDED.sub("", inspect.getdoc(thing) or "")
        text = ARGUMENT.sub(r"`\g<0>`", text)
        if not text and kind not in ("attribute", "property"):
            raise self.error(f"{head} has no docstring")
        inner = indent(f"{text}\n\n{body}", "   ")
        return f".. py:{kind}:: {head}\n{options}\n{inner}\n\n"


def process(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]):
    lines[:] = [ARGUMENT.sub(r"`\g<0>`", line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    app.add_directive("stub", Stub)
    return {"parallel_read_safe": True}
