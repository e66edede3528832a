# SPDX-License-Identifier: BSD-3-Clause
"""What <ucx_memh/pyapi.h> imports: the core, which has the C calls, and the way to open domains.

Importing it loads no vendor library and no plugin.
"""

from ucx_memh.core import Md, set_opener

__all__: list[str] = []


def _open(name: str, texts: dict[str, str]) -> Md:
    from ucx_memh.plugins import open_md

    md: Md = open_md(name, dict(texts))
    return md


set_opener(_open)
