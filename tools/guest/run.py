#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Run a command in a guest that has an RDMA adapter in software, rxe0.

    run.py [OPTION...] -- COMMAND [ARG...] [--- COMMAND [ARG...]]

The guest sees this machine's files at the same paths.  It may change any of them, but a change
reaches the machine only below a --write folder.  Output and exit code are the command's, but

    124  it took longer than --timeout
    125  the guest died or did not come up: stderr has the end of its console

and 128 + N after signal N, as in a shell.  A command runs once at most: only a guest that dies
before it is tried again.

A second command, after `---`, runs in a second guest, which a wire joins to the first.  They have
the addresses 10.77.0.1 and 10.77.0.2, and UCX_MEMH_GUEST is 1 and 2.  Each line of output has its
guest's number in front; stderr ends with both exit codes, and ours is the first that is not 0.

setup.sh makes what this needs.  All is emulated, also where there is a /dev/kvm: it may hang.
"""

import argparse
import ctypes
import os
import re
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

BOOT = 90  # seconds that a guest has to come up; 5 to 15 are usual
TRIES = 3  # boots; with two CPUs one in 50 dies: QEMU loses to a kernel that patches itself
FAST = 1.5  # times as fast as ours a guest's clock may run: none but a wrong one is near that
LINGER = 10  # seconds for the next output when the command has ended
TAIL = 6000  # bytes of console that an error shows
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1

prctl = ctypes.CDLL(None).prctl


def put(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def say(text: str) -> None:
    put(2, f"run.py: {text}\n".encode())


class Output:
    """Hands a stream on to a file descriptor: as it comes, or in lines that begin with a prefix.

    The guest ends it with a mark: not all that it wrote outlives it.
    """

    def __init__(self, fd: int, mark: bytes, prefix: bytes) -> None:
        self.fd = fd
        self.mark = mark
        self.prefix = prefix
        self.rest = b""  # not handed on yet
        self.ended = False

    def __call__(self, data: bytes) -> None:
        text = self.rest + data
        if text.endswith(self.mark):
            self.ended = True
            text = text.removesuffix(self.mark)
        if self.ended or not data:
            whole = len(text)
        elif self.prefix:
            whole = text.rfind(b"\n") + 1
        else:  # all but what may be the mark's beginning
            parts = (self.mark[:length] for length in range(len(self.mark), -1, -1))
            whole = len(text) - next(len(part) for part in parts if text.endswith(part))
        text, self.rest = text[:whole], text[whole:]
        if self.prefix:
            lines = text.removesuffix(b"\n").split(b"\n") if text else []
            text = b"".join(b"%b%b\n" % (self.prefix, line) for line in lines)
        put(self.fd, text)


class Guest:
    """A QEMU process from its start on, and what comes out of it."""

    def __init__(
        self,
        number: int,
        options: argparse.Namespace,
        selector: selectors.BaseSelector,
        wire: socket.socket | None,
    ) -> None:
        self.number = number
        self.selector = selector
        self.prefix = f"{number}| " if wire else ""
        self.console = b""  # its end
        self.said = b""  # by the guest's init; a whole line is taken from it
        self.ready = False
        self.fast = False
        self.clock = options.clock
        self.started = time.monotonic()
        self.code: int | None = None
        self.deadline = time.monotonic() + BOOT
        self.late = False
        self.channels = 0  # from which something may come; none when QEMU is gone

        self.control, theirs = socket.socketpair()
        mark = secrets.token_hex(16)
        self.outputs = [Output(fd, mark.encode(), self.prefix.encode()) for fd in (1, 2)]
        sinks = (self._on_console, *self.outputs)
        pipes = [os.pipe() for _ in sinks]
        ends = [theirs.detach(), *(end for _, end in pipes)]
        if wire:
            ends.append(wire.detach())
        self.process = subprocess.Popen(
            qemu(number, options, mark, *ends),
            stdin=subprocess.DEVNULL,
            stdout=ends[1],
            stderr=ends[1],
            pass_fds=ends,
            # Whatever ends this process ends QEMU.
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        for end in ends:
            os.close(end)
        self._watch(os.dup(self.control.fileno()), self._on_control)
        for (end, _), sink in zip(pipes, sinks, strict=True):
            self._watch(end, sink)

    def _watch(self, fd: int, sink: Callable[[bytes], None]) -> None:
        def read() -> None:
            data = b""
            with suppress(ConnectionResetError):
                data = os.read(fd, 1 << 16)
            if not data:
                self.selector.unregister(fd)
                os.close(fd)
                self.channels -= 1
            sink(data)
            if self.code is not None:
                ended = all(output.ended for output in self.outputs)
                self.deadline = time.monotonic() + (0 if ended else LINGER)

        self.channels += 1
        self.selector.register(fd, selectors.EVENT_READ, read)

    def _on_console(self, data: bytes) -> None:
        self.console = (self.console + data)[-TAIL:]

    def _on_control(self, data: bytes) -> None:
        *lines, self.said = (self.said + data).split(b"\n")
        for line in lines:
            if line.startswith(b"ready "):
                self.ready = True
                # Its kernel measures its clock while this machine does other things as well, and
                # once in a while is wrong by a factor: then nothing in it waits as long as it says.
                real = time.monotonic() - self.started
                self.fast = self.clock == "wall" and float(line[6:]) > FAST * real
            else:
                self.code = int(line)

    def begin(self, script: bytes, timeout: float) -> None:
        """Let init run the script."""
        self.deadline = time.monotonic() + timeout
        with suppress(ConnectionError):  # it is dying, and will be found dead
            self.control.sendall(b"%d\n%b" % (len(script), script))

    def kill_if_late(self) -> None:
        if self.channels and time.monotonic() >= self.deadline:
            self.late = True
            self.process.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def console_tail(self) -> str:
        return self.console.decode(errors="replace").strip() or "nothing"

    def why_not_ready(self) -> str:
        found = re.search(rb".*\b(?:Oops|BUG|panic|qemu-system-\w+)\b.*", self.console)
        if found:
            return found[0].decode(errors="replace").strip()
        if self.fast:
            return "its clock runs too fast"
        return f"it took {BOOT} s" if self.late else f"QEMU ended with {self.process.wait()}"

    def exit_code(self, timeout: float) -> int:
        """The command's; says so if the ended guest has none."""
        if self.code is None:
            why = f"no end after {timeout:g} s" if self.late else "the guest died"
            put(2, self.prefix.encode())
            say(f"{why}; its console: {self.console_tail()}")
            self.code = 124 if self.late else 125
        return self.code


