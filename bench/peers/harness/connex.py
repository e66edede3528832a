# SPDX-License-Identifier: BSD-3-Clause
"""connex-rs: a thread of its own owns UCX, so each call goes there and back.  It hides keys."""

import connex_rs

from bench.peers.harness import serving

memory = serving.memory()
engine = connex_rs.Engine("bench", 0, listen_ip="127.0.0.1")


def register(length: int) -> serving.Loop:
    where = serving.address(memory)
    if engine.register_memory(where, length) != 0 or engine.unregister_memory(where) != 0:
        raise RuntimeError("register_memory failed")
    statement = "engine.register_memory(where, length); engine.unregister_memory(where)"
    return serving.timed(statement, engine=engine, where=where, length=length)


if __name__ == "__main__":
    operations = {"register": ("`register_memory` and `unregister_memory`", register)}
    serving.serve(operations, serving.versions("connex-rs"))
    engine.close()
