"""Calls to one syncer, each made again until it is answered.

This is the one boundary where errors of the transport become errors of the product.

Source: PROTOCOL.md, "Coordinator away".
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from google.protobuf.message import Message

from diloco.config.network import TransportConfig
from diloco.errors import CoordinatorUnavailable, DilocoError
from diloco.island.exchange.damage import LineDamage
from diloco.loop_clock import loop_now
from diloco.transport.contracts import Buffer, Reply, Transport
from diloco.transport.errors import HandlerFailed, NotYet, OutOfRange, TransportError
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.transfer import Transfer

logger = logging.getLogger(__name__)

#: A call without a message for a payload's time at this rate is broken off, and made again.
SLOWEST_BPS = 1e6
#: Longest wait between two attempts of one call.
MOST_WAIT_S = 1.0


def program_error(
    error: HandlerFailed | OutOfRange, peer: str, method: str, log: str, island: str
) -> DilocoError:
    """Return the error of a call that was answered by a failure, which no repetition can fix."""
    if isinstance(error, OutOfRange):
        text = (
            f"{peer} refuses what island {island!r} says: {error}. Its configuration and the "
            f"coordinator's differ, or this process counts wrongly: compare run.inner_steps and "
            f"the sections outer and islands of both files"
        )
    else:
        text = (
            f"{peer} was reached, and its program failed at {method}: {error}. This is a defect, "
            f"which another start may meet again: report it with {log}; if the versions of diloco "
            f"differ between the sites, install the same everywhere"
        )
    return DilocoError(text, island_id=island)


def retry_policy(settings: TransportConfig) -> RetryPolicy:
    """Return how long calls are tried, by the configuration of the transport."""
    return RetryPolicy(max_wait_s=MOST_WAIT_S, budget_s=settings.unreachable.seconds)


class _Progress:
    """How far all calls over one transport have come together; never falls.

    A lane may wait for its turn longer than the budget: the syncer is reached as long as others
    move. Control and data are counted apart, for either connection may be broken alone.
    """

    def __init__(self) -> None:
        self._count = 0
        #: By name, with the most that each had moved when it was looked at.
        self._under_way: dict[bytes, tuple[Transfer, int]] = {}

    @contextlib.contextmanager
    def of(self, transfer: Transfer) -> Iterator[None]:
        """Count what this call moves."""
        self._under_way[transfer.name] = transfer, 0
        try:
            yield
        finally:
            self.count()
            del self._under_way[transfer.name]

    def answered(self) -> None:
        """Count a reply."""
        self._count += 1

    def count(self) -> int:
        """Return the replies, and the bytes that need not move again."""
        for name, (transfer, most) in self._under_way.items():
            if transfer.moved_bytes > most:
                self._count += transfer.moved_bytes - most
                self._under_way[name] = transfer, transfer.moved_bytes
        return self._count


class _Bytes:
    """Bytes that calls have sent and received so far, those under way included. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._up = self._down = 0
        #: By name, with what each had sent and received before this attempt.
        self._under_way: dict[bytes, tuple[Transfer, int, int]] = {}

    @contextlib.contextmanager
    def of(self, transfer: Transfer, header: bytes) -> Iterator[None]:
        """Count what an attempt moves, and its header."""
        with self._lock:
            self._up += len(header)
            self._under_way[transfer.name] = transfer, transfer.sent_bytes, transfer.received_bytes
        try:
            yield
        finally:
            with self._lock:
                _, sent, received = self._under_way.pop(transfer.name)
                self._up += transfer.sent_bytes - sent
                self._down += transfer.received_bytes - received

    def received(self, header: bytes) -> None:
        """Count the header of a reply."""
        with self._lock:
            self._down += len(header)

    @property
    def moved(self) -> tuple[int, int]:
        """Sent and received."""
        with self._lock:
            up, down = self._up, self._down
            for transfer, sent, received in self._under_way.values():
                up += transfer.sent_bytes - sent
                down += transfer.received_bytes - received
            return up, down


