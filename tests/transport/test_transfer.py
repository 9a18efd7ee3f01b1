"""What is kept of broken calls, and for how long; without a connection."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.transport.calls.limits import Lines
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.calls.serving import Attempt
from diloco.transport.contracts import Buffer, Handlers, IncomingCall, Reply
from diloco.transport.errors import PeerReset
from diloco.transport.framing import (
    FrameReader,
    Resumption,
    frame_chunks,
    frame_opening,
    frame_position,
    frame_whole,
)
from diloco.transport.framing import read_position as position
from diloco.transport.retry import RetryPolicy, retry
from diloco.transport.transfer import SENT_S, Kept, Partial, TransferTable


def broken(table: TransferTable, caller: str, number: int, filled: int, now: float) -> Kept:
    """Have a call break after so many bytes."""
    kept = table.enter(caller, number.to_bytes(16, "big"), stream := object(), now)
    kept.partial = Partial(bytearray(100), filled)
    table.leave(kept, stream, now)
    return kept


def test_the_next_attempt_finds_what_the_last_left() -> None:
    table = TransferTable(kept_bytes=1000, kept_s=10.0)
    kept = broken(table, "a", 1, 60, 0.0)

    again = table.enter("a", kept.name, object(), 5.0)

    assert again is kept and again.partial is not None and again.partial.filled == 60
    assert (table.num_idle, table.num_idle_bytes) == (0, 0)


def test_a_name_is_worth_nothing_to_another_caller() -> None:
    table = TransferTable(kept_bytes=1000, kept_s=10.0)
    kept = broken(table, "a", 1, 60, 0.0)

    assert table.enter("b", kept.name, object(), 1.0).partial is None


def test_what_nobody_comes_for_is_forgotten_after_its_time() -> None:
    table = TransferTable(kept_bytes=1000, kept_s=10.0)
    first, second = broken(table, "a", 1, 60, 0.0), broken(table, "a", 2, 60, 6.0)

    assert table.enter("a", first.name, object(), 10.0) is not first
    assert table.enter("a", second.name, object(), 10.0) is second


def test_over_the_bound_who_keeps_most_loses_its_oldest() -> None:
    table = TransferTable(kept_bytes=300, kept_s=1e9)
    modest = broken(table, "modest", 0, 60, 0.0)
    greedy = [broken(table, "greedy", n, 60, float(n)) for n in range(1, 9)]

    assert table.num_idle_bytes == 300, "what is held, not the 60 that have come"
    assert table.enter("modest", modest.name, object(), 9.0) is modest
    found = [table.enter("greedy", kept.name, object(), 9.0) is kept for kept in greedy]
    assert found == [False] * 6 + [True] * 2


def test_the_payload_that_is_furthest_is_kept_longest() -> None:
    table = TransferTable(kept_bytes=200, kept_s=1e9)
    furthest = broken(table, "a", 0, 80, 0.0)
    others = [broken(table, "a", number, number, 1.0) for number in range(1, 5)]

    assert table.enter("a", furthest.name, object(), 2.0) is furthest
    found = [table.enter("a", kept.name, object(), 2.0) is kept for kept in others]
    assert found == [False] * 3 + [True]


@pytest.mark.parametrize("numbers", [[1], [1, 2]], ids=["one-each", "two-smaller"])
def test_the_only_call_of_the_caller_that_keeps_most_stays_if_it_is_furthest(
    numbers: list[int],
) -> None:
    table = TransferTable(kept_bytes=250, kept_s=1e9)
    furthest = table.enter("large", b"large", stream := object(), 0.0)
    furthest.partial = Partial(bytearray(200), 199)
    table.leave(furthest, stream, 0.0)
    others = [broken(table, "small", number, number, 1.0) for number in numbers]

    assert table.enter("large", furthest.name, object(), 2.0) is furthest
    assert not any(table.enter("small", kept.name, object(), 2.0) is kept for kept in others)


def test_one_call_is_kept_however_large_it_is() -> None:
    table = TransferTable(kept_bytes=99, kept_s=1e9)
    broken(table, "a", 1, 60, 0.0)
    newest = broken(table, "a", 2, 60, 1.0)

    assert (table.num_idle, table.num_idle_bytes) == (1, 100)
    assert table.enter("a", newest.name, object(), 2.0) is newest


def test_over_the_number_who_keeps_most_calls_loses() -> None:
    table = TransferTable(kept_bytes=1000, kept_s=1e9, most=4)
    modest = broken(table, "modest", 0, 60, 0.0)
    for number in range(9):
        table.leave(table.enter("greedy", bytes([number]), greedy := object(), 1.0), greedy, 1.0)

    assert table.num_idle == 4
    assert table.enter("modest", modest.name, object(), 9.0) is modest


def test_a_reply_that_was_sent_to_its_end_goes_first_and_soon() -> None:
    table = TransferTable(kept_bytes=1000, kept_s=600.0)

    def answered(number: int, num_bytes: int, *, is_sent: bool) -> Kept:
        kept = table.enter("a", bytes([number]), stream := object(), 0.0)
        kept.answered(Reply(b"", bytes(num_bytes)))
        table.leave(kept, stream, 0.0, is_sent=is_sent)
        return kept

    cut = answered(0, 300, is_sent=False)
    first, second = answered(1, 300, is_sent=True), answered(2, 300, is_sent=True)
    answered(3, 300, is_sent=False)
    assert table.num_idle_bytes == 900
    assert table.enter("a", second.name, second, 0.0) is second
    table.leave(second, second, 0.0, is_sent=True)
    assert table.enter("a", first.name, object(), 0.0) is not first

    assert table.enter("a", second.name, object(), SENT_S) is not second
    assert table.enter("a", cut.name, object(), SENT_S) is cut


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "drop", "answer"]),
            st.integers(0, 5),
            st.integers(0, 100),
            st.floats(0, 5),
        ),
        max_size=60,
    )
)
def test_bounds_hold_whatever_happens(steps: list[tuple[str, int, int, float]]) -> None:
    table = TransferTable(kept_bytes=150, kept_s=10.0, most=3)
    held: dict[int, tuple[Kept, object]] = {}
    now = 0.0
    for action, number, filled, later in steps:
        now += later
        if action == "enter":
            stream = object()
            kept = table.enter(f"{number % 2}", bytes(15) + bytes([number]), stream, now)
            if kept.reply is None:  # what is answered is not asked for again
                kept.partial = kept.partial or Partial(bytearray(100), filled)
            held[number] = kept, stream
        elif number in held:
            kept, stream = held[number]
            if action == "leave":
                table.leave(kept, stream, now, is_sent=filled % 2 == 0)
                held.pop(number)
            elif action == "drop":
                table.drop(kept, stream)
                held.pop(number)
            else:
                kept.answered(Reply(b"h", bytes(filled)))
        assert table.num_idle <= 3 and 0 <= table.num_idle_bytes <= 150


def test_a_superseded_attempt_leaves_the_newer_one_alone() -> None:
    table = TransferTable(kept_bytes=1000, kept_s=10.0)
    old, new = object(), object()
    kept = table.enter("a", bytes(16), old, 0.0)
    assert table.enter("a", bytes(16), new, 1.0) is kept

    table.leave(kept, old, 2.0)
    table.drop(kept, old)

    assert kept.stream is new and table.num_idle == 0
    assert table.enter("a", bytes(16), object(), 3.0) is kept


@given(
    payload=st.binary(min_size=1, max_size=300),
    chunks=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    data=st.data(),
)
def test_any_sequence_of_breaks_and_chunk_sizes_gives_the_payload(
    payload: bytes, chunks: list[int], data: st.DataObject
) -> None:
    partial: Partial | None = None
    for chunk in chunks:
        name = Resumption(bytes(16), partial is not None)
        reader = FrameReader(frame_opening(b"h", len(payload), chunk, name))
        partial = reader.accept(1000, partial)
        messages = list(frame_chunks(payload, chunk, partial.filled))
        for message in messages[: data.draw(st.integers(0, len(messages)))]:
            reader.feed(message)
    reader = FrameReader(frame_opening(b"h", len(payload), 7))
    partial = reader.accept(1000, partial)
    for message in frame_chunks(payload, 7, partial.filled):
        reader.feed(message)
    assert bytes(reader.payload) == payload


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_positions_are_read_and_bounded(offset: int, size: int) -> None:
    try:
        assert position(frame_position(offset), size) == offset <= size
    except Exception as error:
        assert offset > size and "claims" in str(error)


def test_an_opening_is_no_position() -> None:
    assert position(frame_opening(b"", 5, 5), 5) is None


def test_a_budget_begins_again_with_progress() -> None:
    done = 0

    async def attempt() -> str:
        nonlocal done
        done += 1
        if done == 50:
            return "whole"
        raise PeerReset("cut")

    policy = RetryPolicy(first_wait_s=1.0, max_wait_s=1.0, budget_s=1.5)

    assert run_virtual(retry(attempt, policy, random.Random(1), lambda: done)) == "whole"


# -- attempts --------------------------------------------------------------------------------------

NAME = b"n" * 16


@dataclass(eq=False)
class Caller:
    """One attempt's stream, and the call that its handler is given."""

    table: TransferTable
    size: int = 100
    is_resuming: bool = False
    has_end: bool = False
    broken: Exception | None = None
    method: str = "take"
    header: bytes = b""
    peer: str = "island"
    caller: None = None
    arriving: asyncio.Queue[bytes | Exception | None] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.payload_bytes = self.size
        named = Resumption(NAME, self.is_resuming)
        frames = FrameReader(frame_opening(b"", self.size, 50, named))
        self.attempt = Attempt(self.table, "", frames, self)

    def send(self, num_chunks: int) -> None:
        for chunk in list(frame_chunks(bytes(self.size), 50))[:num_chunks]:
            self.arriving.put_nowait(chunk)

    async def ask(self, handlers: Handlers) -> None:
        await self.attempt.answer(handlers, self, Lines(100.0))

    async def read(self) -> bytes | None:
        message = await self.arriving.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, message: bytes) -> None:
        if self.broken:
            raise self.broken

    async def read_payload(self) -> Buffer:
        return await self.attempt.read_payload(has_end=self.has_end)


