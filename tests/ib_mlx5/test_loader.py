# SPDX-License-Identifier: BSD-3-Clause
"""Vendor libraries that are absent, too old or not what their name says: a reason, no crash."""

import shutil
import subprocess

import pytest

import ucx_memh as um
from ucx_memh.errors import InvalidParamError, NoDeviceError
from ucx_memh_ib import verbs
from ucx_memh_ib_mlx5 import devx

CC = shutil.which("cc") or shutil.which("gcc")
needs_cc = pytest.mark.skipif(CC is None, reason="no C compiler to make a library with")


def build(tmp_path, source: str, version_map: str = ""):
    """A shared library of that C text; returns its path."""
    (tmp_path / "lib.c").write_text(source)
    (tmp_path / "lib.map").write_text(version_map or "{ global: *; };")
    library = tmp_path / "libpretend.so"
    subprocess.run(
        [CC, "-shared", "-fPIC", "-o", library, tmp_path / "lib.c"]
        + [f"-Wl,--version-script={tmp_path / 'lib.map'}"] * bool(version_map),
        check=True,
    )
    return str(library)


def test_missing_library_has_the_loaders_reason():
    reason, symbols = verbs.library_status("libnosuch_verbs.so.7")
    assert "libnosuch_verbs.so.7" in reason
    assert "ibv_reg_mr" in symbols
    assert set(symbols.values()) == {reason}
    with pytest.raises(OSError, match=r"libnosuch_verbs\.so\.7"):
        verbs.devices("libnosuch_verbs.so.7")


def test_a_library_that_comes_later_is_found(tmp_path):
    library = tmp_path / "libpretend.so"
    assert verbs.library_status(str(library))[0]
    if CC is None:
        pytest.skip("no C compiler to make a library with")
    build(tmp_path, "int x;")
    assert "has no ibv_get_device_list@IBVERBS_1.1" in verbs.library_status(str(library))[0]


def test_not_a_library(tmp_path):
    path = tmp_path / "libtext.so"
    path.write_text("this is no ELF file")
    assert str(path) in verbs.library_status(str(path))[0]


def test_a_path_that_is_too_long():
    assert "too long" in verbs.library_status("x" * 600)[0]


@needs_cc
def test_missing_symbol_is_named(tmp_path):
    path = build(
        tmp_path,
        "void *ibv_get_device_list(int *n) { *n = 0; return 0; }",
        "IBVERBS_1.1 { global: ibv_get_device_list; local: *; };",
    )
    reason, symbols = verbs.library_status(path)
    assert "has no ibv_free_device_list@IBVERBS_1.1" in reason
    assert symbols["ibv_get_device_list"] == ""
    assert "ibv_post_send" not in symbols  # reached through the context, never by name
    assert symbols["ibv_reg_dmabuf_mr"].endswith("has no ibv_reg_dmabuf_mr@IBVERBS_1.12")
    with pytest.raises(NoDeviceError, match="ibv_free_device_list"):
        devx.devices(path, path)


@needs_cc
def test_wrong_version_is_missing(tmp_path):
    path = build(
        tmp_path,
        "int ibv_reg_mr(void) { return 0; }",
        "IBVERBS_1.0 { global: ibv_reg_mr; local: *; };",
    )
    assert verbs.symbol_reason(path, "ibv_reg_mr", "IBVERBS_1.0") == ""
    assert verbs.symbol_reason(path, "ibv_reg_mr", "IBVERBS_1.1").endswith(
        "has no ibv_reg_mr@IBVERBS_1.1"
    )


@needs_cc
def test_library_without_versions_has_nothing(tmp_path):
    # It uses the C library, as every real one does; that gives it a version table.
    path = build(tmp_path, "int rand(void); int ibv_reg_mr(void) { return rand(); }")
    assert verbs.symbol_reason(path, "ibv_reg_mr", "IBVERBS_1.1")


def test_optional_symbols_do_not_make_it_unusable(software):
    reason, symbols = verbs.library_status(software)
    assert reason == ""
    assert symbols["ibv_reg_mr"] == ""


def test_component_says_why_it_is_not_there():
    with pytest.raises(NoDeviceError, match="libnosuch"):
        um.open_md("ib_mlx5", library="/nowhere/libnosuch.so")


def test_unknown_configuration_is_refused():
    with pytest.raises(InvalidParamError, match="no_such_key"):
        um.open_md("ib_mlx5", no_such_key=1)
    with pytest.raises(InvalidParamError, match="device is 'magic'"):
        um.open_md("ib_mlx5", device="magic")
    with pytest.raises(InvalidParamError, match="queue_depth is 'many', not a whole number"):
        um.open_md("ib_mlx5", device="software", queue_depth="many")
    with pytest.raises(InvalidParamError, match="go together"):
        um.open_md("ib_mlx5", device="software", context=4096)


def test_no_device_of_that_name():
    resource = um.MdResource("ib_mlx5", "mlx5_99", True)
    with pytest.raises(NoDeviceError, match="mlx5_99"):
        um.open_md(resource, device="software")


def test_software_is_told():
    with um.open_md("ib_mlx5", device="software") as md:
        assert md.attr.software
        assert "a software device" in md.explain()


def test_tables_are_shared_between_threads(software):
    """Filled once, whoever comes first."""
    import threading

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(verbs.library_status(software)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reason for reason, _ in results] == [""] * 8
