"""Network namespaces that we own: made, entered, and swept when their owner has died.

    /run/diloco-emulate/lock          held for the instant in which somebody sweeps and claims
    /run/diloco-emulate/ID            held by the living owner, however it dies the kernel frees it
    /run/netns/diloco-ID-NODE         its namespaces

A namespace is ours if a file ID says so, and its owner is dead if that file is free. Nothing else
is ever touched. Processes found in a dead owner's namespaces were started by it, and are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.errors import ConfigError
from diloco.state_dir import acquire, holder, write_pid
from diloco.system import require_linux

OWNERS = Path("/run/diloco-emulate")
NAMESPACES = Path("/run/netns")
_LOCK = "lock"
_CLONE_NEWNET = 0x40000000
_END_S = 5.0
_LOOK_S = 0.02
#: Packages of Debian and Ubuntu; other distributions call them the same.
_PACKAGES = {"ip": "iproute2", "tc": "iproute2"}

_libc = ctypes.CDLL(None, use_errno=True)


def check_privileges() -> None:
    """Refuse to start where namespaces and links cannot be made.

    Raises:
        ConfigError: Names what is missing and the command that gets it.
    """
    require_linux("an emulated network", "run it there, as root")
    missing = [tool for tool in _PACKAGES if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise ConfigError(
            f"diloco emulate needs {' and '.join(missing)}, not found on the PATH: "
            f"apt install {packages}"
        )
    if os.geteuid() != 0:
        raise ConfigError(
            "diloco emulate makes network namespaces and TUN devices, which needs root: sudo "
            "diloco emulate ... Without root, where user namespaces are allowed and /dev/net/tun "
            "is open to all: unshare --user --map-root-user --net --mount sh -c "
            "'mount -t tmpfs run /run && diloco emulate ...'. Without either, transport.link "
            "shapes the traffic inside the processes"
        )
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        raise ConfigError(
            f"diloco emulate needs TUN devices; /dev/net/tun: {error.strerror}. Load the module "
            f"(modprobe tun), in a container give the device (--device /dev/net/tun --cap-add "
            f"NET_ADMIN --cap-add SYS_ADMIN)"
        ) from error


def run_tool(command: Sequence[str], script: str = "") -> str:
    """Run `ip` or `tc`; returns what it printed.

    Args:
        command: Program and arguments.
        script: What it reads from its standard input.

    Raises:
        ConfigError: If it fails: the command and its own words.
    """
    result = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if result.returncode:
        shown = " ".join(command) + (f" <<< {script!r}" if script else "")
        raise ConfigError(f"{shown} failed: {result.stderr.strip() or result.returncode}")
    return result.stdout


@contextlib.contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """Be in a network namespace: this thread, what it opens, and the processes it starts.

    Raises:
        OSError: If it cannot be entered.
    """
    with open("/proc/thread-self/ns/net") as before, open(namespace) as wanted:
        _set_namespace(wanted.fileno())
        try:
            yield
        finally:
            _set_namespace(before.fileno())


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


@dataclass(slots=True)
class Namespaces:
    """The namespaces of one owner; a context manager, so that none outlives it."""

    names: Sequence[str]
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    swept: list[str] = field(default_factory=list)
    _held: int = -1

    def name(self, node: str) -> str:
        """Name of a node's namespace, for `ip netns exec`."""
        return f"diloco-{self.id}-{node}"

    def path(self, node: str) -> Path:
        """File that stands for a node's namespace."""
        return NAMESPACES / self.name(node)

    def enter(self, node: str) -> list[str]:
        """Words to put before a command that is to run in a node's namespace."""
        return ["ip", "netns", "exec", self.name(node)]

    def __enter__(self) -> Namespaces:
        """Sweep what dead owners left, then make our own."""
        OWNERS.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _sweeping():
            self.swept = sweep()
            self._held = acquire(OWNERS / self.id)
            write_pid(self._held, os.getpid())
        try:
            for node in self.names:
                run_tool(["ip", "netns", "add", self.name(node)])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove them."""
        self.close()

    def close(self) -> list[int]:
        """End what still runs in our namespaces and remove them; returns the ended processes."""
        if self._held < 0:
            return []
        ended = _remove(self.id)
        os.close(self._held)
        self._held = -1
        return ended


@contextlib.contextmanager
def _sweeping() -> Iterator[None]:
    """Let one process at a time look for the dead: a claim is a file first and a lock then."""
    descriptor = os.open(OWNERS / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sweep() -> list[str]:
    """Remove the namespaces of dead owners, with what runs in them; returns the owners' ids.

    Raises:
        ConfigError: If this process stands in one of them.
    """
    dead = [
        path.name
        for path in sorted(OWNERS.iterdir())
        if path.name != _LOCK and not path.suffix and holder(path) is None
    ]
    here = os.stat("/proc/self/ns/net").st_ino
    for owner in dead:
        if here in _inodes(owner):
            raise ConfigError(
                f"this shell is in a namespace of the emulation {owner}, whose diloco emulate has "
                f"died: leave it (exit), then start again"
            )
        _remove(owner)
    return dead


def _inodes(owner: str) -> dict[int, Path]:
    """Namespaces of an owner by inode."""
    return {path.stat().st_ino: path for path in NAMESPACES.glob(f"diloco-{owner}-*")}


def _remove(owner: str) -> list[int]:
    inodes = _inodes(owner)
    ended = _end_processes(set(inodes))
    for path in inodes.values():
        run_tool(["ip", "netns", "delete", path.name])
    for path in (OWNERS / f"{owner}.json", OWNERS / owner):
        path.unlink(missing_ok=True)
    return ended


def _end_processes(inodes: set[int]) -> list[int]:
    """Ask every process in these namespaces to end, then insist; returns them."""
    ended = _processes_in(inodes)
    until = time.monotonic() + _END_S
    for number, patience in ((signal.SIGTERM, until), (signal.SIGKILL, until + _END_S)):
        for pid in _processes_in(inodes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while _processes_in(inodes) and time.monotonic() < patience:
            time.sleep(_LOOK_S)
    return ended


def _processes_in(inodes: set[int]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino in inodes:
                    found.append(int(entry.name))
    return found
