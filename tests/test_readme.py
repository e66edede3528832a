# SPDX-License-Identifier: BSD-3-Clause
"""The README's Python, pasted as it stands."""

import re

import pytest

pytestmark = pytest.mark.source


def test_examples_print_what_they_say(python, root):
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        said = re.findall(r"^ *print\(.*?\) +# (.*)$", block, re.M)
        printed = python("-c", block).stdout.splitlines()
        assert len(printed) == len(said) > 0
        for line, words in zip(printed, said, strict=True):
            described = words.startswith("refused by the device")  # the rest is word for word
            assert "REMOTE_ACCESS" in line if described else line == words


def test_the_key_has_the_size_it_says(python, root):
    (size,) = re.findall(r"`win.mkey_pack\(\)`, (\d+) bytes", (root / "README.md").read_text())
    code = (
        "import ucx_memh as um; md = um.open_md('ib_mlx5'); "
        "print(len(md.mem_reg(bytearray(9)).derive().mkey_pack()))"
    )
    assert python("-c", code).stdout.strip() == size