class SyncerReach:
    """When each of those that a rank calls has answered last: syncers, and the coordinator."""

    def __init__(self) -> None:
        """Assign only."""
        self._at: dict[Hashable, float] = {}

    def answered(self, who: Hashable) -> None:
        """Record an answer; in the loop, by whose clock it counts."""
        self._at[who] = loop_now()

    def has_answered(self, who: Hashable) -> bool:
        """Whether there was an answer of one."""
        return who in self._at

    def since_another_s(self, who: Hashable) -> float:
        """Seconds since the last answer of anybody but one; infinite: there was none."""
        last = max((at for each, at in self._at.items() if each != who), default=float("-inf"))
        return loop_now() - last


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, however often it is made.

    `untold` is what had moved at attempts that broke after sending more: how much of that arrived,
    only the next attempt is told, so each is worth one.
    """

    transport: Transport
    method: str
    header: bytes
    payload: Buffer
    max_reply_bytes: int
    deadline_s: float
    transfer: Transfer
    untold: set[int] = field(default_factory=set)

    @property
    def has_payload(self) -> bool:
        """Whether anything but headers travels."""
        return memoryview(self.payload).nbytes + self.max_reply_bytes > 0


class RetriedCalls:
    """Calls over a control and a data transport to one syncer.

    `moved` counts headers and payloads, what was sent again included; `num_failed` attempts that
    broke. A call that breaks is made again, and goes on where it was unless its payload is one that
    travels in one message (`framing.WHOLE_BYTES`). While `asks_first`, the newest word of the
    syncer, or once it says `NotYet`, a payload is sent when it is its turn there, however long that
    takes.
    """

    def __init__(
        self,
        control: Transport,
        data: Transport,
        island: str,
        *,
        rpc_deadline_s: float,
        policy: RetryPolicy,
        rng: random.Random,
        reach: SyncerReach,
        damage: LineDamage,
    ) -> None:
        """Assign only; `island` is named in errors.

        One call may be still for `rpc_deadline_s`, besides its payload's time at `SLOWEST_BPS`; all
        its repetitions the budget, from the last progress of any call over the same transport on. A
        syncer that has answered, and is not there at all any more, is called on as long as others
        of the `reach` answer: its fragments alone wait. What came to harm on the way is asked for
        again and counted by `damage`.
        """
        self._control = control
        self._data = data
        self._island = island
        self._rpc_deadline_s = rpc_deadline_s
        self._policy = policy
        self._rng = rng
        self._reach = reach
        self._damage = damage
        self._is_away = False  # nothing answers, not even on the way for control
        self._progress = {transport: _Progress() for transport in (control, data)}
        self.asks_first = False
        self.num_failed = 0
        self._bytes = _Bytes()

    @property
    def peer(self) -> str:
        """Where the syncer is."""
        return self._control.peer

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes sent and received, those of calls under way included."""
        return self._bytes.moved

    async def close(self) -> None:
        """Close both transports."""
        await self._control.close()
        await self._data.close()

    async def control(self, method: str, message: Message, *, wait_s: float = 0.0) -> Reply:
        """Call without payloads until it is answered; the answer may be held back for `wait_s`.

        Raises:
            CoordinatorUnavailable: If no answer came within the policy's budget, nor from anybody
                else where the syncer is not there at all; or one that no repetition can mend.
            DilocoError: If the syncer's program failed at the call: it is reached, and has a
                defect.
        """
        deadline_s = self._rpc_deadline_s + wait_s
        header = message.SerializeToString()
        return await self._answer(
            _Call(self._control, method, header, b"", 0, deadline_s, Transfer())
        )

    async def data(
        self,
        method: str,
        message: Message,
        payload: Buffer = b"",
        *,
        max_reply_bytes: int = 0,
        is_bulk: bool = False,
        asks_first: bool = False,
    ) -> Reply:
        """Call with a payload, or for one, until it is answered; raises what `control` does."""
        payload_bytes = memoryview(payload).nbytes + max_reply_bytes
        deadline_s = self._rpc_deadline_s + 8 * payload_bytes / SLOWEST_BPS
        transfer = Transfer(is_bulk=is_bulk, asks_first=asks_first or self.asks_first)
        header = message.SerializeToString()
        return await self._answer(
            _Call(self._data, method, header, payload, max_reply_bytes, deadline_s, transfer)
        )

    async def _answer(self, call: _Call) -> Reply:
        peer, method = call.transport.peer, call.method
        try:
            with self._progress[call.transport].of(call.transfer):
                return await self._repeat(call)
        except (HandlerFailed, OutOfRange) as error:
            log = "syncer*.log of coordinator.state_dir"
            raise program_error(
                error, f"the syncer at {peer}", method, log, self._island
            ) from error
        except TransportError as error:
            what = (
                f"gave no answer to {method} for {self._policy.budget_s:g} s"
                if error.is_retryable
                else f"failed at {method}"
            )
            raise CoordinatorUnavailable(
                f"the syncer at {peer} {what}: {error}. If the coordinator is down, "
                f"start it again, its syncer comes with it: diloco coordinator RUN.toml; then this "
                f"island: diloco island RUN.toml --island {self._island}"
            ) from error

    async def _repeat(self, call: _Call) -> Reply:
        """Make a call until it is answered, or no syncer answers any more."""
        progress, left_s = self._progress[call.transport], self._policy.budget_s
        while True:
            policy = replace(self._policy, budget_s=left_s)
            try:
                return await retry(
                    lambda: self._attempt(call),
                    policy,
                    self._rng,
                    lambda: progress.count() + len(call.untold),
                    lambda: call.transfer.moved_bytes,
                    attempt_s=call.deadline_s,
                )
            except TransportError as error:
                left_s = self._policy.budget_s - self._reach.since_another_s(self)
                # Less than one wait would be no time at all, again and again.
                is_worth_it = left_s > self._policy.max_wait_s
                # One that this start has never reached may be no syncer of the run's at all.
                is_away = self._is_away and self._reach.has_answered(self)
                if not (error.is_retryable and is_away and is_worth_it):
                    raise
                logger.warning(
                    "others answer, the syncer at %s does not: its fragments wait: %s",
                    call.transport.peer,
                    error,
                )

    async def _attempt(self, call: _Call) -> Reply:
        transfer = call.transfer
        sent = transfer.sent_bytes
        try:
            with self._bytes.of(transfer, call.header):
                reply = await call.transport.call(
                    call.method,
                    call.header,
                    call.payload,
                    deadline_s=call.deadline_s,
                    max_reply_bytes=call.max_reply_bytes,
                    transfer=transfer if call.has_payload else None,
                )
        except NotYet:
            self._has_answered(call)  # however long the queue is there
            transfer.asks_first = True
            raise
        except TransportError as error:
            self.num_failed += 1
            if error.is_damage:  # somebody is there
                self._damage.found(error)
            else:
                self._is_away = self._is_away or call.transport is self._control
            raise
        finally:
            if transfer.sent_bytes > sent:
                call.untold.add(transfer.moved_bytes)
        self._has_answered(call)
        self._bytes.received(reply.header)
        return reply

    def _has_answered(self, call: _Call) -> None:
        self._progress[call.transport].answered()
        self._reach.answered(self)
        self._is_away = False
