"""The hosts of one island: their supervisors start its ranks together and end them together.

    first host   --node-rank 0: listens at --rdzv HOST:PORT and decides
    other hosts  connect to it and do what it says; a lost connection ends their ranks

    other -> first   hello {...}, ended {code, reason, is_final}
    first -> other   start {rendezvous}, end, over {code, reason}

One JSON object a line over TCP, inside the island's own network: nothing here is encrypted, as the
ranks' own traffic is not. Every start has a store of its own at a port that is drawn for it, so no
rank meets the addresses of ranks that are gone. Waits are loops of the caller; nothing blocks long.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from diloco.errors import ConfigError, IslandFailed
from diloco.launch.host_position import HostPosition
from diloco.launch.ranks import RanksEnd
from diloco.transport.addresses import split_address

_LOOK_S = 0.1
_CONNECT_S = 5.0
#: Seconds in which other hosts end their ranks: a supervisor needs half of it to insist.
_END_S = 25.0
#: Code of a host that is gone: none of an island's own, so nobody waits for its last words.
_LOST = 1
_MAX_MESSAGE_BYTES = 65536
_SHOWN_CHARACTERS = 4096
#: Seconds of silence, seconds between probes, probes: a host that lost its power is noticed.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}

Message = Mapping[str, Any]  # JSON values


class HostLost(Exception):
    """The connection to another supervisor broke, or said what no supervisor says."""


class FirstHost:
    """The first host's view of the others; a context manager. With one host there are none."""

    def __init__(self, position: HostPosition, hello: Message) -> None:
        """Assign only; every host must send an equal `hello`."""
        self._position = position
        self._hello = hello
        self._listener: socket.socket | None = None
        self._strangers: list[_JsonLines] = []
        self._lines: dict[int, _JsonLines] = {}
        self._ends: dict[int, RanksEnd | None] = {}  # of the present start; None: at work
        self._ordered: RanksEnd | None = None

    def __enter__(self) -> FirstHost:
        """Listen, where others are expected."""
        if self._position.num_hosts > 1:
            self._listener = self._position.listen(split_address(self._position.meeting)[1])
            self._listener.setblocking(False)
        return self

    def __exit__(self, *_: object) -> None:
        """Close every connection."""
        for line in (*self._strangers, *self._lines.values()):
            line.close()
        if self._listener is not None:
            self._listener.close()

    def gather(self, check: Callable[[], None], patience_s: float) -> RanksEnd | None:
        """Wait until every other host is there.

        Returns:
            The end that somebody asked for on another host meanwhile, if so: no start follows.

        Raises:
            IslandFailed: If one is not in time; names it and what to type there.
        """
        until = time.monotonic() + patience_s
        self._listen()
        while missing := [h for h in range(1, self._position.num_hosts) if h not in self._lines]:
            if self._ordered is not None:
                break
            if time.monotonic() > until:
                there = HostPosition(self._position.num_hosts, missing[0], self._position.meeting)
                raise IslandFailed(
                    f"host {missing[0]} of this island did not come within {patience_s:g} s; type "
                    f"there: diloco island RUN.toml --island {self._hello['island']}"
                    f"{there.options()}"
                )
            check()
            time.sleep(_LOOK_S)
            self._listen()
        return self._ordered

    def start(self, rendezvous: str) -> None:
        """Let every other host start its ranks."""
        self._ends = dict.fromkeys(self._lines)
        self._send_all("start", rendezvous=rendezvous)

    def look(self) -> RanksEnd | None:
        """Say how the others' ranks ended once one has failed or all are done; None before."""
        self._listen()
        ends = list(self._ends.values())
        if failed := [end for end in ends if end is not None and end.code]:
            return min(failed, key=lambda end: end.telling)
        return None if None in ends else RanksEnd(0)

    def end(self) -> RanksEnd:
        """Let every other host end its ranks, wait until it has, and say what tells most."""
        self._send_all("end")
        until = time.monotonic() + _END_S
        while None in self._ends.values() and time.monotonic() < until:
            self._listen()
            time.sleep(_LOOK_S)
        for host in [host for host, end in self._ends.items() if end is None]:
            self._lose(host, "did not end its ranks")
        ends = [end for end in self._ends.values() if end is not None]
        return min(ends, key=lambda end: end.telling, default=RanksEnd(0))

    def over(self, end: RanksEnd) -> None:
        """Tell everybody that nothing will be started again."""
        self._send_all("over", code=end.exit_code, reason=end.reason[:_SHOWN_CHARACTERS])

    def _send_all(self, kind: str, **values: Any) -> None:
        for host, line in list(self._lines.items()):
            try:
                line.send(kind, **values)
            except HostLost as lost:
                self._lose(host, f"broke its connection: {lost}")

    def _lose(self, host: int, how: str) -> None:
        self._lines.pop(host).close()
        if host in self._ends and self._ends[host] is None:
            who = f"host {host} of island {self._hello['island']}"
            self._ends[host] = RanksEnd(_LOST, f"{who} (--node-rank {host}) {how}")

    def _listen(self) -> None:
        """Take in what has arrived: connections, greetings, ends."""
        if self._listener is None:
            return
        with contextlib.suppress(BlockingIOError):
            self._strangers.append(_JsonLines(self._listener.accept()[0]))
        strangers, self._strangers = self._strangers, []
        for line in strangers:
            try:
                if messages := line.receive():
                    self._admit(line, messages[0])
                else:
                    self._strangers.append(line)
            except HostLost:  # a host of the island comes again, or is missed
                line.close()
        for host, line in list(self._lines.items()):
            try:
                for message in line.receive():
                    self._note(host, message)
            except HostLost as lost:
                self._lose(host, f"broke its connection: {lost}")

    def _note(self, host: int, message: Message) -> None:
        """Keep how the ranks of a host ended."""
        end = RanksEnd(int(message["code"]), str(message["reason"]), bool(message["is_final"]))
        self._ends[host] = end
        if end.is_final:
            self._ordered = end

    def _admit(self, line: _JsonLines, hello: Message) -> None:
        """Take a host in, or tell it why not."""
        host, theirs, ours = hello.get("host_index"), hello.get("settings"), self._hello
        if not isinstance(theirs, dict):
            raise HostLost("another program is at the other end")
        differing = [
            f"{key}: {theirs.get(key)!r} there, {ours[key]!r} on the first host"
            for key in ours
            if theirs.get(key) != ours[key]
        ]
        if not isinstance(host, int) or not 0 < host < self._position.num_hosts:
            differing.append(f"--node-rank {host} is none of 1 to {self._position.num_hosts - 1}")
        if differing:
            reason = "this host does not belong to the island: " + "; ".join(differing)
            line.send("over", code=ConfigError.exit_code, reason=reason)
            line.close()
            return
        assert isinstance(host, int)
        if host in self._lines:
            self._lose(host, "was started again")
        self._lines[host] = line


