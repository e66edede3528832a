# SPDX-License-Identifier: BSD-3-Clause
"""The driver's library: what is missing is a reason, and breaks nothing else (user report 66)."""

import sys
from pathlib import Path

import pytest

import ucx_memh as um
from _gpu import NAMES
from ucx_memh_cuda_ipc import _md

OPTIONAL = {"cuDeviceGetUuid_v2", "softcuda_count"}


def refused(path):
    """Why there is no device."""
    with pytest.raises(um.NoDeviceError) as caught:
        um.open_md("cuda_ipc", driver=path)
    with pytest.raises(um.NoDeviceError):
        um.query_mds("cuda_ipc", driver=path)
    return caught.value.detail


@pytest.mark.parametrize("name", NAMES)
def test_row66_a_symbol_that_is_not_there(softcuda, name):
    path = softcuda(name)
    if name in OPTIONAL:
        with um.open_md("cuda_ipc", driver=path) as md:
            assert md.attr.software == (name != "softcuda_count")
        return
    assert f"{path} has no {name}" in refused(path)
    assert _md.symbols(path)[name] == f"{path} has no {name}"
    um.open_md("cma").close()


@pytest.mark.parametrize(("version", "name"), [(10020, "10.2"), (11000, "11.0"), (11020, "11.2")])
def test_row66_a_driver_that_is_too_old(driver, monkeypatch, version, name):
    """11.2 has pools, but no attribute that tells their memory."""
    monkeypatch.setenv("SOFTCUDA_DRIVER_VERSION", str(version))
    reason = refused(driver.path)
    assert f"CUDA {name}, too old" in reason
    assert "11.3 or later" in reason
    assert driver.count("cuInit") == 0
    um.open_md("cma").close()
    # Nothing is remembered of that.
    monkeypatch.setenv("SOFTCUDA_DRIVER_VERSION", "11030")
    with um.open_md("cuda_ipc", driver=driver.path) as md:
        driver.use()
        memory = driver.alloc(4096)
        md.mem_reg(memory.array()).dereg()
        memory.free()
        driver.cuDevicePrimaryCtxRelease_v2(0)


def test_row66_nothing_is_loaded_before_it_is_asked_for(python, softcuda):
    script = (
        "import ucx_memh as um\n"
        "import ucx_memh_cuda_ipc\n"
        "um.open_md('cma').close()\n"
        "def seen(): return 'libcuda' in open('/proc/self/maps').read()\n"
        "print(seen())\n"
        "um.open_md('cuda_ipc').close()\n"
        "print(seen())\n"
    )
    done = python("-c", script, env={"PATH": "/", "UCX_MEMH_CUDA_IPC_DRIVER": softcuda()})
    assert done.stdout.split() == ["False", "True"]


def test_a_library_that_is_none(tmp_path):
    for name, contents in {
        "absent": None,
        "empty": b"",
        "text": b"INPUT(nothing)\n",
        "cut": Path(sys.executable).read_bytes()[:300],
    }.items():
        path = tmp_path / f"{name}.so"
        if contents is not None:
            path.write_bytes(contents)
        assert "not loaded" in refused(str(path))
    assert "not loaded" in refused(str(tmp_path))
    assert "too long" in refused("x" * 600)


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("cuInit", 100, "cuInit: CUDA_ERROR_NO_DEVICE (100)"),
        ("cuInit", 999, "cuInit: an error that the driver has no name for (999)"),
        ("cuDriverGetVersion", 1, "cuDriverGetVersion: CUDA_ERROR_INVALID_VALUE (1)"),
        ("cuDeviceGetCount", 3, "cuDeviceGetCount: CUDA_ERROR_NOT_INITIALIZED (3)"),
    ],
)
def test_a_driver_that_does_not_begin(driver, call, code, text):
    driver.fail(call, code, 0)
    assert text in refused(driver.path)
    driver.mend()
    um.open_md("cuda_ipc", driver=driver.path).close()


def test_no_device(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_ERROR_NO_DEVICE" in refused(driver.path)


def test_devices_are_named_by_their_ordinals(driver, monkeypatch):
    monkeypatch.setenv("SOFTCUDA_DEVICES", "3")
    found = um.query_mds("cuda_ipc", driver=driver.path)
    assert [(md.md_name, md.software) for md in found] == [(str(i), True) for i in range(3)]
    with um.open_md("cuda_ipc/2", driver=driver.path) as md:
        assert md.attr.md_name == "2"
        assert "device 2, GPU-736f6674-6375-6461-0000-000000000003" in md.explain()
    for name in ("3", "-1", "02", "GPU"):
        with pytest.raises(um.NoDeviceError):
            um.open_md(f"cuda_ipc/{name}", driver=driver.path)
        with pytest.raises(um.NoDeviceError):
            um.open_md(um.MdResource("cuda_ipc", name), driver=driver.path)
    assert driver.live("contexts") == 0


@pytest.mark.parametrize("call", ["cuDeviceGet", "cuDeviceGetUuid_v2", "cuDevicePrimaryCtxRetain"])
def test_a_domain_that_cannot_be_opened(driver, call):
    driver.fail(call, 2)
    with pytest.raises(um.NoMemoryError, match=call.removesuffix("_v2")) as caught:
        um.open_md("cuda_ipc", driver=driver.path)
    assert caught.value.context["syndrome"] == 2
    assert driver.live("contexts") == 0
    um.open_md("cuda_ipc", driver=driver.path).close()


def test_domains_of_a_device_share_its_context(driver):
    with um.open_md("cuda_ipc", driver=driver.path):
        with um.open_md("cuda_ipc", driver=driver.path):
            assert driver.live("contexts") == 1
        assert driver.live("contexts") == 1
    assert driver.live("contexts") == 0


def test_what_it_says_of_itself(driver):
    with um.open_md("cuda_ipc", driver=driver.path) as md:
        attr = md.attr
        assert attr.software
        assert attr.mem_types == {um.MemType.CUDA}
        assert not attr.flags & (um.MdFlag.REG_DERIVED | um.MdFlag.ATOMIC | um.MdFlag.REG_DMABUF)
        assert not attr.flags & (um.MdFlag.INVALIDATE_RMA | um.MdFlag.INVALIDATE_AMO)
        assert attr.key_size_max == 208
        for cell in (attr.enforcement.rights, attr.enforcement.range):
            assert (cell.get, cell.put, cell.atomic) == (1, 1, 0)
        assert attr.enforcement.revoke == um.EnforcementRow(0, 0, 0)
        assert driver.path in md.explain()


def test_settings(driver):
    for wrong in ({"queue_depth": 0}, {"queue_depth": "many"}, {"drivers": "x"}):
        with pytest.raises(um.InvalidParamError):
            um.open_md("cuda_ipc", **{"driver": driver.path, **wrong})
