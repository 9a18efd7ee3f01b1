"""A run under way is read from its directory as it is written."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import tracemalloc
from pathlib import Path

import pytest

from diloco.cli.run.control import operator_transport
from diloco.page import sources
from diloco.page.sources import LiveSource, RecordedSource
from diloco.protos.control_pb2 import FragmentStatus, StatusReply
from diloco.state_dir import StateDir, hold
from diloco.telemetry.events import CheckpointWritten
from diloco.transport.contracts import IncomingCall, Reply
from tests.guarded_server import serving
from tests.page.recorded_page_run import step, write


def test_what_is_written_later_is_read_once_and_a_torn_line_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK_S", 0.0)
    path = tmp_path / "telemetry" / "events-east-0.jsonl"
    write(path, "east", [step(1), step(2)])
    source = RecordedSource(tmp_path)
    line = json.dumps({**json.loads(path.read_text().splitlines()[1]), "inner_step": 3}) + "\n"

    async def looks() -> list[tuple[int, int]]:
        seen = []
        for text in ("", line[:20], line[20:], "no JSON\n"):
            with path.open("a") as file:
                file.write(text)
            view = await source.look()
            seen.append((len(view.curves[0].points), len(view.notices)))
        return seen

    assert asyncio.run(looks()) == [(2, 0), (2, 0), (3, 0), (3, 1)]


def test_what_never_ends_a_line_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "telemetry" / "events-east-0.jsonl"
    write(path, "east", [step(1), step(2)])
    first, second = path.read_bytes().splitlines(keepends=True)
    with path.open("wb") as file:  # as a disk that failed leaves it
        file.write(first)
        file.truncate(256 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + second)
    source = RecordedSource(tmp_path)
    tracemalloc.start()
    try:
        view = source._read_on()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(view.curves[0].points), len(view.notices)) == (2, 1)
    assert most < 64 << 20


def test_more_files_than_a_process_may_open_are_read_in_the_order_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_LINES_BYTES", 64)
    names = [f"island-{number:02d}" for number in range(80)]
    for name in names:
        path = tmp_path / "telemetry" / f"events-{name}-0.jsonl"
        write(path, name, [step(1), CheckpointWritten(1, 100, 0.5, 0.1, 0.0), step(2)])
    source, limits = RecordedSource(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        view = source._read_on()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert [(curve.name, len(curve.points)) for curve in view.curves] == [(n, 2) for n in names]
    assert [event.island for event in view.events] == names
    assert {event.at for event in view.events} == {view.events[0].at}


def test_a_run_is_under_way_while_its_coordinator_lives(tmp_path: Path) -> None:
    write(tmp_path / "telemetry" / "events-east-0.jsonl", "east", [step(1)])

    with hold(StateDir(tmp_path).coordinator_lock):
        living = asyncio.run(RecordedSource(tmp_path).look())
    left = asyncio.run(RecordedSource(tmp_path).look())

    assert (living.state, left.state) == ("running", "not at work here")


def test_who_goes_away_while_events_are_read_has_none_read_twice_and_a_close_ends_it(
    tmp_path: Path,
) -> None:
    write(tmp_path / "telemetry" / "events-east-0.jsonl", "east", map(step, range(1, 20_001)))
    source, closed = RecordedSource(tmp_path), RecordedSource(tmp_path)

    async def looks() -> list[str]:
        gone = asyncio.create_task(source.look())
        await asyncio.sleep(0.02)
        gone.cancel()
        while (whole := await source.look()).state == "being read":
            pass
        ended = asyncio.create_task(closed.look())
        await asyncio.sleep(0.02)
        await closed.close()
        return [view.figures[0].value for view in (whole, await ended)]

    whole, part = asyncio.run(looks())

    assert whole == "2,560,000"
    assert part != whole


def test_a_long_run_says_how_far_it_is_read_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_PATIENCE_S", 0.01)
    write(tmp_path / "telemetry" / "events-east-0.jsonl", "east", map(step, range(1, 10_001)))
    source = RecordedSource(tmp_path)

    async def looks() -> list[tuple[str, str]]:
        seen = []
        while not seen or seen[-1][0] == "being read":
            view = await source.look()
            seen.append((view.state, view.sentence))
        return seen

    *reading, (state, _) = asyncio.run(looks())

    assert reading and all(sentence.endswith(" MiB of events read.") for _, sentence in reading)
    assert state == "not at work here"


def test_a_page_says_which_files_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK_S", 0.0)
    telemetry = tmp_path / "telemetry"
    write(telemetry / "events-cut.jsonl", "east", [step(1)])
    (telemetry / "events-directory.jsonl").mkdir()
    os.mkfifo(telemetry / "events-pipe.jsonl")
    source = RecordedSource(tmp_path)

    async def looks() -> tuple[tuple[str, ...], tuple[str, ...]]:
        before = await source.look()
        (telemetry / "events-cut.jsonl").write_bytes(b"")
        return before.notices, (await source.look()).notices

    before, after = asyncio.run(looks())

    none = "is not there, or no file"
    assert before == (f"events-directory.jsonl: {none}", f"events-pipe.jsonl: {none}")
    assert after == ("events-cut.jsonl: is shorter than when it was read", *before)


def test_another_run_at_the_address_of_a_coordinator_begins_again() -> None:
    status = StatusReply(run="first", state="running", fragments=[FragmentStatus(version=3)])

    async def answer(_: IncomingCall) -> Reply:
        return Reply(status.SerializeToString())

    async def looks(address: str) -> list[int]:
        transport = operator_transport(address, certs="", tokens="", insecure=False)
        source = LiveSource(address, transport)
        seen = []
        for name, version in (("first", 3), ("first", 4), ("second", 9)):
            status.run, status.fragments[0].version = name, version
            view = await source.look()
            seen.append(len(view.versions))
            await asyncio.sleep(sources.LOOK_S)
        assert view.name == "second" and not view.events
        await source.close()
        return seen

    with serving({"control.status": answer}) as address:
        assert asyncio.run(looks(address)) == [0, 1, 0]