class OtherHost:
    """Another host's view of the first one; `connect` first, use it as a context manager.

    Attributes:
        has_heard: Whether the first host has said anything.
    """

    def __init__(self, position: HostPosition, hello: Message) -> None:
        """Assign only; `hello` must equal the first host's."""
        self._position = position
        self._hello = hello
        self._line: _JsonLines | None = None
        self._told: list[Message] = []
        self.has_heard = False

    def __enter__(self) -> OtherHost:
        """Open nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        if self._line is not None:
            self._line.close()

    def connect(self, check: Callable[[], None], until: float) -> None:
        """Reach the first host, at the latest at `until` on the monotonic clock.

        Raises:
            IslandFailed: If it does not answer in time.
            HostLost: If the connection breaks at once.
        """
        address = (self._position.host, split_address(self._position.meeting)[1])
        while self._line is None:
            try:
                self._line = _JsonLines(socket.create_connection(address, timeout=_CONNECT_S))
            except OSError as error:
                if time.monotonic() > until:
                    raise IslandFailed(
                        f"the first host of this island does not answer at --rdzv "
                        f"{self._position.meeting}: {error.strerror or error}. Is it the host "
                        f"where --node-rank 0 was typed?"
                    ) from error
                check()
                time.sleep(_LOOK_S)
        self._line.send("hello", host_index=self._position.host_index, settings=dict(self._hello))

    def peek(self) -> Message | None:
        """Return what `next` will, and leave it there.

        Raises:
            HostLost: If the connection broke.
        """
        assert self._line is not None, "used before connect()"
        if not self._told:
            self._told += self._line.receive()
            self.has_heard = self.has_heard or bool(self._told)
        return self._told[0] if self._told else None

    def next(self) -> Message | None:
        """Return the next thing that the first host said, None when it said nothing.

        Raises:
            HostLost: If the connection broke.
        """
        return self._told.pop(0) if self.peek() is not None else None

    def ended(self, end: RanksEnd) -> None:
        """Say how the ranks of this host ended; once a start.

        Raises:
            HostLost: If the connection broke.
        """
        assert self._line is not None, "used before connect()"
        values = asdict(end)
        values["reason"] = end.reason[:_SHOWN_CHARACTERS]
        self._line.send("ended", **values)


class _JsonLines:
    """JSON objects over one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arrived = b""
        self._broken = ""  # why nothing comes any more
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setblocking(False)

    def send(self, kind: str, **values: Any) -> None:
        """Send one message: far smaller than what a connection takes without waiting."""
        try:
            self._connection.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")
        except OSError as error:
            raise HostLost(str(error)) from error

    def receive(self) -> list[Message]:
        """Return what has arrived, perhaps nothing; what came before a break comes first."""
        try:
            while data := self._connection.recv(4096):
                self._arrived += data
            self._broken = "the connection is closed"
        except BlockingIOError:
            pass  # all that has arrived is read
        except OSError as error:
            self._broken = str(error)
        *lines, self._arrived = self._arrived.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
            kinds = [message["kind"] for message in messages]
        except (ValueError, TypeError, KeyError) as error:
            raise HostLost("another program is at the other end") from error
        if len(self._arrived) > _MAX_MESSAGE_BYTES:
            raise HostLost(f"it sends a message of more than {_MAX_MESSAGE_BYTES} bytes")
        if self._broken and not kinds:
            raise HostLost(self._broken)
        return messages

    def close(self) -> None:
        self._connection.close()
