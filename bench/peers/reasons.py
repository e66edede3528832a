# SPDX-License-Identifier: BSD-3-Clause
"""Why a peer is of no use, in one line that says nothing about this machine's folders."""

import re

NOISE = re.compile(r"^(WARNING|DEPRECATION|\[notice\]|Collecting|note:|hint:|compilation term)")
PATH = re.compile(r"(?:\w+:/)?(?:/[^\s'\"/:,()<>]+)+/?")


class PeerLost(Exception):
    """With the reason."""


def without_paths(text: str) -> str:
    """Of each absolute path or address the last part."""
    return PATH.sub(lambda match: match[0].rstrip("/").rpartition("/")[2], text)


def last_words(output: str) -> str:
    """The last line that tells something; what a program calls an error goes first."""
    lines = [line.strip() for line in output.splitlines()]
    telling = [line for line in lines if re.search(r"\w", line) and not NOISE.search(line)]
    errors = [line for line in telling if re.search(r"\b(ERROR|[Ee]rror|fatal)\b\W*:", line)]
    found = (errors or telling or ["it said nothing"])[-1]
    return without_paths(found)[:200]
