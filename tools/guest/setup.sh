#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# setup.sh [DIR]: makes the kernel and the initrd that run.py boots, in DIR (build/guest).
# Installs from Debian what is missing; the kernel and pyverbs, for a test, are only unpacked.  Once
# made, it costs nothing.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:-$here/../../build/guest}"
dir=$(cd "${1:-$here/../../build/guest}" && pwd)
log=$dir/setup.log

# Without rdma-core, which brings udev along: the guest's devtmpfs does.
PACKAGES='qemu-system-x86 busybox-static cpio kmod iproute2 xz-utils
          ibverbs-providers ibverbs-utils libibverbs-dev'
# In the order of loading, but for what they depend on.  rxe wants crc32 and does not say so.
MODULES='virtio_pci virtio_console 9pnet_virtio 9p overlay dummy virtio_net crc32_generic
         ib_uverbs rdma_ucm rdma_rxe'
APPLETS='sh cat chroot grep head insmod ip ln ls mkdir mkfifo mount sleep'

die() {
    echo "setup.sh: $*" >&2
    exit 1
}

logged() { # WHAT COMMAND...: what it says goes to the log, and its last line into our error
    what=$1
    shift
    "$@" </dev/null >>"$log" 2>&1 || die "$what: $(tail -n 1 "$log") (see $log)"
}

missing_packages() {
    for package in $PACKAGES; do
        status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || :
        test "$status" = installed || printf '%s ' "$package"
    done
}

# The machine's sources, but lists and a cache of our own: nothing of the machine's is changed.
apt() {
    tool=$1
    shift
    "apt-$tool" -o "Dir::Etc::SourceList=$dir/apt/sources.list" \
        -o "Dir::State::Lists=$dir/apt/lists" -o "Dir::Cache=$dir/apt/cache" \
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o DPkg::Lock::Timeout=300 "$@"
}

read_lists() {
    . /etc/os-release
    case ${ID-}:${VERSION_ID-} in
        debian:12) backports=$VERSION_CODENAME-backports ;; # in 6.1 a READ that loses its key hangs
        debian:1[3-9]) backports= ;;
        *) die "this is ${PRETTY_NAME-unknown}, not Debian 12 or newer" ;;
    esac
    test "$(dpkg --print-architecture)" = amd64 || die "this is not an amd64 machine"
    rm -rf "$dir/apt"
    mkdir -p "$dir/apt/lists/partial" "$dir/apt/cache/archives/partial"
    cat /etc/apt/sources.list >"$dir/apt/sources.list" 2>/dev/null || :
    logged "package lists" apt get -q update
    mirror=$(apt get indextargets --format '$(ORIGIN) $(RELEASE) $(REPO_URI)' |
        awk -v release="$VERSION_CODENAME" '$1 == "Debian" && $2 == release { print $3; exit }')
    test -n "$mirror" || die "no package lists of $VERSION_CODENAME from any mirror (see $log)"
    test -n "$backports" || return 0
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb [signed-by=$keyring] $mirror $backports main" >>"$dir/apt/sources.list"
    logged "package lists of $backports" apt get -q update
}

install_packages() {
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive \
        logged "packages" apt get -q -y --no-install-recommends install $missing
}

unpack_kernel() { # into $dir/kernel
    package=$(apt cache ${backports:+-o "APT::Default-Release=$backports"} depends linux-image-amd64 |
        sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p')
    test -n "$package" || die "the package lists have no linux-image-amd64"
    new=$dir/kernel.new
    rm -rf "$new"
    mkdir "$new"
    (cd "$new" && logged "kernel" apt get -q download "$package")
    logged "kernel" dpkg-deb -x "$new"/*.deb "$new"
    rm "$new"/*.deb
    # Newer packages have the modules under usr.
    test -d "$new/lib/modules" || ln -s usr/lib "$new/lib"
    logged "modules" depmod -b "$new" "$(ls "$new/lib/modules")"
    mv "$new" "$dir/kernel"
}

unpack_pyverbs() { # into $dir/pyverbs; the package would have rdma-core installed, and udev
    new=$dir/pyverbs.new
    rm -rf "$new"
    mkdir "$new"
    (cd "$new" && logged "pyverbs" apt get -q download python3-pyverbs)
    logged "pyverbs" dpkg-deb -x "$new"/*.deb "$new"
    rm "$new"/*.deb
    mv "$new" "$dir/pyverbs"
}

make_initrd() { # $dir/initrd: busybox, the modules, and init
    version=$(ls "$dir/kernel/lib/modules")
    tree=$dir/initrd.new
    rm -rf "$tree"
    mkdir -p "$tree/bin" "$tree/modules"
    cp /bin/busybox "$tree/bin/busybox"
    for applet in $APPLETS; do ln -s busybox "$tree/bin/$applet"; done
    cp "$here/init" "$tree/init"
    chmod 755 "$tree/init"
    for module in $MODULES; do
        modprobe -d "$dir/kernel" -S "$version" --show-depends "$module" 2>>"$log" ||
            die "the kernel $version has no module $module"
    done >"$tree/depends"
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }' "$tree/depends" >"$tree/files"
    while read -r file; do
        name=$(basename "$file" .xz)
        case $file in
            *.xz) xz -dc "$file" >"$tree/modules/$name" ;;
            *) cp "$file" "$tree/modules/$name" ;;
        esac
        echo "$name" >>"$tree/order"
    done <"$tree/files"
    (cd "$tree" && find . | cpio --quiet -o -H newc) >"$tree.cpio"
    mv "$tree.cpio" "$dir/initrd"
    rm -rf "$tree"
    cp "$dir/kernel/boot/vmlinuz-$version" "$dir/vmlinuz"
}

# One call at a time; who had to wait finds everything done.
exec 9>"$dir/lock"
flock 9
made=$(cat "$here/setup.sh" "$here/init" | cksum)
missing=$(missing_packages)
test -n "$missing" || test "$(cat "$dir/made" 2>/dev/null)" != "$made" || exit 0
test -z "$missing" || test "$(id -u)" = 0 ||
    die "missing: $missing(install them, or run this as root)"
rm -f "$dir/made"
: >"$log"
test -z "$missing" && test -d "$dir/kernel" && test -d "$dir/pyverbs" || read_lists
test -z "$missing" || install_packages
test -d "$dir/kernel" || unpack_kernel
test -d "$dir/pyverbs" || unpack_pyverbs
rm -rf "$dir/apt"
make_initrd
echo "$made" >"$dir/made"