@pytest.mark.parametrize("broken", [ConnectionResetError(), TimeoutError()], ids=repr)
def test_a_caller_that_takes_no_position_is_not_a_disk_that_fails(broken: OSError) -> None:
    failures: list[Exception] = []

    async def take(call: IncomingCall) -> Reply:
        try:
            await call.read_payload()
        except Exception as error:
            failures.append(error)
            raise
        return Reply(b"")

    async def scenario() -> None:
        table = TransferTable(kept_bytes=1000, kept_s=10.0)
        first = Caller(table)
        first.send(1)
        first.arriving.put_nowait(PeerReset("cut"))
        await first.ask({"take": take})
        first.attempt.close()

        second = Caller(table, is_resuming=True, broken=broken)
        await second.ask({"take": take})
        second.attempt.close()

        assert [type(failure) for failure in failures] == [PeerReset, PeerReset]
        assert table.enter("", NAME, object(), 0.0).partial == Partial(bytearray(100), 50)

    run_virtual(scenario())


def test_an_attempt_that_was_superseded_while_it_waited_leaves_what_is_kept_alone() -> None:
    async def scenario() -> None:
        table = TransferTable(kept_bytes=1000, kept_s=10.0)
        waiting, newer = Caller(table, size=20), Caller(table)
        newer.send(1)
        reading = asyncio.create_task(newer.read_payload())
        await asyncio.sleep(1.0)
        reading.cancel()
        newer.attempt.close()
        before = table.num_idle_bytes

        with pytest.raises(PeerReset, match="newer attempt"):
            await waiting.read_payload()

        assert table.num_idle_bytes == before > 0
        table.enter("", NAME, object(), 2.0)
        assert table.num_idle_bytes == 0

    run_virtual(scenario())


