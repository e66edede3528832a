#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# bootstrap.sh [PROGRAM...]: installs what the build needs from the system, and these programs of
# packages of the same name; only what is not there.
set -eu
python=${PYTHON:-python3}

has_header() { echo "#include <$1>" | gcc -E -x c - >/dev/null 2>&1; }
python_says() { "$python" -c "$1" >/dev/null 2>&1; }

missing=
need() { missing="$missing $*"; }

command -v gcc >/dev/null || need gcc
command -v g++ >/dev/null || need g++  # the headers' tests
has_header stdlib.h || need libc6-dev
has_header infiniband/mlx5dv.h || need libibverbs-dev
command -v ibv_devinfo >/dev/null || need ibverbs-utils  # its programs run on softmlx5 in tests
command -v flock >/dev/null || need util-linux
command -v "$python" >/dev/null || need python3
# Debian splits these two off its python3; a Python of one's own has them.
python_says 'import ensurepip, venv' || need python3-venv
python_says 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' ||
    need python3-dev
for program; do
    command -v "$program" >/dev/null || need "$program"
done

if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
        echo "missing:$missing (Debian's names); install them, or run this as root" >&2
        exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    # shellcheck disable=SC2086  # a list of words
    apt-get install -q -y --no-install-recommends $missing
fi
python_says 'import sys; assert sys.version_info >= (3, 11)' || {
    echo "$python is older than 3.11; name another one: make PYTHON=python3.12" >&2
    exit 1
}
