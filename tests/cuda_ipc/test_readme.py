# SPDX-License-Identifier: BSD-3-Clause
"""README.md: its programs with GPU memory, on the software driver and on softmlx5."""

import os

import pytest

import ucx_memh as um
from _pages import blocks
from softcuda.driver import CudaArray

pytestmark = pytest.mark.source
SIZE = 64 << 10
GPU = 0x7F3C_0000_0000  # nothing is mapped there


@pytest.fixture
def programs(root):
    """By what they want: the source of each."""
    found = [block for block in blocks(root / "README.md", "python") if "tensor" in block.code]
    assert [block.by for block in found] == ["tests/cuda_ipc/test_readme.py"] * 2
    return {"dmabuf" if "dmabuf" in block.code else "ipc": block.code for block in found}


def test_tensors_are_shared_by_cuda_ipc(programs, soft, monkeypatch):
    monkeypatch.setenv("UCX_MEMH_CUDA_IPC_DRIVER", soft.where.config["driver"])
    data = os.urandom(SIZE)
    memory, copy = soft.memory(SIZE, data), soft.memory(SIZE)
    names = {"um": um, "tensor": memory.array(), "its_tensor": copy.array()}
    exec(programs["ipc"], names)
    assert soft.read(copy, SIZE) == data
    names["md"].close(force=True)


def test_a_block_of_gpu_memory_has_a_key_of_its_own(programs):
    fd = os.memfd_create("dmabuf")
    os.ftruncate(fd, SIZE)
    with um.open_md("ib_mlx5") as md:
        tensor = CudaArray(GPU, SIZE)
        exec(
            programs["dmabuf"],
            names := {"um": um, "md": md, "tensor": tensor, "i": 3} | {"fd": fd, "offset": 0},
        )
        base, block = names["base"], names["block"]
        assert (base.address, base.length) == (GPU, SIZE)
        assert (block.address, block.length) == (GPU + 3 * 4096, 4096)
        assert block.mkey_pack()
        block.invalidate()
        base.dereg()
    os.close(fd)
