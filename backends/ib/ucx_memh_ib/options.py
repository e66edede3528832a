# SPDX-License-Identifier: BSD-3-Clause
"""The settings that every component on verbs devices has; loads nothing."""

from ucx_memh.config import Option

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option("port", int, 0, "of the device; 0: the first", minimum=0, maximum=255),
    Option("gid_index", int, -1, "of the port; -1: chosen for it", minimum=-1, maximum=65535),
    Option(
        "queue_depth",
        int,
        128,
        "work requests that an endpoint may have under way",
        minimum=1,
        maximum=2**31 - 1,
    ),
    Option(
        "max_msg",
        int,
        0,
        "bytes that one work request moves at most; 0: what the device allows",
        minimum=0,
        maximum=2**64 - 1,
    ),
    Option(
        "quarantine",
        int,
        65536,
        "destructions of keys before a native key value may be used again",
        minimum=0,
        maximum=2**32 - 1,
    ),
    Option(
        "context",
        int,
        0,
        "address of an open ibv_context, to work on what a runtime has opened: it is never closed "
        "here, and its asynchronous events are left to the runtime; needs pd",
        minimum=0,
        maximum=2**64 - 1,
        environment=False,
    ),
    Option(
        "pd",
        int,
        0,
        "address of the ibv_pd to use of that context",
        minimum=0,
        maximum=2**64 - 1,
        environment=False,
    ),
)
