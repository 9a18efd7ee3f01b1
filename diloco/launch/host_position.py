"""The position of a host among the hosts of its island, from the options that were typed."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from dataclasses import dataclass

from diloco.errors import ConfigError
from diloco.transport.addresses import is_loopback, split_address

#: Linux: address of an interface.
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class HostPosition:
    """This host among those of its island.

    Args:
        num_hosts: Hosts of the island.
        host_index: This one, 0 to num_hosts - 1.
        meeting: HOST:PORT at which the first host listens; empty for one host.
    """

    num_hosts: int = 1
    host_index: int = 0
    meeting: str = ""

    @classmethod
    def of(cls, num_ranks: int, *, nnodes: int | None, node_rank: int, rdzv: str) -> HostPosition:
        """Check what was typed: ``--nnodes``, ``--node-rank`` and ``--rdzv``.

        One host needs none of them, but may be given all of them, as a script does.

        Raises:
            ConfigError: If they do not fit together, or an island of `num_ranks` ranks cannot be
                spread evenly.
        """
        if nnodes is None:
            if rdzv or node_rank:
                raise ConfigError(
                    f"--node-rank {node_rank} and --rdzv {rdzv or '(not given)'} are for an island "
                    f"of several hosts: give --nnodes too, or leave them out"
                )
            nnodes = 1
        if nnodes < 1 or num_ranks % nnodes:
            raise ConfigError(
                f"--nnodes {nnodes}: the island has ranks = {num_ranks}, which must be a multiple "
                f"of its hosts"
            )
        if not 0 <= node_rank < nnodes:
            raise ConfigError(
                f"--node-rank {node_rank}: must be from 0 to {nnodes - 1}, below --nnodes {nnodes}"
            )
        if nnodes == 1 and not rdzv:
            return cls()
        try:
            _, port = split_address(rdzv)
        except ValueError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"--rdzv {rdzv or '(not given)'}: with --nnodes {nnodes} give HOST:PORT of the "
                f"first host (--node-rank 0), the same on every host"
            )
        return cls() if nnodes == 1 else cls(nnodes, node_rank, rdzv)

    @property
    def host(self) -> str:
        """Name or address of the first host; this machine's loopback for one host."""
        return split_address(self.meeting)[0].strip("[]") if self.meeting else "127.0.0.1"

    def island_ranks(self, num_ranks: int) -> range:
        """Ranks of this host: hosts hold consecutive ones."""
        here = num_ranks // self.num_hosts
        return range(self.host_index * here, (self.host_index + 1) * here)

    def options(self) -> str:
        """Options of the command line that say this place, with a space before each."""
        if self.num_hosts == 1:
            return ""
        return f" --nnodes {self.num_hosts} --node-rank {self.host_index} --rdzv {self.meeting}"

    def listen(self, port: int) -> socket.socket:
        """Listen on this host, the first one; port 0: any free one.

        Raises:
            ConfigError: If the host is none of this machine's addresses, or one that other hosts
                cannot reach, or the port is taken.
        """
        try:
            family, address = _resolve(self.host)
            listener = socket.create_server((address, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"--rdzv {self.meeting}: the first host (--node-rank 0) cannot listen at "
                f"{self.host}:{port}: {error.strerror or error}; give an address of this host and "
                f"a free port"
            ) from error
        if is_loopback(address) and not is_loopback(self.host):
            listener.close()
            raise ConfigError(
                f"--rdzv {self.meeting}: {self.host} is {address} on this host, which others "
                f"cannot reach; give its address instead of its name"
            )
        return listener

    def interface(self) -> str:
        """Name the network interface that faces the first host; empty if it cannot be told."""
        with contextlib.suppress(OSError):
            family, address = _resolve(self.host)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: it asks for the route
                own = probe.getsockname()[0]
                for _, name in socket.if_nameindex():
                    if family == socket.AF_INET and _ipv4_of(probe, name) == own:
                        return name
        return ""


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])


def _ipv4_of(probe: socket.socket, interface: str) -> str:
    """Address of an interface; empty when it has none, or where the system cannot say."""
    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return ""
