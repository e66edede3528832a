#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# sanitize.sh thread|address [PYTEST-ARGS...]: build a copy of the tree with that sanitizer in
# build/sanitize-..., run tests in it, fail on any report.  PYTHON is the Python to use.
set -eu
kind=$1
shift
cd "$(dirname "$0")/.."
here=$(pwd)
python=${PYTHON:-$here/.venv/bin/python}
copy=$here/build/sanitize-$kind
log=$copy/build/report

mkdir -p "$copy/build"
rm -rf "$copy/tests"
cp -a ucx_memh backends tests setup.py pyproject.toml README.md LICENSE "$copy"
test -d build/cython && cp -a build/cython "$copy/build"
rm -f "$log".*
case $kind in
thread) runtime=libtsan.so ;;
address) runtime=libasan.so ;;
*)
    echo "sanitize.sh: thread or address, not $kind" >&2
    exit 2
    ;;
esac
cd "$copy"
CFLAGS="-fsanitize=$kind -g -O1 -fno-omit-frame-pointer" LDFLAGS="-fsanitize=$kind" \
    "$python" setup.py --quiet build_ext --inplace --force >build/log 2>&1 || {
    tail -n 20 build/log >&2
    exit 1
}

PYTHONPATH=$copy
for backend in "$copy"/backends/*/; do
    PYTHONPATH=$PYTHONPATH:${backend%/}
done
# Children of the tests write their reports to files of their own, and end as they would without.
options="exitcode=0:log_path=$log"
code=0
# Without address randomisation, which older runtimes do not survive.
env PYTHONPATH="$PYTHONPATH" LD_PRELOAD="$(gcc -print-file-name=$runtime)" \
    PYTHONDONTWRITEBYTECODE=1 UCX_MEMH_SANITIZER="$kind" \
    TSAN_OPTIONS="$options:suppressions=$here/tools/tsan.supp" \
    ASAN_OPTIONS="$options:detect_leaks=0:allocator_may_return_null=1" \
    setarch "$(uname -m)" -R "$python" -m pytest -p no:cacheprovider "$@" || code=$?
if ls "$log".* >/dev/null 2>&1; then
    cat "$log".* >&2
    echo "sanitize.sh: $(cat "$log".* | grep -c SUMMARY) reports" >&2
    exit 1
fi
exit $code
