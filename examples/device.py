# SPDX-License-Identifier: BSD-3-Clause
"""What a program of these says first: which device it runs on."""

import argparse

import ucx_memh as um


def announce(parser: argparse.ArgumentParser, backend: str, otherwise: str) -> None:
    """Print the device; status 2 with a reason if it is not there, or does not derive keys."""
    try:
        with um.open_md(backend) as md:
            if um.MdFlag.REG_DERIVED not in md.attr.flags:
                parser.error(f"{md.attr.component} has no derived keys, so {otherwise}")
            software = " (software)" if md.attr.software else ""
            print(f"ucx_memh {um.__version__}: {md.attr.component}/{md.attr.md_name}{software}")
    except um.MemhError as error:
        parser.error(str(error))
