# SPDX-License-Identifier: BSD-3-Clause
"""`.. components::`: what the plugins that are installed say of themselves, with every option."""

from importlib.metadata import entry_points

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ucx_memh import ComponentInfo, components
from ucx_memh.config import Option, variable
from ucx_memh.hookspecs import PROJECT


def option(component: str, option: Option) -> str:
    text = option.help
    if option.environment:
        text += f"\n\n   In the environment: ``{variable(component, option.name)}``."
    return (
        f".. confval:: {component}.{option.name}\n   :type: {option.wanted}\n"
        f"   :default: ``{option.default!r}``\n\n   {text}\n\n"
    )


def described(info: ComponentInfo) -> str:
    (plugin,) = entry_points(group=PROJECT, name=info.name)
    text = f"{info.name}\n{'-' * len(info.name)}\n\n"
    text += f".. automodule:: {plugin.value}\n   :no-members:\n\n"
    return text + "".join(option(info.name, each) for each in info.options)


class Components(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        text = "".join(map(described, components(load=True)))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("components", Components)
    return {"parallel_read_safe": True}
