# SPDX-License-Identifier: BSD-3-Clause
"""What others have to say in the report."""

import importlib
import importlib.util
from pathlib import Path

# Each has `render() -> str | None`: Markdown that begins with a "## " line, or None if its
# measurement has not been made.  A module that is not there has nothing to say.
SECTIONS = ["bench.hotpath.render", "bench.peers.render"]

# Pages of their own: a link, where they are there and no module above speaks for them.
PAGES = {
    "bench.peers.render": (
        "peers.md",
        "## Beside the peers\n\n[peers.md](peers.md) does the same steps with other libraries,"
        " UCX's own cma among them.\n",
    )
}


def there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def collect(root: Path) -> list[str]:
    """Their texts, in this order."""
    texts = []
    for name in SECTIONS:
        text = importlib.import_module(name).render() if there(name) else None
        if text is None and name in PAGES:
            file, link = PAGES[name]
            text = link if (root / "docs" / file).exists() else None
        if text is not None:
            texts.append(text.strip() + "\n")
    return texts
