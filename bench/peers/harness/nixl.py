# SPDX-License-Identifier: BSD-3-Clause
"""NIXL: two agents over its UCX.  Their progress threads are off, which would take the CPUs."""

import os

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

from nixl._api import nixl_agent, nixl_agent_config  # it reads that variable

from bench.peers.harness import serving

memory = serving.memory()
config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
owner, peer = nixl_agent("owner", config), nixl_agent("peer", config)


def region(length: int) -> list[tuple[int, int, int, str]]:
    return [(serving.address(memory), length, 0, "")]


def register(length: int) -> serving.Loop:
    statement = "agent.deregister_memory(agent.register_memory(part, 'DRAM'))"
    return serving.timed(statement, agent=owner, part=region(length))


def share(length: int) -> serving.Loop:
    statement = "made = reg(part, 'DRAM'); pack(made); dereg(made)"
    names = {"reg": owner.register_memory, "dereg": owner.deregister_memory}
    pack = owner.get_partial_agent_metadata
    return serving.timed(statement, pack=pack, part=region(length), **names)


def pack(length: int) -> serving.Loop:
    made = owner.register_memory(region(length), "DRAM")
    return serving.timed("pack(made)", pack=owner.get_partial_agent_metadata, made=made)


def unpack(length: int) -> serving.Loop:
    made = owner.register_memory(region(length), "DRAM")
    peer.add_remote_agent(owner.get_agent_metadata())  # so that the owner is known
    key = owner.get_partial_agent_metadata(made)
    return serving.timed("unpack(key)", unpack=peer.add_remote_agent, key=key)


if __name__ == "__main__":
    operations = {
        "register": ("`register_memory` and `deregister_memory`", register),
        "share": (
            "`register_memory`, `get_partial_agent_metadata`, `deregister_memory`",
            share,
        ),
        "pack": ("`get_partial_agent_metadata` of one region", pack),
        "unpack": ("`add_remote_agent` of those bytes, again; nothing is closed", unpack),
        "again": ("the same", unpack),
    }
    made = owner.register_memory(region(4096), "DRAM")
    key_bytes = len(owner.get_partial_agent_metadata(made))
    owner.deregister_memory(made)
    serving.serve(operations, serving.versions("nixl-cu12", "nixl", "numpy"), key_bytes)
