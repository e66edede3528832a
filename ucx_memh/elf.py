# SPDX-License-Identifier: BSD-3-Clause
"""Would the loader get through this shared object?  A look at its headers, before dlopen().

A file that was cut off is mapped all the same, and the first touch of a page behind its end is
SIGBUS, which no caller survives.  Fields are those of elf(5).
"""

import os
import struct
import sys

__all__ = ["trouble"]

PT_LOAD, ET_DYN = 1, 3
HEADERS = {1: ("HHIIIIIHHHHHH", "8I"), 2: ("HHIQQQIHHHHHH", "2I6Q")}  # by class


def trouble(path: str) -> str:
    """Why the file at `path` cannot be loaded into this process; "" when nothing speaks against it.

    Which libraries and symbols it needs is for dlopen() to find out: that fails in good order.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(64)
            if len(head) < 64 or head[:4] != b"\x7fELF":
                return "it is no ELF file" if size >= 64 else f"it has only {size} bytes"
            if head[4] not in HEADERS or head[5] not in (1, 2):
                return "its ELF header is damaged"
            order = "<>"[head[5] - 1]
            header, segment = (struct.Struct(order + form) for form in HEADERS[head[4]])
            kind, machine, _, _, start, *_, each, count, _, _, _ = header.unpack_from(head, 16)
            if (head[4], head[5], machine) != _ours():
                return f"it is for another machine (class {head[4]}, machine {machine})"
            if kind != ET_DYN:
                return "it is no shared object"
            file.seek(start)
            table = file.read(each * count)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if each < segment.size or len(table) < each * count:
        return "it is cut off: its table of segments is not all there"
    for i in range(count):
        fields = segment.unpack_from(table, i * each)
        # 32 bit: type, offset, ..., filesz; 64 bit: type, flags, offset, ..., filesz
        offset, length = (fields[1], fields[4]) if head[4] == 1 else (fields[2], fields[5])
        if fields[0] == PT_LOAD and offset + length > size:
            return f"it is cut off: {size} bytes, and a segment ends at {offset + length}"
    return ""


def _ours() -> tuple[int, int, int]:
    """Class, byte order and machine of this process, as the interpreter's own file says."""
    with open(sys.executable, "rb") as file:
        head = file.read(20)
    (machine,) = struct.unpack_from("=H", head, 18)
    return head[4], head[5], machine
