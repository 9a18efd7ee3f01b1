"""Calls over libp2p streams, through hivemind's daemon, in checksummed chunks."""

from __future__ import annotations

import asyncio

from diloco.transport.calls.requesting import Request
from diloco.transport.contracts import Buffer, Reply
from diloco.transport.deadlines import Deadlines, restart
from diloco.transport.errors import ConnectError, PeerReset, TransportError
from diloco.transport.framing import DEFAULT_CHUNK_BYTES, check_call, check_chunk_bytes
from diloco.transport.libp2p.address import parse_peer_address
from diloco.transport.libp2p.daemon import Daemon, DaemonFailed, HivemindMissing, Stream, Swarm
from diloco.transport.libp2p.wire import (
    ACCEPTED,
    LONGEST_S,
    Opening,
    largest_chunk,
    read_message,
    write_message,
)
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.shaping.packing import Packers
from diloco.transport.shaping.turns import LineTurns
from diloco.transport.transfer import Transfer

#: Seconds that a daemon is kept at least, although it does not try a peer again yet.
_KEEP_S = 2.0


class HivemindTransport:
    """A route to one peer, over a libp2p daemon and hence a connection of its own.

    The daemon is started by the first call and ended by `close`. It belongs to the event loop of
    its first call.
    """

    def __init__(
        self,
        address: str,
        swarm: Swarm = Swarm(),  # noqa: B008 - frozen
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        token: str = "",
        pacer: Pacer | None = None,
    ) -> None:
        """Keep where the peer is and how it is found.

        Args:
            address: Of the peer; see `hivemind_address`.
            swarm: Through whom it is found where `address` names no route, or no good one.
            chunk_bytes: Chunk size of requests.
            token: Sent with every call; empty: none.
            pacer: Of this process; None: one without a rate.

        Raises:
            ValueError: If `address` is none or `chunk_bytes` is out of range.
        """
        check_chunk_bytes(chunk_bytes)
        self._address = address
        self._peer = parse_peer_address(address)
        self._swarm = swarm
        self._chunk_bytes = chunk_bytes
        self._token = token
        self._packers = Packers(pacer or Pacer())
        self._starting: asyncio.Task[Daemon] | None = None
        self._started_at = 0.0
        self._ending: set[asyncio.Task[None]] = set()
        self._deadlines = Deadlines(address)
        self._turns = LineTurns(chunk_bytes)

    @property
    def peer(self) -> str:
        """The peer's address."""
        return self._address

    async def call(
        self,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = 0,
        transfer: Transfer | None = None,
    ) -> Reply:
        """Call `method`; see `contracts.Transport`.

        Raises:
            TransportError: In addition, if hivemind is not installed; trying again is no use.
        """
        check_call(header, deadline_s=deadline_s, max_reply_bytes=max_reply_bytes)
        try:
            size, is_bulk = memoryview(payload).nbytes, bool(transfer and transfer.is_bulk)
            async with (
                self._turns.turn(size, max_reply_bytes, is_bulk=is_bulk) as under_way,
                self._deadlines.within(method, deadline_s) as scope,
            ):
                if transfer is not None:
                    under_way.on_moved(lambda: restart(scope, deadline_s))
                reader, writer, is_relayed = await self._open()
                try:
                    request = Request(
                        header,
                        payload,
                        transfer,
                        max_reply_bytes=max_reply_bytes,
                        chunk_bytes=largest_chunk(self._chunk_bytes, size, is_relayed=is_relayed),
                        packer=self._packers.of("", method),
                        under_way=under_way,
                    )
                    opening = Opening(method, self._token, LONGEST_S if transfer else deadline_s)
                    return await self._exchange(opening, request, reader, writer)
                finally:
                    writer.transport.abort()
        except TransportError as error:
            if error.peer:
                raise
            raise type(error)(str(error), peer=self._address, method=method) from error

    async def close(self) -> None:
        """End the daemon; calls in flight raise `TransportClosed`."""
        self._deadlines.close()
        if self._starting is not None:
            self._starting.cancel()  # one that is not there yet is not waited for
            self._retire(self._starting)
        while self._ending:
            await asyncio.wait(self._ending)

    async def _exchange(
        self,
        opening: Opening,
        request: Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> Reply:
        try:
            writer.write(opening.to_bytes())
            sending = asyncio.get_running_loop().create_task(_send(writer, request))
            try:
                return await _read_reply(reader, request)
            finally:
                await _end(sending)
        except TransportError as error:
            request.failed(error)
            raise
        finally:
            request.close()

    async def _open(self) -> Stream:
        """Open a stream, by a new daemon where the one that runs does not try.

        Raises:
            ConnectError: If the peer cannot be reached.
        """
        try:
            starting = self._start()
            daemon = await asyncio.shield(starting)
            try:
                return await daemon.open(self._peer)
            except DaemonFailed as error:
                if not self._is_worn(daemon, error):
                    raise
            self._retire(starting)
            return await (await asyncio.shield(self._start())).open(self._peer)
        except DaemonFailed as error:
            raise ConnectError(str(error)) from error
        except HivemindMissing as error:
            raise TransportError(str(error)) from error

    def _is_worn(self, daemon: Daemon, error: DaemonFailed) -> bool:
        """Whether another daemon might reach the peer although this one does not.

        After a failure libp2p does not dial a peer for seconds, after several for minutes, and a
        daemon cannot be told otherwise: a peer that came back would wait that long.
        """
        age_s = asyncio.get_running_loop().time() - self._started_at
        return not daemon.is_connected or (error.is_backoff and age_s >= _KEEP_S)

    def _start(self) -> asyncio.Task[Daemon]:
        """Return the start of the daemon; a call that gives up meanwhile does not stop it."""
        if self._starting is None:
            loop = asyncio.get_running_loop()
            self._started_at = loop.time()
            self._starting = loop.create_task(Daemon.start(self._swarm))
            self._starting.add_done_callback(self._started)
        return self._starting

    def _retire(self, starting: asyncio.Task[Daemon]) -> None:
        """Have a daemon ended, in no call's time, unless another took its place already."""
        if self._starting is starting:
            self._starting = None
            ending = asyncio.get_running_loop().create_task(_stop(starting))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _started(self, task: asyncio.Task[Daemon]) -> None:
        if not task.cancelled() and task.exception() is not None and self._starting is task:
            self._starting = None


async def _stop(starting: asyncio.Task[Daemon]) -> None:
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().stop()


async def _send(writer: asyncio.StreamWriter, request: Request) -> None:
    async for message in request.messages():
        await write_message(writer, message)


async def _read_reply(reader: asyncio.StreamReader, request: Request) -> Reply:
    kind: type[TransportError] = ConnectError
    try:
        await reader.readexactly(len(ACCEPTED))
        kind = PeerReset
        request.arrived()
        return await request.read_reply(lambda: read_message(reader))
    except (EOFError, OSError) as error:
        raise kind(f"the stream broke: {error}") from error


async def _end(sending: asyncio.Task[None]) -> None:
    """Stop sending: the reply is there, or nobody listens any more."""
    sending.cancel()
    await asyncio.wait({sending})
    if not sending.cancelled():
        sending.exception()  # a broken stream, which the reading has met, too
