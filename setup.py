# SPDX-License-Identifier: BSD-3-Clause
"""The extensions; everything static is in pyproject.toml.

A backend is the folder backends/<name>/ucx_memh_<name>: delete it and it is gone.  The folder has
the package's own name because Cython ignores a .pxd in a folder of another name (cython#2452).
UCX_MEMH_BUILD_BACKENDS=cma,... builds these alone (UCX_MEMH_BACKENDS is another, at run time);
UCX_MEMH_EXTENSIONS=0 compiles nothing (the Makefile's editable install, which would compile all of
it in a folder of its own and throw that away).
"""

import os
import subprocess
from glob import glob

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

NEEDS = {"ib_mlx5": {"ib"}}  # backend -> backends that it cimports
HEADERS = {"ib": "infiniband/verbs.h", "ib_mlx5": "infiniband/mlx5dv.h"}
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "embedsignature": True,
}
INCLUDE = "ucx_memh/include"
SOFT = "backends/ib_mlx5/softmlx5"
PLUGINS = "examples/plugins"


def chosen_backends() -> list[str]:
    """The backends to build: all that the tree has, or those named by UCX_MEMH_BUILD_BACKENDS."""
    present = {path.split("/")[1] for path in glob("backends/*/ucx_memh_*/")}
    listed = os.environ.get("UCX_MEMH_BUILD_BACKENDS", "").split(",")
    named = {name.strip() for name in listed} - {""}
    if unknown := named - present:
        raise SystemExit(
            f"UCX_MEMH_BUILD_BACKENDS names {', '.join(sorted(unknown))}, "
            f"but the tree has: {', '.join(sorted(present)) or 'none'}"
        )
    wanted = named or present
    return sorted(wanted.union(*(NEEDS.get(name, set()) for name in wanted)) & present)


class BuildPy(build_py):
    """build_py that packs the example plugins, too: `new-backend` writes copies of them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for pattern in ("*.*", "tests/*.py", "ucx_memh_*/*.py", "ucx_memh_*/*.pyx"):
            for path in glob(f"{PLUGINS}/*/{pattern}"):
                if os.path.isfile(path):
                    copy = os.path.join(
                        self.build_lib, "ucx_memh/templates", os.path.relpath(path, PLUGINS)
                    )
                    self.mkpath(os.path.dirname(copy))
                    self.copy_file(path, copy)


class SharedLibrary(Extension):
    """A plain C library: no Python in it, and a file name without Python's suffix."""


class BuildExt(build_ext):
    """build_ext in parallel; asks for headers and runs Cython only when it really builds."""

    def finalize_options(self) -> None:
        self.parallel = self.parallel or os.cpu_count()
        super().finalize_options()

    def get_ext_filename(self, fullname: str) -> str:
        if isinstance(self.ext_map.get(fullname), SharedLibrary):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        missing = [h for b in BACKENDS if (h := HEADERS.get(b)) and not self.has_header(h)]
        if missing:
            raise SetupError(
                f"no <{missing[0]}>: install libibverbs-dev (rdma-core-devel), "
                "or leave the RDMA backends out with UCX_MEMH_BUILD_BACKENDS=cma"
            )
        from Cython.Build import cythonize
        from Cython.Compiler.Errors import CompileError

        modules = [ext for ext in self.extensions if not isinstance(ext, SharedLibrary)]
        try:
            made = cythonize(
                modules,
                build_dir="build/cython",  # no generated C beside the sources or in a wheel
                include_path=[".", *ROOTS],
                nthreads=self.parallel,
                compiler_directives=DIRECTIVES,
            )
        except CompileError as error:
            raise SetupError(f"Cython refused {error.args[-1]}") from None
        for ext, generated in zip(modules, made, strict=True):
            ext.sources = generated.sources
        super().build_extensions()

    def has_header(self, header: str) -> bool:
        """Whether the compiler, with the user's own flags, finds `header`."""
        command = [*self.compiler.compiler, "-E", "-x", "c", "-"]
        source = f"#include <{header}>\n".encode()
        try:
            return subprocess.run(command, input=source, capture_output=True).returncode == 0
        except FileNotFoundError:
            raise SetupError(f"no C compiler: {command[0]} is not there; install gcc") from None


def cython_extension(path: str, root: str = "") -> Extension:
    """The extension made of the .pyx `path`, named by where it lies below `root`."""
    return Extension(
        os.path.relpath(path, root or ".").removesuffix(".pyx").replace("/", "."),
        [path],
        # The generated C is elsewhere, so headers beside the .pyx have to be found too.
        include_dirs=[INCLUDE, os.path.dirname(path), *(ROOTS if root else [])],
        # Cython follows its own includes; these rebuild on an edit of a header.
        depends=[*HEADER_FILES, *glob(path.removesuffix(".pyx") + ".src/*.pxi")],
        extra_compile_args=["-pthread", "-Wno-sign-compare"],  # Cython's loops
        extra_link_args=["-pthread"],
    )


def softmlx5() -> list[Extension]:
    """The software mlx5 device: a library with the vendor's ABI, opened at run time."""
    version_map = f"{SOFT}/softmlx5.map"
    if "ib_mlx5" not in BACKENDS or not os.path.exists(version_map):
        return []
    return [
        SharedLibrary(
            "ucx_memh_ib_mlx5._soft.libsoftmlx5",
            sorted(glob(f"{SOFT}/*.c")),
            include_dirs=[SOFT],
            depends=[version_map, *glob(f"{SOFT}/*.h")],
            extra_compile_args=[
                "-O2",
                "-std=gnu11",
                "-Wall",
                "-Wextra",
                "-fvisibility=hidden",
                "-pthread",
            ],
            # Its own soname and symbolic binding: it lives beside the real libibverbs in one
            # process.  nodelete: it has a thread.
            extra_link_args=[
                f"-Wl,--version-script={version_map}",
                "-Wl,--no-undefined-version",
                "-Wl,-soname,libsoftmlx5.so",
                "-Wl,-Bsymbolic",
                "-Wl,-z,defs",
                "-Wl,-z,nodelete",
                "-pthread",
            ],
        )
    ]


BACKENDS = chosen_backends()
ROOTS = [f"backends/{name}" for name in BACKENDS]
HEADER_FILES = glob(f"{INCLUDE}/ucx_memh/*.h") + glob("backends/*/ucx_memh_*/*.h")

if __name__ == "__main__":  # Cython's worker processes may import this file
    extensions = [cython_extension(path) for path in glob("ucx_memh/**/*.pyx", recursive=True)]
    packages = find_packages(include=["ucx_memh", "ucx_memh.*"])
    package_dir = {}
    for backend in BACKENDS:
        root, package = f"backends/{backend}", f"ucx_memh_{backend}"
        package_dir[package] = f"{root}/{package}"
        packages += [package, *(f"{package}.{sub}" for sub in find_packages(f"{root}/{package}"))]
        sources = glob(f"{root}/{package}/**/*.pyx", recursive=True)
        extensions += [cython_extension(path, root) for path in sources]
    extensions += softmlx5()
    setup(
        cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
        ext_modules=[] if os.environ.get("UCX_MEMH_EXTENSIONS") == "0" else extensions,
        packages=packages,
        package_dir=package_dir,
        include_package_data=False,  # or the wheel would carry every .pyx and .c
        package_data={
            "": ["*.pxd", "*.pyi", "*.h", "py.typed"],
            "ucx_memh": ["include/ucx_memh/*.h"],
        },
    )
