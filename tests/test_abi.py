# SPDX-License-Identifier: BSD-3-Clause
"""The headers still say what compiled backends and embedders took from their first version."""

import os
import shlex
import subprocess
import sysconfig
from importlib.resources import files
from pathlib import Path

import pytest

from ucx_memh.testing import open_fake

HERE = Path(__file__).parent


def compiled(source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
    command = [*compiler, "-fsyntax-only", *options, f"-I{files('ucx_memh') / 'include'}", source]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("file", ["backend_abi_1.c", "api_abi_1.c"])
def test_version_1_is_as_it_was(file):
    result = compiled(HERE / file, "-std=c11", "-Wall", "-Wextra", "-Werror")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("AT(struct ucxm_api, mem_reg, 88)", "AT(struct ucxm_api, mem_reg, 8)"),
        ("AT(struct ucxm_md_ops, close, 56)", "AT(struct ucxm_md_ops, close, 48)"),
        ("IS(UCXM_ERR_BUSY, -15ll)", "IS(UCXM_ERR_BUSY, -16ll)"),
        ("FIXED(struct ucxm_key_slot, 16)", "FIXED(struct ucxm_key_slot, 24)"),
        ("SIZE(struct ucxm_op, 264)", "SIZE(struct ucxm_op, 280)"),
    ],
)
def test_a_difference_is_seen(tmp_path, before, after):
    texts = [(HERE / file).read_text() for file in ("backend_abi_1.c", "api_abi_1.c")]
    (text,) = (text for text in texts if before in text)
    changed = tmp_path / "changed.c"
    changed.write_text(text.replace(before, after))
    assert compiled(changed, "-std=c11").returncode != 0


@pytest.mark.parametrize("header", ["memh.h", "backend.h", "symbol_table.h", "process.h"])
@pytest.mark.parametrize("language", ["c", "c++"])
def test_headers_stand_alone(tmp_path, header, language):
    source = tmp_path / "only.h"
    source.write_text(f"#include <ucx_memh/{header}>\n")
    result = compiled(source, "-x", language, "-Wall", "-Wextra", "-Wpedantic", "-Werror")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("shorter", [0, -8])
def test_a_backend_of_version_1_is_taken(shorter):
    """It has no key_flush, whatever lies behind its table: `progress` does all."""
    md, device = open_fake(abi=1, destroy="flush", ops_size=shorter)
    with md, md.mem_reg(bytearray(8)) as base:
        win = base.derive()
        win.mkey_pack()
        win.invalidate()
        assert device.counts["key_flush"] == 0
