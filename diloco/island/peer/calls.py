"""A peer's calls: to the decider, and to the peers of other islands.

Calls to the decider are repeated for `unreachable_s`; a coordinator that is restarted meanwhile
disturbs nothing. What is pulled from another peer is asked for until it comes, and goes on where a
connection broke: how long that may take is the decider's to say, who then announces another
attempt.

Source: PROTOCOL.md, "All-reduce" and "Coordinator away".
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import blake3
from google.protobuf.message import DecodeError, Message

from diloco.bounded_text import bounded_text
from diloco.errors import CoordinatorUnavailable
from diloco.island.exchange.retried_calls import SLOWEST_BPS
from diloco.loop_clock import loop_now
from diloco.protos import allreduce_pb2 as wire
from diloco.protos import fragment_pb2
from diloco.protos.control_pb2 import Grant
from diloco.transport.contracts import PROTOCOL_VERSION, Buffer, Reply, Transport
from diloco.transport.errors import ConnectError, TransportError
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.transfer import Transfer

logger = logging.getLogger(__name__)

_POLL_WAIT_S = 20.0
#: A peer that has failed to answer for so long is told of.
_SILENT_S = 10.0


class PeerCalls:
    """Ways out of one peer; `bytes_up` and `bytes_down` count what crosses to other peers.

    `peers` are those that the decider last named, and `peer_grant` is what they are shown.
    """

    def __init__(
        self,
        decider: Transport,
        grant: Grant,
        connect: Callable[[str], Transport],
        *,
        rpc_deadline_s: float,
        policy: RetryPolicy,
        rng: random.Random,
    ) -> None:
        """Assign only; `connect` opens the way to the peer at an address."""
        self._decider = decider
        self._grant = grant
        self._connect = connect
        self._rpc_deadline_s = rpc_deadline_s
        self._policy = policy
        self._rng = rng
        self._transports: dict[str, Transport] = {}
        self._silent_since: dict[str, float] = {}  # island -> loop time
        self._unreached: set[str] = set()
        self.peers: Mapping[str, wire.Peer] = {}
        self.peer_grant = Grant()
        self.bytes_up = 0
        self.bytes_down = 0

    async def close(self) -> None:
        """Close every transport."""
        await asyncio.gather(
            self._decider.close(), *(transport.close() for transport in self._transports.values())
        )

    # -- to the decider --------------------------------------------------------------------------

    async def poll(
        self,
        address: str,
        decider_id: str,
        sequence: int,
        outstanding: Iterable[fragment_pb2.RoundKey],
    ) -> wire.PollReply:
        """Wait for news, at most some seconds."""
        request = wire.PollRequest(
            address=address,
            decider_id=decider_id,
            sequence=sequence,
            outstanding=outstanding,
            wait_s=_POLL_WAIT_S,
            unreached=sorted(self._unreached),
        )
        reply = await self._ask("allreduce.poll", request, wait_s=_POLL_WAIT_S)
        return wire.PollReply.FromString(reply.header)

    async def declare(self, request: wire.DeclareRequest) -> fragment_pb2.SubmitReply:
        """Say that a contribution is held here."""
        reply = await self._ask("allreduce.declare", request)
        return fragment_pb2.SubmitReply.FromString(reply.header)

    async def send(self, method: str, request: Message) -> fragment_pb2.Ack:
        """Say what is answered by an acknowledgement."""
        return fragment_pb2.Ack.FromString((await self._ask(method, request)).header)

    async def record(self, fragment_id: int) -> wire.RecordReply:
        """Ask for the newest commit record."""
        request = wire.RecordRequest(fragment_id=fragment_id)
        return wire.RecordReply.FromString((await self._ask("allreduce.record", request)).header)

    async def _ask(self, method: str, request: Message, *, wait_s: float = 0.0) -> Reply:
        """Call the decider until it answers; `request` gets version and grant.

        Raises:
            CoordinatorUnavailable: If no answer came within the policy's budget.
        """
        header, deadline_s = _addressed(request, self._grant), self._rpc_deadline_s + wait_s

        async def attempt() -> Reply:
            return await self._decider.call(method, header, deadline_s=deadline_s)

        try:
            return await retry(attempt, self._policy, self._rng, attempt_s=deadline_s)
        except TransportError as error:
            raise CoordinatorUnavailable(
                f"the coordinator at {self._decider.peer}, which decides the rounds, failed at "
                f"{method} for {self._policy.budget_s:g} s: {error}. Start it again: diloco "
                f"coordinator RUN.toml; then this island: diloco island RUN.toml --island "
                f"{self._grant.island}"
            ) from error

    async def name_peers(self, peers: Iterable[wire.Peer]) -> None:
        """Take the peers that the decider names; ways to others are closed."""
        before, self.peers = self.peers, {peer.island: peer for peer in peers}
        for island, peer in self.peers.items():
            if before.get(island) != peer:
                self._has_answered(island)  # a new start: of its silence nothing is known
        named = {peer.address for peer in self.peers.values()}
        gone = [self._transports.pop(address) for address in self._transports.keys() - named]
        await asyncio.gather(*(transport.close() for transport in gone))

    # -- to other peers --------------------------------------------------------------------------

    async def pull(
        self, island: str, method: str, request: Message, *, num_bytes: int, digest: bytes = b""
    ) -> Buffer:
        """Ask the peer of an island for one lane until it comes, of this size and digest.

        Cancel it when it is no longer wanted: it does not give up.
        """
        wait_s, problem, transfer = self._policy.first_wait_s, "", Transfer()
        while True:
            try:
                payload, refusal = await self._pull_once(
                    island, method, request, num_bytes, transfer
                )
                transfer = Transfer()  # what was answered is asked again
                if not refusal and digest and blake3.blake3(payload).digest() != digest:
                    refusal = "what came has another digest than was declared"
                    logger.warning("lane refused, island=%s method=%s: %s", island, method, refusal)
                if not refusal:
                    return payload
            except TransportError as error:
                refusal = str(error)
            if refusal != problem:
                logger.debug("asking again, island=%s method=%s: %s", island, method, refusal)
                problem = refusal
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._policy.max_wait_s)

    async def pull_once(
        self, island: str, method: str, request: Message, *, num_bytes: int
    ) -> tuple[Buffer, str]:
        """Ask once, and go on while more of it comes; returns what came, or nothing and why."""
        transfer = Transfer(is_bulk=True)
        while True:
            moved = transfer.moved_bytes
            try:
                return await self._pull_once(island, method, request, num_bytes, transfer)
            except TransportError as error:
                if transfer.moved_bytes == moved:
                    return b"", str(error)

    async def _pull_once(
        self, island: str, method: str, request: Message, num_bytes: int, transfer: Transfer
    ) -> tuple[Buffer, str]:
        peer = self.peers.get(island)
        if peer is None:
            return b"", "the decider has not named its peer yet"
        transport = self._transports.get(peer.address)
        began = loop_now()
        header = _addressed(request, self.peer_grant)
        received = transfer.received_bytes
        self.bytes_up += len(header)
        try:
            if transport is None:
                transport = self._transports[peer.address] = self._open(peer.address)
            reply = await transport.call(
                method,
                header,
                deadline_s=self._rpc_deadline_s + 8 * num_bytes / SLOWEST_BPS,
                max_reply_bytes=num_bytes,
                transfer=transfer,
            )
        except TransportError as error:
            self._is_silent(peer, began, error)
            raise
        finally:
            self.bytes_down += transfer.received_bytes - received
        self._has_answered(island)
        self.bytes_down += len(reply.header)
        try:
            answer = wire.LaneReply.FromString(reply.header)
        except DecodeError:
            return b"", "its answer cannot be read"
        if answer.status != wire.LANE_STATUS_OK:
            return b"", bounded_text(answer.message) or "not yet"
        if len(reply.payload) != num_bytes:
            return b"", f"{len(reply.payload)} bytes came, {num_bytes} were expected"
        if blake3.blake3(reply.payload).digest() != answer.digest:
            return b"", "what came does not match the digest that came with it"
        return reply.payload, ""

    def _open(self, address: str) -> Transport:
        """Open the way to a peer.

        Raises:
            ConnectError: If the address is none.
        """
        try:
            return self._connect(address)
        except ValueError as error:
            raise ConnectError(f"the address cannot be used: {error}") from error

    def _is_silent(self, peer: wire.Peer, began: float, error: TransportError) -> None:
        """Note that a call that began then has failed; warn once if calls have failed for long."""
        island, now = peer.island, loop_now()
        silent_s = now - self._silent_since.setdefault(island, began)
        if silent_s >= _SILENT_S and island not in self._unreached:
            self._unreached.add(island)
            logger.warning(
                "no answer from the peer of another island, island=%s address=%s silent_s=%.0f: "
                "%s. If it runs, see that islands.%s.peer_address is reached from here",
                island, peer.address, silent_s, error, island,
            )  # fmt: skip

    def _has_answered(self, island: str) -> None:
        self._silent_since.pop(island, None)
        self._unreached.discard(island)


def _addressed(request: Message, grant: Grant) -> bytes:
    """Serialise a message with the protocol's version and a grant put in."""
    # Every request has both fields, which the base class does not know.
    message: Any = request
    message.protocol_version = PROTOCOL_VERSION
    message.grant.CopyFrom(grant)
    header: bytes = message.SerializeToString()
    return header
