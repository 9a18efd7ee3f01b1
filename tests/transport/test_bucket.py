"""Payloads by object store: what is written, read, resumed, removed, and never said."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

import blake3
import pytest

from diloco.protos.payload_pb2 import ObjectCall, ObjectReply
from diloco.transport.bucket import client as bucket_client
from diloco.transport.bucket import server as bucket_server
from diloco.transport.bucket.client import ObjectTransport
from diloco.transport.bucket.server import PIECE_BYTES, ObjectCalls, _objects
from diloco.transport.calls.loopback import LoopbackNetwork
from diloco.transport.contracts import PROTOCOL_VERSION, Buffer, Handlers, IncomingCall, Reply
from diloco.transport.errors import (
    ChecksumMismatch,
    FrameError,
    NotYet,
    Overloaded,
    PeerReset,
    Unauthorised,
)
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.transfer import Transfer
from tests.signed_store import SignedStore
from tests.waiting import wait_until

DEADLINE_S = 30.0
PAYLOAD = random.Random(1).randbytes(3 * PIECE_BYTES + 5)


@pytest.fixture
def store() -> Iterator[SignedStore]:
    with SignedStore().serving() as store:
        yield store


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_client, "_MOST_AGAIN_S", 0.0)
    monkeypatch.setattr(bucket_server, "_COLLECTED_S", 0.0)


async def take(call: IncomingCall) -> Reply:
    assert await call.read_payload() == PAYLOAD
    return Reply(b"taken")


async def give(call: IncomingCall) -> Reply:
    return Reply(b"given", PAYLOAD)


def check(
    store: SignedStore,
    handlers: Handlers,
    claim: Callable[[ObjectTransport], Awaitable[None]],
) -> None:
    async def run() -> None:
        network, calls = LoopbackNetwork(), ObjectCalls(store)
        server = network.server("hub", {**handlers, **calls.around(handlers)})
        await server.start()
        transport = ObjectTransport(network.connect("hub"), pacer=Pacer())
        try:
            await claim(transport)
        finally:
            await transport.close()
            await server.stop(0.0)
            calls.close()

    asyncio.run(run())


def test_a_payload_is_written_read_and_removed(store: SignedStore) -> None:
    async def claim(transport: ObjectTransport) -> None:
        transfer = Transfer()
        reply = await transport.call(
            "take", b"h", PAYLOAD, deadline_s=DEADLINE_S, transfer=transfer
        )
        assert reply.header == b"taken"
        assert transfer.acknowledged_bytes == transfer.sent_bytes == len(PAYLOAD)
        assert [method for method, _ in store.requests] == ["PUT"] * 4
        await asyncio.to_thread(wait_until, lambda: not store.objects)

    check(store, {"take": take}, claim)


def test_what_calls_of_the_same_seconds_have_written_is_removed_by_one_request(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_server, "_COLLECTED_S", 0.5)
    requests: list[int] = []
    delete = store.delete

    def counted(names: Sequence[str]) -> None:
        requests.append(len(names))
        delete(names)

    monkeypatch.setattr(store, "delete", counted)

    async def claim(transport: ObjectTransport) -> None:
        calls = (transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S) for _ in range(3))
        await asyncio.gather(*calls)
        await asyncio.to_thread(wait_until, lambda: not store.objects)
        assert requests == [3 * 4]

    check(store, {"take": take}, claim)


def test_what_is_small_and_what_is_refused_is_written_nowhere(store: SignedStore) -> None:
    async def echo(call: IncomingCall) -> Reply:
        return Reply(b"", await call.read_payload())

    async def refuse(call: IncomingCall) -> Reply:
        assert call.payload_bytes == len(PAYLOAD)
        return Reply(b"too large")

    async def claim(transport: ObjectTransport) -> None:
        small = bytes(1000)
        # Its reply may be large, and is not.
        reply = await transport.call(
            "echo", b"", small, deadline_s=DEADLINE_S, max_reply_bytes=1 << 20
        )
        assert reply.payload == small
        assert (await transport.call("refuse", b"", PAYLOAD, deadline_s=DEADLINE_S)).header
        assert not store.requests and not store.objects

    check(store, {"echo": echo, "refuse": refuse}, claim)


def test_the_next_attempt_goes_on_with_the_first_piece_that_is_not_written(
    store: SignedStore,
) -> None:
    async def claim(transport: ObjectTransport) -> None:
        transfer = Transfer()

        async def attempt() -> Reply:
            return await transport.call(
                "take", b"", PAYLOAD, deadline_s=DEADLINE_S, transfer=transfer
            )

        store.statuses = [503]
        with pytest.raises(Overloaded, match="answers 503 Told so"):
            await attempt()
        store.requests.clear()

        async def break_second() -> None:
            while len(store.requests) < 1:
                await asyncio.sleep(0)
            store.statuses = [500]

        breaking = asyncio.create_task(break_second())
        with pytest.raises(Overloaded):
            await attempt()
        await breaking
        written = transfer.acknowledged_bytes
        assert written % PIECE_BYTES == 0 and 0 < written < len(PAYLOAD)
        store.requests.clear()
        assert (await attempt()).header == b"taken"
        assert len(store.requests) == 4 - written // PIECE_BYTES

    check(store, {"take": take}, claim)


def test_a_store_with_too_much_to_do_is_asked_again_for_the_same_piece(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_client, "_MOST_AGAIN_S", 30.0)

    async def claim(transport: ObjectTransport) -> None:
        store.statuses = [503, 429, 500]
        assert (await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S)).header
        assert len(store.requests) == 4 + 3
        store.statuses = [503]
        await transport.call("give", b"", deadline_s=DEADLINE_S, max_reply_bytes=len(PAYLOAD))

    check(store, {"take": take, "give": give}, claim)


def test_what_is_not_what_was_sent_is_written_again(store: SignedStore) -> None:
    async def claim(transport: ObjectTransport) -> None:
        transfer = Transfer()
        taken = store.take

        def damaged(method: str, objects: Mapping[str, int], digest: bytes) -> Buffer:
            store.take = taken  # type: ignore[method-assign]
            store.objects[next(iter(objects))] = bytes(PIECE_BYTES)
            return taken(method, objects, digest)

        store.take = damaged  # type: ignore[method-assign]
        with pytest.raises(ChecksumMismatch, match="asked for again"):
            await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S, transfer=transfer)
        assert transfer.acknowledged_bytes == len(PAYLOAD)  # what moved has moved
        reply = await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S, transfer=transfer)
        assert reply.header == b"taken"
        assert len(store.requests) == 8

    check(store, {"take": take}, claim)


def test_what_is_not_what_was_sent_is_read_once_however_often_it_is_said_to_be_written(
    store: SignedStore,
) -> None:
    asked = ObjectCall(
        protocol_version=PROTOCOL_VERSION,
        method="take",
        transfer=bytes(16),
        payload_bytes=len(PAYLOAD),
        digest=bytes(32),
        is_written=True,
    )

    async def claim(transport: ObjectTransport) -> None:
        async def attempt() -> ObjectReply:
            header = asked.SerializeToString()
            reply = await transport.call("payload.call", header, deadline_s=DEADLINE_S)
            return ObjectReply.FromString(reply.header)

        store.objects.update({name: bytes(n) for name, n in _objects("", asked).items()})
        with pytest.raises(ChecksumMismatch):
            await attempt()
        told = await attempt()
        assert told.is_lost and len(told.put_urls) == 4
        assert not store.objects

    check(store, {"take": take}, claim)


def test_what_is_not_there_any_more_is_written_again_and_is_no_damage(store: SignedStore) -> None:
    async def claim(transport: ObjectTransport) -> None:
        transfer = Transfer()
        transfer.acknowledged_bytes = len(PAYLOAD)  # at a server that is not there any more
        reply = await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S, transfer=transfer)
        assert reply.header == b"taken"
        assert len(store.requests) == 4

        store.statuses = [200, 200, 200, 200] * 3  # said to be written
        with pytest.raises(PeerReset, match="written to the object store and are not there"):
            await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S)

    check(store, {"take": take}, claim)


def test_an_upload_that_takes_longer_than_addresses_are_valid_goes_on(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_server, "VALID_S", 0.4)
    monkeypatch.setattr(bucket_server, "_LOOK_S", 0.0)
    store.valid_s = 0.4

    async def claim(transport: ObjectTransport) -> None:
        transfer = Transfer()
        paced = transport._paced

        async def slow(piece: memoryview, way: Transfer) -> AsyncIterator[bytes]:
            async for chunk in paced(piece, way):
                yield chunk
            await asyncio.sleep(0.25)

        transport._paced = slow  # type: ignore[method-assign]
        num_refused = 0
        while True:
            try:
                reply = await transport.call(
                    "take", b"", PAYLOAD, deadline_s=DEADLINE_S, transfer=transfer
                )
                break
            except PeerReset as error:
                assert "Request has expired" in str(error)
                num_refused += 1
        assert reply.header == b"taken" and num_refused
        assert store.num_bytes_in == len(PAYLOAD), "nothing is written twice"

    check(store, {"take": take}, claim)


def test_what_is_written_late_is_removed_once_its_address_has_ended(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_server, "VALID_S", 0.3)
    monkeypatch.setattr(bucket_server, "_LOOK_S", 0.0)

    async def claim(transport: ObjectTransport) -> None:
        await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S)
        await asyncio.to_thread(wait_until, lambda: not store.objects)
        store.objects[store.requests[0][1]] = b"late"
        await asyncio.sleep(0.4)
        await transport.call("refuse", b"", PAYLOAD, deadline_s=DEADLINE_S)
        await asyncio.to_thread(wait_until, lambda: not store.objects)

    async def refuse(call: IncomingCall) -> Reply:
        return Reply(b"")

    check(store, {"take": take, "refuse": refuse}, claim)


def test_a_reply_is_written_once_for_all_who_take_it(store: SignedStore) -> None:
    async def claim(transport: ObjectTransport) -> None:
        replies = await asyncio.gather(
            *(
                transport.call("give", b"", deadline_s=DEADLINE_S, max_reply_bytes=len(PAYLOAD))
                for _ in range(8)
            )
        )
        assert all(reply.payload == PAYLOAD and reply.header == b"given" for reply in replies)
        assert store.num_written == len(PAYLOAD)

    check(store, {"give": give}, claim)


def test_a_reply_goes_on_where_it_broke(store: SignedStore) -> None:
    async def claim(transport: ObjectTransport) -> None:
        transfer = Transfer()

        async def attempt() -> Reply:
            return await transport.call(
                "give",
                b"",
                deadline_s=DEADLINE_S,
                max_reply_bytes=len(PAYLOAD),
                transfer=transfer,
            )

        store.cut_after = len(PAYLOAD) // 2
        with pytest.raises(PeerReset):
            await attempt()
        assert transfer.moved_bytes == len(PAYLOAD) // 2
        store.cut_after = 0
        assert (await attempt()).payload == PAYLOAD
        assert transfer.received_bytes == len(PAYLOAD)

    check(store, {"give": give}, claim)


def test_a_reply_that_was_removed_or_changed_is_written_again(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_server, "_LOOK_S", 0.0)

    async def claim(transport: ObjectTransport) -> None:
        async def attempt() -> Reply:
            return await transport.call(
                "give", b"", deadline_s=DEADLINE_S, max_reply_bytes=len(PAYLOAD)
            )

        await attempt()
        store.objects.clear()
        assert (await attempt()).payload == PAYLOAD
        (name,) = store.objects
        store.objects[name] = bytes(len(PAYLOAD))
        assert (await attempt()).payload == PAYLOAD
        assert store.num_written == 3 * len(PAYLOAD)

    check(store, {"give": give}, claim)


def test_copies_are_not_made_as_often_as_a_caller_says(store: SignedStore) -> None:
    async def claim(transport: ObjectTransport) -> None:
        signed = store.get_url
        store.get_url = lambda name: signed("nowhere")  # type: ignore[method-assign]
        for _ in range(3):
            with pytest.raises(PeerReset, match="answers 404 NoSuchKey"):
                await transport.call(
                    "give", b"", deadline_s=DEADLINE_S, max_reply_bytes=len(PAYLOAD)
                )
        assert store.num_written == len(PAYLOAD)

    check(store, {"give": give}, claim)


def test_who_says_for_ever_that_a_reply_is_damaged_has_it_copied_ever_more_seldom(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_server, "_LOOK_S", 0.02)
    asked = ObjectCall(protocol_version=PROTOCOL_VERSION, method="give", transfer=bytes(16))
    asked.lost = blake3.blake3(PAYLOAD).digest()

    async def claim(transport: ObjectTransport) -> None:
        began, header = time.monotonic(), asked.SerializeToString()
        while (lasted_s := time.monotonic() - began) < 1.0:
            await transport.call("payload.call", header, deadline_s=DEADLINE_S)
            await asyncio.sleep(0.01)
        # After n copies the next is made after 0.02 s * 2^n; the first writing is none.
        assert store.num_written <= len(PAYLOAD) * (1 + math.log2(1 + lasted_s / 0.02))

    check(store, {"give": give}, claim)


def test_a_handler_learns_that_its_reply_was_sent_once_it_has_arrived(store: SignedStore) -> None:
    sent: list[int] = []

    async def give_told(call: IncomingCall) -> Reply:
        return Reply(b"", PAYLOAD, lambda: sent.append(len(store.requests)))

    async def claim(transport: ObjectTransport) -> None:
        await transport.call("give", b"", deadline_s=DEADLINE_S, max_reply_bytes=len(PAYLOAD))
        await asyncio.to_thread(wait_until, lambda: bool(sent))
        assert sent == [1]

    check(store, {"give": give_told}, claim)


def test_nothing_stays_that_nobody_was_told_of_for_as_long_as_addresses_are_valid(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_server, "VALID_S", 0.2)
    monkeypatch.setattr(bucket_server, "_LOOK_S", 0.0)

    async def claim(transport: ObjectTransport) -> None:
        await transport.call("give", b"", deadline_s=DEADLINE_S, max_reply_bytes=len(PAYLOAD))
        store.statuses = [200, 200, 200, 500]  # said to be written, and never called about again
        with pytest.raises(Overloaded):
            await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S)
        store.objects.update(
            dict.fromkeys((name for method, name in store.requests if method == "PUT"), b"late")
        )
        assert len(store.objects) == 5
        await asyncio.sleep(0.5)
        await transport.call("give", b"", deadline_s=DEADLINE_S, max_reply_bytes=len(PAYLOAD))
        await asyncio.to_thread(wait_until, lambda: len(store.objects) == 1)

    check(store, {"give": give, "take": take}, claim)
    wait_until(lambda: not store.objects)


def test_a_store_that_is_away_is_waited_for(store: SignedStore) -> None:
    async def claim(transport: ObjectTransport) -> None:
        store.is_away = True
        with pytest.raises(NotYet, match="object store of payloads does not answer"):
            await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S)
        with pytest.raises(NotYet):
            await transport.call("give", b"", deadline_s=DEADLINE_S, max_reply_bytes=1 << 30)
        store.is_away = False
        assert (await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S)).header
        await transport.call("give", b"", deadline_s=DEADLINE_S, max_reply_bytes=1 << 30)

    check(store, {"give": give, "take": take}, claim)


def test_no_address_is_in_a_log_or_an_error(
    store: SignedStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def claim(transport: ObjectTransport) -> None:
        await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S)
        store.statuses = [403]
        with pytest.raises(PeerReset, match=r"http://127.0.0.1:\d+/\S+ answers 403") as refused:
            await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S)
        assert "signature" not in str(refused.value)

    check(store, {"take": take}, claim)
    assert "signature" not in caplog.text


def test_a_store_beyond_this_machine_is_reached_encrypted(store: SignedStore) -> None:
    async def claim(transport: ObjectTransport) -> None:
        store.put_urls = lambda names: [  # type: ignore[method-assign]
            f"http://192.0.2.1/{name}?signature=x" for name in names
        ]
        with pytest.raises(Unauthorised, match="would not be encrypted: give it an https endpoint"):
            await transport.call("take", b"", PAYLOAD, deadline_s=DEADLINE_S)

    check(store, {"take": take}, claim)


@pytest.mark.parametrize(("num_bytes", "digest"), [(0, bytes(32)), (1 << 20, b"x")])
def test_what_cannot_go_by_object_store_is_refused(
    store: SignedStore, num_bytes: int, digest: bytes
) -> None:
    async def claim(transport: ObjectTransport) -> None:
        asked = ObjectCall(
            protocol_version=PROTOCOL_VERSION, method="take", payload_bytes=num_bytes, digest=digest
        )
        with pytest.raises(FrameError, match=f"payload of {num_bytes} bytes with a digest"):
            await transport.call("payload.call", asked.SerializeToString(), deadline_s=DEADLINE_S)

    check(store, {"take": take}, claim)


def test_nobody_names_the_objects_of_another_caller() -> None:
    asked = ObjectCall(
        protocol_version=PROTOCOL_VERSION, transfer=bytes(16), payload_bytes=len(PAYLOAD)
    )

    assert not _objects("diloco://run/island/east", asked).keys() & _objects(
        "diloco://run/island/west", asked
    )