def qemu(
    number: int,
    options: argparse.Namespace,
    mark: str,
    control: int,
    console: int,
    out: int,
    err: int,
    wire: int | None = None,
) -> list[str]:
    """The command line; the last five are its file descriptors."""
    accel = ["-accel", "tcg,thread=multi,tb-size=256"]
    if options.clock == "icount":
        accel = ["-accel", "tcg,thread=single,tb-size=256", "-icount", "shift=0,sleep=off"]
    network = []
    if wire is not None:
        network = [
            *("-netdev", f"stream,id=wire,server=off,addr.type=fd,addr.str={wire}"),
            *("-device", f"virtio-net-pci,netdev=wire,mac=52:54:00:77:00:0{number},romfile="),
        ]

    def port(number: int, chardev: str) -> list[str]:
        device = f"virtserialport,chardev=port{number},nr={number}"
        return ["-chardev", f"{chardev},id=port{number}", "-device", device]

    def folder(tag: str, path: str, rights: str = "") -> list[str]:
        path = path.replace(",", ",,")
        device = f"local,id={tag},path={path},security_model=passthrough,multidevs=remap{rights}"
        return ["-fsdev", device, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]

    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none"),
        # Without a fifth level of page tables, which emulation walks as well.
        *("-machine", "q35", "-cpu", "max,la57=off", *accel),
        *("-smp", str(options.cpus), "-m", str(options.memory), "-no-reboot"),
        *("-kernel", str(options.kernel / "vmlinuz"), "-initrd", str(options.kernel / "initrd")),
        "-append",
        "console=ttyS0 loglevel=4 panic=-1 oops=panic mitigations=off tsc=reliable no_timer_check"
        f" random.trust_cpu=on guest={number} mark={mark}",
        *("-chardev", f"file,path=/dev/fd/{console},id=console", "-serial", "chardev:console"),
        *("-device", "virtio-serial-pci"),
        *port(1, f"file,path=/dev/fd/{out}"),
        *port(2, f"file,path=/dev/fd/{err}"),
        *port(3, f"socket,fd={control}"),
        *folder("root", "/", ",readonly=on"),
        *(word for i, path in enumerate(options.write) for word in folder(f"write{i}", path)),
        *network,
    ]