def test_a_payload_that_is_whole_is_kept_though_its_end_never_came() -> None:
    async def take(call: IncomingCall) -> Reply:
        return Reply(b"", await call.read_payload())

    async def scenario() -> None:
        table = TransferTable(kept_bytes=1000, kept_s=10.0)
        caller = Caller(table, has_end=True)
        caller.send(2)
        caller.arriving.put_nowait(RuntimeError("the connection is gone"))
        await caller.ask({"take": take})
        caller.attempt.close()

        kept = table.enter("", NAME, object(), 0.0)
        assert kept.partial is not None and kept.partial.filled == len(kept.partial.payload)

    run_virtual(scenario())


def test_nothing_is_kept_of_a_whole_payload_that_is_sent_again() -> None:
    async def run() -> None:
        table = TransferTable(kept_bytes=1 << 20, kept_s=600.0)
        frames = FrameReader(frame_whole(b"", bytes(1000), Resumption(NAME)))
        caller = Caller(table)
        caller.attempt = Attempt(table, "", frames, caller)
        assert await caller.read_payload() == bytes(1000)
        caller.attempt.close()
        assert table.num_idle_bytes == 0

    run_virtual(run())


def test_an_attempt_that_hangs_ends_as_soon_as_the_next_one_comes() -> None:
    """Its handler may hold room in the spool that the next one waits for."""

    async def scenario() -> None:
        table = TransferTable(kept_bytes=1000, kept_s=10.0)
        room = asyncio.Lock()

        async def take(call: IncomingCall) -> Reply:
            async with room:
                return Reply(b"", await call.read_payload())

        hanging = Caller(table)
        hanging.send(1)
        first = asyncio.create_task(hanging.ask({"take": take}))
        await asyncio.sleep(1.0)
        newer = Caller(table, is_resuming=True)
        newer.arriving.put_nowait(list(frame_chunks(bytes(100), 50))[1])
        async with asyncio.timeout(1.0):
            await newer.ask({"take": take})
            await first
        hanging.attempt.close()

        assert first.exception() is None and not first.cancelling()
        newer.attempt.close()
        assert table.enter("", NAME, object(), 3.0).reply is not None

    run_virtual(scenario())


def test_an_attempt_that_is_cancelled_as_the_next_one_comes_stays_cancelled() -> None:
    async def scenario() -> None:
        table = TransferTable(kept_bytes=1000, kept_s=10.0)
        hanging = Caller(table)
        reading = asyncio.create_task(hanging.read_payload())
        await asyncio.sleep(1.0)
        Caller(table, is_resuming=True)
        reading.cancel()

        with pytest.raises(asyncio.CancelledError):
            await reading

    run_virtual(scenario())
