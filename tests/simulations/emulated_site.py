"""Files and connections for tests on emulated networks, and whether this machine can make one."""

from __future__ import annotations

import hashlib
import socket
import threading
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.simulations.emulate.config import load_wan
from diloco.simulations.emulate.emulation import Emulation
from diloco.simulations.emulate.namespaces import check_privileges, inside


def _why_not() -> str:
    try:
        check_privileges()
    except ConfigError as error:
        return str(error)
    return ""


#: Emulation is tested wherever namespaces may be made.
needs_namespaces = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


def make_emulation(directory: Path, text: str) -> Emulation:
    """Write a file and lay out its network; `with` makes it."""
    path = directory / "wan.toml"
    path.write_text(text)
    return Emulation(load_wan(path))


def star(*, up: str, down: str, head: str = "", tail: str = "") -> str:
    """Write a star of two islands with one link."""
    return f"""
topology = "star"
{head}
[links.tested]
source = "a test"
up = {{ {up} }}
down = {{ {down} }}
[islands.a]
link = "tested"
[islands.b]
link = "tested"
{tail}
"""


class Transfer:
    """One TCP connection between two nodes of an emulated network."""

    def __init__(self, emulation: Emulation, source: str, target: str) -> None:
        network, spaces = emulation.network, emulation.namespaces
        with inside(spaces.path(target)):
            listener = socket.create_server((network.address(target), 0))
        with inside(spaces.path(source)):
            self.sender = socket.socket()
        with listener:
            self.sender.settimeout(50)
            self.sender.connect(listener.getsockname())
            self.receiver, self.peer = listener.accept()
        self.receiver.settimeout(50)

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.receiver.close()

    def carry(self, payload: bytes) -> bool:
        """Send `payload` and the end; whether it arrived as it was."""
        received = hashlib.sha256()

        def receive() -> None:
            while part := self.receiver.recv(1 << 20):
                received.update(part)

        thread = threading.Thread(target=receive)
        thread.start()
        self.sender.sendall(payload)
        self.sender.shutdown(socket.SHUT_WR)
        thread.join()
        return received.digest() == hashlib.sha256(payload).digest()

    @property
    def congestion_control(self) -> tuple[str, str]:
        """Algorithm of the sender and of the receiver."""
        return _congestion_control(self.sender), _congestion_control(self.receiver)


def _congestion_control(connection: socket.socket) -> str:
    text = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return text.rstrip(b"\0").decode()
