"""What a syncer refuses: with the reason in words, counted by cause, and nobody else is hurt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch

from diloco.bounded_text import MOST_REASON
from diloco.compression.base import to_bytes
from diloco.protocol.rounds.messages import key_message
from diloco.protocol.rounds.terms import RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import RefusalCount
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.errors import FrameError
from tests.raw_island import KEY, NUMEL, RawIsland, founded
from tests.virtual_run import Setting, VirtualRun, grant


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting({"w": [0.0] * NUMEL}, lambda *_: None, tmp_path, inner_steps=8)


def refusals(run: VirtualRun) -> dict[tuple[str, str], int]:
    told: list[RefusalCount] = run.syncer.refusals
    return {(count.island, count.cause): count.count for count in told}


def lane_of(b: RawIsland, value: float) -> bytes:
    return to_bytes(torch.full((b.lanes[0].numel,), value).view(torch.uint8))


async def size(run: VirtualRun, b: RawIsland) -> Any:
    return await b.submit(payload=bytes(7))


async def digest(run: VirtualRun, b: RawIsland) -> Any:
    return await b.submit(digest=bytes(32))


async def digest_size(run: VirtualRun, b: RawIsland) -> Any:
    return await b.submit(digest=bytes(900_000))


async def lane(run: VirtualRun, b: RawIsland) -> Any:
    return await sent(b, lane_id=9)


async def sent(b: RawIsland, key: RoundKey = KEY, **changes: Any) -> wire.SubmitReply:
    payload = lane_of(b, 1.0)
    fields: dict[str, Any] = {
        "key": key_message(key), "codec": "float32", "weight_tokens": 4,
        "digest": blake3.blake3(payload).digest(), **changes,
    }  # fmt: skip
    reply = await b.call("fragment.submit", wire.SubmitHeader(**fields), payload)
    return wire.SubmitReply.FromString(reply.header)


async def fragment(run: VirtualRun, b: RawIsland) -> Any:
    return await sent(b, RoundKey(0, 5, 0, 0))


async def attempt(run: VirtualRun, b: RawIsland) -> Any:
    return await sent(b, RoundKey(0, 0, 0, 5))


async def weight(run: VirtualRun, b: RawIsland) -> Any:
    return await sent(b, weight_tokens=0)


async def codec(run: VirtualRun, b: RawIsland) -> Any:
    return await sent(b, codec="\x01" * 180_000)


async def nan(run: VirtualRun, b: RawIsland) -> Any:
    return await b.submit(payload=lane_of(b, float("nan")))


async def conflict(run: VirtualRun, b: RawIsland) -> Any:
    await b.submit(value=1.0)
    return await b.submit(value=2.0)


async def timeline(run: VirtualRun, b: RawIsland) -> Any:
    b.grant = grant("b", 1, 7)
    return await b.submit()


async def incarnation(run: VirtualRun, b: RawIsland) -> Any:
    await RawIsland(run, "b", 2).poll()
    return await b.submit()


async def stranger(run: VirtualRun, b: RawIsland) -> Any:
    b.grant.run = "other"
    return await b.submit()


async def pin(run: VirtualRun, b: RawIsland) -> Any:
    pins = [wire.Pinned(fragment_id=p) for p in range(100_000)]
    reply = await b.call("fragment.pin", wire.PinRequest(versions=pins))
    return wire.Ack.FromString(reply.header)


@pytest.mark.parametrize(
    ("say", "cause", "words"),
    [
        (size, "size", "7 bytes, the plan asks"),
        (digest, "digest", "does not match the digest"),
        (digest_size, "digest", "does not match the digest"),
        (lane, "lane", "fragment 0 has 2 lanes, none is 9"),
        (fragment, "key", "no such fragment"),
        (attempt, "key", "attempt 0 at version 0 of fragment 0 is open, not 5"),
        (weight, "weight", "a weight of 0 tokens"),
        (codec, "codec", "the run's uplink codec is 'float32'"),
        (nan, "content", "nan at element 0"),
        (conflict, "conflict", ""),
        (timeline, "timeline", "not valid for this run"),
        (incarnation, "incarnation", "a newer start has joined"),
        (stranger, "grant", "not valid for this run"),
        (pin, "pin", "1 fragments, 100000 were named"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_refusal_has_its_reason_is_counted_and_the_round_goes_on(
    setting: Setting,
    say: Callable[[VirtualRun, RawIsland], Awaitable[Any]],
    cause: str,
    words: str,
) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)

        reply = await say(run, b)

        assert words in reply.message + getattr(reply, "outcome", wire.Outcome()).reason
        assert reply.ByteSize() < 2 * MOST_REASON + 200
        island = "" if cause == "grant" else "b"
        assert refusals(run) == {(island, cause): 1}
        assert run.syncer.failure is None
        await a.contribute()
        await RawIsland(run, "b", 3).decline()
        assert (await a.poll()).fragments[0].version == 1

    run_virtual(scenario())


def test_a_version_that_is_not_open_yet_is_named_and_no_refusal(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)

        reply = await sent(a, RoundKey(0, 0, 5, 0))

        assert reply.status == wire.SUBMIT_STATUS_NOT_OPEN
        assert reply.message == "version 0 of fragment 0 is open, not 5"
        assert refusals(run) == {}

    run_virtual(scenario())


def test_a_decline_of_any_length_is_a_short_durable_reason(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, b) = await founded(setting)
        header = wire.DeclineRequest(key=key_message(KEY), reason="\x01" * 180_000)
        await b.call("fragment.decline", header)
        await a.contribute()
        await a.poll(wait_s=1.0)

        assert len(run.records[-1]["refused"]["b"]) == MOST_REASON

    run_virtual(scenario())


def test_a_poll_names_no_more_than_there_is(setting: Setting) -> None:
    async def scenario() -> None:
        run, (a, _) = await founded(setting)

        with pytest.raises(FrameError, match="100000 round keys in one question; 16 are allowed"):
            await a.poll(*[KEY] * 100_000)
        with pytest.raises(FrameError, match="2 fragments are known to the caller; there are 1"):
            await a.poll(known=[wire.FragmentState()] * 2)
        assert run.syncer.failure is None

    run_virtual(scenario())
