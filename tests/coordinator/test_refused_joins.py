"""A join that does not fit is refused by the field and both values, and counted by that field."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard

from diloco.config.load import load_config
from diloco.coordinator import island_service
from diloco.coordinator.grants import sign
from diloco.errors import ConfigError
from diloco.outer.fragments import plan_difference
from diloco.protocol.run import admission
from diloco.protocol.run.plan_bytes import packed, unpacked
from diloco.protos import control_pb2 as control
from diloco.transport.contracts import PROTOCOL_VERSION
from diloco.transport.errors import FrameError, Overloaded, Unauthorised
from diloco.transport.framing import MAX_HEADER_BYTES
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.security.tokens import TokenTable, make_token
from tests.coordinator.test_daemon import Play, play
from tests.coordinator_in_memory import IDENTITY, PLAN, SECRET, CoordinatorInMemory, joined, tell
from tests.protocol.test_membership import OTHER_PLAN
from tests.run_files import write_run
from tests.transport.test_tokens import EAST, write_table

__all__ = ["play"]

FIELDS: dict[str, Any] = {
    "protocol_version": PROTOCOL_VERSION, "run": "demo", "island": "east", "start_id": "a",
    "identity_json": IDENTITY, "plan_json": PLAN, "corpus_sha256": "5a",
    "tokenizer_digest": "bytes",
}  # fmt: skip


def request_of(**changes: Any) -> control.JoinRequest:
    fields = {**FIELDS, **changes}
    return control.JoinRequest(plan=packed(fields.pop("plan_json")), **fields)


def refusals(coord: CoordinatorInMemory) -> dict[tuple[str, str, str], int]:
    status = coord.coordinator.status()
    return {(r.service, r.island, r.cause): r.count for r in status.refusals}


async def ask(coord: CoordinatorInMemory, **changes: Any) -> control.JoinReply:
    reply = await coord.call("join", request_of(**changes))
    return control.JoinReply.FromString(reply)


class KnownCall:
    """A join by a caller who has proved who it is."""

    method, peer, caller = "control.join", "test", EAST
    payload_bytes, is_local = 0, False

    def __init__(self, **changes: Any) -> None:
        self.header = request_of(**changes).SerializeToString()

    async def read_payload(self) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("changes", "island", "cause", "words"),
    [
        ({"plan_json": OTHER_PLAN}, "east", "plan", ["tensors[", "here", "there"]),
        (
            {"tokenizer_digest": "9f/2", "corpus_sha256": "5b"},
            "east",
            "tokenizer",
            ["data.tokenizer", "'9f/2' (there)", "'bytes' (here)"],
        ),
        ({"corpus_sha256": "5b"}, "east", "text", ["text", "5b (there)", "5a (here)"]),
        ({"identity_json": '{"x": 9}'}, "east", "identity", ["x: absent here, 9 there"]),
        (
            {"protocol_version": 99},
            "",
            "protocol_version",
            ["protocol version 99", f"this coordinator {PROTOCOL_VERSION}"],
        ),
        (
            {"identity_json": "[" * 100_000},
            "east",
            "identity",
            ["cannot be read: JSON that is nested more than 32 deep"],
        ),
        (
            {"identity_json": '{"x": ' + "[" * 200 + "]" * 200 + "}"},
            "east",
            "identity",
            ["cannot be read: JSON that is nested more than 32 deep"],
        ),
        (
            {"plan_json": '{"x": ' + "[" * 900 + "]" * 900 + "}"},
            "east",
            "plan",
            ["sent no usable plan", "nested more than 32 deep"],
        ),
        (
            {"plan_json": "x" * (17 << 20)},
            "east",
            "plan",
            ["sent no usable plan: it unpacks to 17825792 bytes; "],
        ),
        ({"run": "other"}, "east", "run", ["run: 'demo' here, 'other' there"]),
        ({"island": "north"}, "", "island", ["'north'", "east, west"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_join_is_refused_by_field_and_both_values(
    play: Play, changes: dict[str, Any], island: str, cause: str, words: list[str]
) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        accepted = await ask(coord, island="west")
        assert accepted.status == control.JOIN_STATUS_ACCEPTED

        answer = await coord.coordinator.handlers["control.join"](KnownCall(**changes))

        reply = control.JoinReply.FromString(answer.header)
        assert reply.status != control.JOIN_STATUS_ACCEPTED
        assert [word for word in words if word not in reply.message] == []
        assert refusals(coord) == {("coordinator", island, cause): 1}

    play(story)


def test_a_plan_is_read_in_a_thread_and_everybody_else_is_answered_meanwhile(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read, num_read = threading.Event(), Counter[str]()

    def slowly(here: str, there: str) -> list[str]:
        num_read[there] += 1
        is_read.wait()
        return plan_difference(here, there)

    monkeypatch.setattr(admission, "plan_difference", slowly)
    admission.plan_refusal.cache_clear()

    async def story(coord: CoordinatorInMemory) -> None:
        west = (await ask(coord, island="west")).grant
        plans = {"east": OTHER_PLAN, "west": OTHER_PLAN.replace("6", "8")}
        others = [
            asyncio.create_task(ask(coord, island=island, start_id="b", plan_json=plan))
            for island, plan in plans.items()
        ]
        for inner_step in range(5):
            await coord.report(west, inner_step=inner_step)
        with pytest.raises(Overloaded, match=r"'east' was read just now"):
            await ask(coord, island="east", start_id="c", plan_json=OTHER_PLAN)
        assert (await ask(coord, island="east")).status == control.JOIN_STATUS_ACCEPTED
        assert not any(other.done() for other in others)
        assert sum(num_read.values()) <= 1, "one at a time"
        is_read.set()

        refused = [reply.status for reply in await asyncio.gather(*others)]

        assert refused == [control.JOIN_STATUS_PLAN_MISMATCH] * 2
        assert list(num_read.values()) == [1, 1]

    play(story)


def test_who_breaks_off_while_a_plan_is_read_has_no_other_read_meanwhile(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read, num_read = threading.Event(), Counter[str]()

    def slowly(here: str, there: str) -> list[str]:
        num_read[there] += 1
        is_read.wait()
        return plan_difference(here, there)

    monkeypatch.setattr(admission, "plan_difference", slowly)
    admission.plan_refusal.cache_clear()

    async def story(coord: CoordinatorInMemory) -> None:
        west = (await ask(coord, island="west")).grant
        for _ in range(5):
            asked = asyncio.create_task(ask(coord, island="east", plan_json=OTHER_PLAN))
            for _ in range(3):
                await coord.report(west)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        is_read.set()

        assert sum(num_read.values()) <= 1

    play(story)


def test_the_runs_plan_packed_in_another_way_is_read_once(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0
    other = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(PLAN.encode())

    def counting(content: bytes) -> str:
        nonlocal num_read
        num_read += 1
        return unpacked(content)

    monkeypatch.setattr(island_service, "unpacked", counting)

    async def story(coord: CoordinatorInMemory) -> None:
        await ask(coord, island="west")
        before = num_read
        for _ in range(3):
            request = request_of()
            request.plan = other
            reply = control.JoinReply.FromString(await coord.call("join", request))
            assert reply.status == control.JOIN_STATUS_ACCEPTED
        assert num_read == before + 1

    play(story)


def test_a_batch_far_beyond_the_others_is_refused_and_one_that_is_only_unequal_is_not(
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path / "run", {"east": "", "west": ""})

    async def story(coord: CoordinatorInMemory) -> None:
        assert coord.config is not None
        most = max(each.tokens_per_inner_step for each in coord.config.islands.values()) * 16
        refused = await coord.join("east", tokens_per_inner_step=most + 1)

        accepted = await coord.join("east", tokens_per_inner_step=most)

        assert refused.status == control.JOIN_STATUS_BATCH_TOO_LARGE
        assert f"islands.east.tokens_per_inner_step: {most + 1} there; at most" in refused.message
        assert refusals(coord) == {("coordinator", "", "weight"): 1}
        assert accepted.grant.tokens_per_inner_step == most

    tell(tmp_path, story, config=load_config(path))


def test_a_full_run_and_a_kicked_island_are_refused_and_counted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {"east": "", "west": ""})
    settings = ["outer.preset=decoupled", "run.open=true", "run.max_islands=2"]

    async def story(coord: CoordinatorInMemory) -> None:
        for name in ("east", "west"):
            await ask(coord, island=name)
        await coord.operate("kick", island="east", reason="its numbers are odd")

        full, kicked, odd = [await ask(coord, island=name) for name in ("north", "east", "../x")]

        assert full.status == control.JOIN_STATUS_RUN_FULL
        assert "run.max_islands: 2 here, island 'north' there would be number 3" in full.message
        assert kicked.status == control.JOIN_STATUS_KICKED
        assert "its numbers are odd" in kicked.message
        assert odd.status == control.JOIN_STATUS_UNKNOWN_ISLAND
        assert "'../x'" in odd.message
        assert refusals(coord) == {
            ("coordinator", "", "full"): 1,
            ("coordinator", "", "kicked"): 1,
            ("coordinator", "", "island"): 1,
        }

    tell(tmp_path, story, config=load_config(path, settings))


def test_a_stranger_fills_nobodys_count_of_refusals(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await ask(coord, island="west")

        reply = await ask(coord, plan_json=OTHER_PLAN)

        assert reply.status != control.JOIN_STATUS_ACCEPTED
        assert refusals(coord) == {("coordinator", "", "plan"): 1}

    play(story)


def test_a_wrong_token_is_refused_by_that_name_and_no_token_is_said(tmp_path: Path) -> None:
    async def run() -> None:
        right, wrong = make_token(), make_token()
        coord = CoordinatorInMemory(tmp_path)
        await coord.start()
        table = TokenTable(write_table(tmp_path, {EAST: right}))
        server = GrpcServer("127.0.0.1:0", coord.coordinator.handlers, tokens=table)
        await server.start()
        transport = GrpcTransport(server.address, token=wrong)
        try:
            request = request_of().SerializeToString()
            with pytest.raises(Unauthorised, match="token") as refusal:
                await transport.call("control.join", request, deadline_s=30)
            assert not any(token in str(refusal.value) for token in (right, wrong))
        finally:
            await transport.close()
            await server.stop(0)
            await coord.close()

    asyncio.run(run())


@pytest.mark.parametrize("field", ["run", "island", "identity_json", "plan_json"])
def test_a_refusal_of_a_megabyte_of_text_is_short(play: Play, field: str) -> None:
    much = {f"{n:06d}": 0 for n in range(80_000)}
    text = json.dumps(much) if field == "identity_json" else "x" * (MAX_HEADER_BYTES - 9000)

    async def story(coord: CoordinatorInMemory) -> None:
        reply = await ask(coord, **{field: text[: MAX_HEADER_BYTES - 9000]})

        assert reply.status != control.JOIN_STATUS_ACCEPTED
        assert len(reply.message) < 20_000

    play(story)


# -- reports -------------------------------------------------------------------------------------


def test_what_a_report_says_is_shown_cut_and_counted_if_refused(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)
        await coord.report(east, inner_step=1, message="\x01" * 180_000)
        with pytest.raises(FrameError, match="checkpoints; 1000 are allowed"):
            await coord.report(east, checkpoint_steps=range(100_000))
        await joined(coord, "b")
        assert (await coord.report(east)).stop

        status = coord.coordinator.status()

        assert len(status.islands[0].last_report.message) == 1000
        assert refusals(coord) == {
            ("coordinator", "east", "frame"): 1,
            ("coordinator", "east", "incarnation"): 1,
        }

    play(story)


@pytest.mark.parametrize("every", [1, 0])
def test_what_a_run_file_lets_an_island_keep_a_coordinator_lets_it_report(
    every: int, play: Play, tmp_path: Path
) -> None:
    file = write_run(tmp_path, {"east": "", "west": ""})
    with pytest.raises(ConfigError, match=r"checkpoint\.keep: 5000: .*<= 250"):
        load_config(file, ["checkpoint.keep=5000"])
    often = ["checkpoint.keep=250", "outer.inner_steps_per_round=600"]
    with pytest.raises(ConfigError, match=r"every_inner_steps: 1: .*1000 are allowed: make them"):
        load_config(file, [*often, "checkpoint.every_inner_steps=1"])
    settings = ["checkpoint.keep=250", f"checkpoint.every_inner_steps={every}"]
    config = load_config(file, [*settings, "outer.inner_steps_per_round=496"])
    # Besides what a removal leaves: the last good one, that of a stop, that of the last resume.
    count = config.checkpoint.keep + config.num_unsure_checkpoints + 3

    async def story(coord: CoordinatorInMemory) -> None:
        east, _ = await joined(coord)

        reply = await coord.report(east, inner_step=count, checkpoint_steps=range(count))

        assert not reply.stop
        assert refusals(coord) == {}

    play(story)


def test_what_a_syncer_reports_is_cut_to_what_can_be_true(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        await joined(coord)
        fragment = control.FragmentStatus(
            fragment_id=0, version=3, phase="x" * 5000, digest="0" * 5000,
            contributors=["east"] * 5000 + ["nobody"],
        )  # fmt: skip
        counts = [
            control.RefusalCount(island=island, cause=cause, count=4)
            for island in ("east", "nobody")
            for cause in ("size", "x" * 5000)
        ]
        await coord.round_report(fragments=[fragment], refusals=counts)
        refusal = r"a report of fragment 7; syncer 0 has \[0, 1\], 2 in all"
        with pytest.raises(FrameError, match=refusal):
            await coord.round_report(fragments=[control.FragmentStatus(fragment_id=7)])

        status = coord.coordinator.status()

        assert status.ByteSize() < 3000
        assert list(status.fragments[0].contributors) == ["east"]
        assert refusals(coord) == {("syncer", "east", "size"): 4}
        await coord.round_report(fatal_reason="y" * 500_000, fatal_exit_code=50)
        assert len(coord.coordinator.status().message) == 16_000

    play(story)


def test_a_syncer_of_another_timeline_is_refused_and_counted(play: Play) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        forged = control.Grant(run="demo", roles=[control.ROLE_ISLAND])
        hello = control.SyncerHelloRequest(grant=sign(forged, SECRET))
        with pytest.raises(Exception, match="the syncer's grant is not valid"):
            await coord.call("syncer_hello", hello)
        with pytest.raises(Exception, match="the syncer's grant is not valid"):
            await coord.round_report(timeline=9)

        assert refusals(coord) == {
            ("coordinator", "", "grant"): 1,
            ("coordinator", "", "timeline"): 1,
        }

    play(story)