def script(number: int, command: list[str], options: argparse.Namespace) -> bytes:
    """What the guest's init runs where the tree looks like the machine's."""
    environment = ["TMPDIR=/run/tmp", f"UCX_MEMH_GUEST={number}"]
    for item in ("PATH", "HOME", "LANG", *options.env):
        if "=" in item:
            environment.append(item)
        elif item in os.environ:
            environment.append(f"{item}={os.environ[item]}")
    how = "trans=virtio,version=9p2000.L,msize=512000,cache=none"
    steps = [
        *(["mount", "-t", "9p", "-o", how, f"write{i}", at] for i, at in enumerate(options.write)),
        ["cd", options.cwd],
        ["exec", "env", "-i", *environment, *command],
    ]
    return os.fsencode("".join(f"{shlex.join(step)} || exit 125\n" for step in steps))


class BootError(Exception):
    """A guest did not come up; no command has begun."""

    def __init__(self, guest: Guest) -> None:
        super().__init__(guest.why_not_ready())
        self.console = guest.console_tail()


def attempt(commands: list[list[str]], options: argparse.Namespace) -> list[int]:
    """Boot a guest for each command, and when all are up let them run; the exit codes."""
    wires = socket.socketpair() if len(commands) > 1 else [None]
    guests: list[Guest] = []
    with selectors.DefaultSelector() as selector:
        try:
            for number, wire in enumerate(wires, 1):
                guests.append(Guest(number, options, selector, wire))
            begun = False
            while selector.get_map():
                until = min(guest.deadline for guest in guests if guest.channels)
                for key, _ in selector.select(max(0, until - time.monotonic())):
                    key.data()
                for guest in guests:
                    guest.kill_if_late()
                    if not begun and (guest.fast or not guest.channels):
                        raise BootError(guest)
                if not begun and all(guest.ready for guest in guests):
                    begun = True
                    for guest, command in zip(guests, commands, strict=True):
                        guest.begin(script(guest.number, command, options), options.timeout)
            return [guest.exit_code(options.timeout) for guest in guests]
        finally:
            handlers = [signal.signal(number, signal.SIG_IGN) for number in STOPS]
            for guest in guests:
                guest.kill()
            for number, handler in zip(STOPS, handlers, strict=True):
                signal.signal(number, handler)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[list[str]]]:
    """The options and one or two commands."""
    here = Path(__file__).resolve().parent
    about = (__doc__ or "").split("\n", 4)
    parser = argparse.ArgumentParser(
        usage=about[2].strip(),
        description=f"{about[0]}\n\n{about[4]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    kernel = here.parents[1] / "build/guest"
    option("--kernel", type=Path, metavar="DIR", default=kernel, help="what setup.sh made")
    option("--memory", type=int, metavar="MIB", default=1024, help="%(default)s unless given")
    option("--cpus", type=int, metavar="N", default=1, help="%(default)s unless given")
    clocks = ("wall", "icount")
    how = "icount: an instruction takes a nanosecond and idling none, however busy the machine is"
    option("--clock", choices=clocks, default="wall", help=how)
    option("--timeout", type=float, metavar="S", default=600, help="%(default)s unless given")
    folders = {"metavar": "DIR", "action": "append", "type": os.path.realpath, "default": []}
    option("--write", **folders, help="a folder to share for writing; repeatable")
    variables = "to set, or to hand on; repeatable.  PATH, HOME and LANG are handed on anyway"
    option("--env", metavar="NAME[=VALUE]", action="append", default=[], help=variables)
    option("--cwd", metavar="DIR", default=os.getcwd(), help="where it runs: here unless given")

    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    commands: list[list[str]] = [[]]
    for word in arguments[split + 1 :]:
        if word == "---":
            commands.append([])
        else:
            commands[-1].append(word)
    if len(commands) > 2 or not all(commands):
        parser.error("one command or two are needed, after --")
    if options.clock == "icount" and (options.cpus, len(commands)) != (1, 1):
        parser.error("the icount clock is for one CPU and one guest")
    for path in options.write:
        if not os.path.isdir(path):
            parser.error(f"{path} is not a folder")
    if not (options.kernel / "made").exists():
        parser.error(f"no kernel in {options.kernel}; {here / 'setup.sh'} makes it")
    return options, commands


def stop(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    options, commands = parse(sys.argv[1:])
    for number in STOPS:
        signal.signal(number, stop)
    for number in range(1, TRIES + 1):
        try:
            codes = attempt(commands, options)
        except BootError as error:
            say(f"boot {number} of {TRIES} failed: {error}")
            console = error.console
            continue
        if len(codes) > 1:
            say(f"exit codes: {codes[0]} {codes[1]}")
        return next(filter(None, codes), 0)
    say(f"the last console: {console}")
    return 125


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # nobody reads the output any more
        sys.exit(128 + signal.SIGPIPE)
