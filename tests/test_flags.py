# SPDX-License-Identifier: BSD-3-Clause
"""The enums of flags.py have all the numbers of the headers, and no others."""

import re
from enum import Enum
from pathlib import Path

import pytest

import ucx_memh as um

TABLES = [  # enum, the header names' prefix, header names that stand for other things
    (um.Status, r"UCXM_(?:ERR_)?(OK|INPROGRESS|(?<=ERR_)\w+)"),
    (um.MdFlag, r"UCXM_MD_FLAG_(\w+)"),
    (um.MemFlag, r"UCXM_MEM_(ACCESS_\w+|SYMMETRIC_RKEY|GVA|DERIVED_ONLY)"),
    (um.PackFlag, r"UCXM_PACK_(\w+)"),
    (um.MemType, r"UCXM_MEM_TYPE_(?!UNKNOWN)(\w+)"),  # which is None
    (um.MemhState, r"UCXM_MEMH_(\w+)"),
    (um.EpState, r"UCXM_EP_(?!ADDRESS_MAX)(\w+)"),
    (um.Enforcement, r"UCXM_ENFORCE_(\w+)"),
]
SHORT = {"REMOTE_PUT", "REMOTE_GET", "REMOTE_ATOMIC", "LOCAL_READ", "LOCAL_WRITE"}


def header_numbers() -> dict[str, int]:
    """Every #define of the two headers that is a number."""
    values: dict[str, int] = {}
    for header in ("memh.h", "backend.h"):
        text = Path(um.get_include(), "ucx_memh", header).read_text().replace("\\\n", " ")
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        for name, expression in re.findall(r"^#define (UCXM_\w+)[ \t]+(\S.*)$", text, re.M):
            expression = re.sub(r"\b(\d\w*?)u?l{0,2}\b", r"\1", expression)
            known = {"__builtins__": {}, "UINT64_MAX": 2**64 - 1}
            values[name] = eval(expression, known, values)
    return values


NUMBERS = header_numbers()


@pytest.mark.parametrize(
    ("enum", "pattern"), TABLES, ids=lambda value: getattr(value, "__name__", "")
)
def test_same_as_the_header(enum: type[Enum], pattern: str):
    header = {m[1]: n for name, n in NUMBERS.items() if (m := re.fullmatch(pattern, name))}
    ours = {name: member.value for name, member in enum.__members__.items()}
    if enum is um.MemFlag:
        assert set(ours) >= SHORT
        ours = {name: value for name, value in ours.items() if name not in SHORT}
    if enum is um.PackFlag:
        assert ours.pop("NONE") == 0
    assert len(header) > 1
    assert ours == header


def test_short_names_are_the_same_flags():
    for name in SHORT:
        assert um.MemFlag[name] is um.MemFlag[f"ACCESS_{name}"]


def test_uct_name():
    assert um.UCT_MD_FLAG_REG_DERIVED is um.MdFlag.REG_DERIVED
    assert um.UCT_MD_FLAG_REG_DERIVED.value > 2**31  # no flag of UCX's, now or later


def test_unknown_bits_survive():
    assert int(um.MdFlag(1 << 50 | 2)) == 1 << 50 | 2
