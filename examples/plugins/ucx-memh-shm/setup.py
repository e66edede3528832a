# SPDX-License-Identifier: BSD-3-Clause
"""The extension; everything else is in pyproject.toml."""

from Cython.Build import cythonize
from setuptools import Extension, setup

import ucx_memh

setup(
    ext_modules=cythonize(
        Extension(
            "ucx_memh_shm._md",
            ["ucx_memh_shm/_md.pyx"],
            include_dirs=[ucx_memh.get_include()],
        ),
        build_dir="build/cython",
        include_path=[ucx_memh.get_cython_path()],
    )
)
