# SPDX-License-Identifier: BSD-3-Clause
"""The command line.  A subcommand is a module here with two functions:

``add_arguments(parser)`` describes its arguments, ``run(args) -> int`` does the work and gives the
exit status.  Its docstring is its help.  Status 1: the work failed; 2: the command line is wrong.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

import ucx_memh as um

__all__ = ["add_config", "config_of", "main"]

# And their modules.
SUBCOMMANDS = {
    "info": "info",
    "demo": "demo",
    "check-device": "check",
    "new-backend": "new_backend",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; what fails is one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m ucx_memh", description=um.__doc__)
    parser.add_argument("--version", action="version", version=f"ucx_memh {um.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, room in SUBCOMMANDS.items():
        if find_spec(f"{__name__}.{room}") is None:
            continue
        module = import_module(f"{__name__}.{room}")
        text = module.__doc__ or ""
        subparser = subparsers.add_parser(
            name, help=text.partition("\n")[0].rstrip("."), description=text
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    with suppress(AttributeError):  # of a stdout that is no file
        # A file's name, or what a plugin says, may have bytes that are no text.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status: int = args.run(args)
        sys.stdout.flush()  # here, where a broken pipe is caught
        return status
    except um.InvalidParamError as error:
        return _fail(error, 2)
    except BrokenPipeError:
        # The reader has gone (a pager, `head`).  Nothing more to say, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (um.MemhError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def add_config(parser: argparse.ArgumentParser) -> None:
    """The option --config; config_of() reads it."""
    parser.add_argument(
        "--config",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of the component, as for open_md(); repeatable",
    )


def config_of(settings: Sequence[str]) -> dict[str, str]:
    """The configuration that those texts are; InvalidParamError: one is no KEY=VALUE."""
    pairs = [setting.partition("=") for setting in settings]
    for key, equals, _ in pairs:
        if not (key and equals):
            raise um.InvalidParamError(f"--config wants KEY=VALUE, not {key!r}")
    return {key: value for key, _, value in pairs}


def _fail(error: Exception, status: int) -> int:
    print("ucx_memh:", " ".join(str(error).split()), file=sys.stderr)
    return status
