# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx's configuration: `make docs` writes the site to build/docs, and warnings are errors."""

import os
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
# autodoc would import a stub in place of the compiled module, and stubs have no docstrings.
os.environ["SPHINX_AUTODOC_IGNORE_NATIVE_MODULE_TYPE_STUBS"] = "1"

project = "ucx_memh"
author = "ucx_memh developers"
with (HERE.parent / "pyproject.toml").open("rb") as file:
    release = version = tomllib.load(file)["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "headers", "options", "stubs"]
highlight_language = "none"  # a bare block is what a program printed
default_role = "py:obj"  # what docstrings have in backticks is a link where there is such a thing

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

add_module_names = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 90
c_maximum_signature_line_length = 90
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"show-inheritance": True}

html_theme = "furo"
html_title = f"ucx_memh {version}"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
