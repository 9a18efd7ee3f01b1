"""Every kind of fault takes effect, each against one process or one link; and is known to have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from diloco.chaos import injectors, storm
from diloco.chaos.environment import ChaosEnvironment, is_frozen, ranks_of
from diloco.chaos.fault_log import FaultLog, read_fault_log
from diloco.chaos.injector import Injector
from diloco.chaos.injectors import injector_of
from diloco.chaos.plan import COORDINATOR, SYNCER, Kind, Strength, TimedFault
from diloco.chaos.runner import Director
from diloco.config.load import load_config
from diloco.durable import read_json
from diloco.errors import ConfigError
from diloco.faults import process as faults_of_process
from diloco.faults.process import (
    LINES_VARIABLE,
    VARIABLE,
    link_faults,
    links_path,
    wall_clock,
)
from diloco.launch.local import LocalRun
from diloco.state_dir import Endpoint, acquire, write_pid
from diloco.transport.addresses import split_address
from diloco.transport.contracts import Reply, Transport
from diloco.versions.record import RecordInvalid, fragment_directory, record_path, versions_in
from diloco.versions.store import FragmentStore
from tests.run_files import write_run
from tests.versions.test_store import FRAGMENT, assert_same, commit
from tests.waiting import exit_code, wait_until

READ_S = 0.05
STRENGTH = Strength.model_validate(
    {"delay": "10ms", "bandwidth": "1Mbit/s", "share": 1.0, "clock": "1h"}
)
SLEEPS = "import time; time.sleep(60)"
#: Writes what version 0 is as the next one every now and then, and goes on when it cannot: its
#: number is then tried again. That it could not is told by a file, which takes no byte.
WRITES = """
import os, sys, time
with open(f"{sys.argv[1]}/v000000000000.record", "rb") as file:
    body = file.read()
version = 3
while True:
    try:
        with open(f"{sys.argv[1]}/next.tmp", "wb") as file:
            file.write(body)
        os.rename(f"{sys.argv[1]}/next.tmp", f"{sys.argv[1]}/v{version:012d}.record")
        version += 1
    except OSError:
        open(f"{sys.argv[1]}/refused", "wb").close()
    time.sleep(0.02)
"""


class Scene:
    """A state directory whose coordinator and syncer are processes that only hold their locks."""

    def __init__(self, root: Path, num_syncers: int = 1) -> None:
        options = [f"coordinator.num_syncers={num_syncers}"]
        config = load_config(write_run(root, {"east": ""}, num_fragments=num_syncers), options)
        run = LocalRun(config, look_s=0.01)
        run.state.create(config.own_syncers)
        self.environment = ChaosEnvironment(run, root / "chaos")
        self.environment.chaos_dir.mkdir()
        self.fragment = fragment_directory(run.state.of_syncers(run.config.own_syncers)[0].store, 0)
        self.fragment.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []

    def store(self, *, snapshot_rounds: int) -> FragmentStore:
        store = FragmentStore(
            self.environment.state.store, FRAGMENT, 2, snapshot_rounds=snapshot_rounds
        )
        store.recover()
        return store

    def hold(self, target: str, script: str = SLEEPS) -> subprocess.Popen[bytes]:
        state, syncer = self.environment.state, self.environment.syncers.get(target)
        lock = acquire(syncer.store_lock if syncer else state.coordinator_lock)
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", script, str(self.fragment)], pass_fds=(lock,)
        )
        self.processes.append(process)
        write_pid(lock, process.pid)
        os.close(lock)
        path = syncer.syncer if syncer else state.coordinator
        Endpoint("127.0.0.1:1", process.pid).write(path)
        return process

    def island(self, script: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sh", "-c", script])
        self.processes.append(process)
        self.environment.run.islands["east"] = process
        return process

    def injector_of(self, kind: Kind, target: str, **values: float) -> Injector:
        strength = STRENGTH.model_copy(update={"share": values.pop("share", 1.0)})
        fault = TimedFault(0, kind, target, 0.0, values.pop("lasts_s", 0.0), 77, strength)
        return injector_of(self.environment, fault)

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait()


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    """Of one syncer, or of as many as the parameter says."""
    monkeypatch.setattr(faults_of_process, "_READ_S", READ_S)
    monkeypatch.setattr(injectors, "_TOLD_S", 6 * READ_S)
    scene = Scene(tmp_path, getattr(request, "param", 1))
    yield scene
    scene.close()


@pytest.mark.parametrize(
    ("kind", "number"), [(Kind.KILL, signal.SIGKILL), (Kind.RESTART, signal.SIGTERM)]
)
def test_a_syncer_is_ended(scene: Scene, kind: Kind, number: int) -> None:
    process = scene.hold(SYNCER)
    injector = scene.injector_of(kind, SYNCER)

    assert injector.begin()

    assert injector.fired
    assert exit_code(process, 30.0) == -number
    assert injector.end()
    assert not injector.begin(), "there is none now"


@pytest.mark.parametrize("target", [COORDINATOR, SYNCER])
def test_strangers_storm_a_process_and_it_is_known_whether_it_lives(
    scene: Scene, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storm, "_TIMEOUT_S", 0.2)
    process = scene.hold(target)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        path = (
            scene.environment.state.coordinator
            if target == COORDINATOR
            else scene.environment.state.syncer
        )
        Endpoint(f"127.0.0.1:{listening.getsockname()[1]}", process.pid).write(path)
        injector = scene.injector_of(Kind.CONNECT_STORM, target)

        assert injector.begin()
        listening.accept()[0].close()
        if target == SYNCER:
            process.kill()
            process.wait()
        assert injector.end()

    assert injector.fired
    assert injector.is_same == (target == COORDINATOR)
    assert "whole handshakes" in injector.note


@pytest.mark.parametrize("target", [COORDINATOR, SYNCER])
def test_a_process_is_frozen_and_goes_on(scene: Scene, target: str) -> None:
    process = scene.hold(target)
    injector = scene.injector_of(Kind.FREEZE, target, lasts_s=1.0)

    assert injector.begin()
    wait_until(lambda: is_frozen(process.pid))
    assert injector.end()

    assert injector.fired
    assert not is_frozen(process.pid)


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.RESTART])
def test_an_island_is_ended_and_started_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    process = scene.island("exec sleep 60")
    monkeypatch.setattr(LocalRun, "_start_island", lambda run, island: scene.island("sleep 60"))
    injector = scene.injector_of(kind, "east")

    assert injector.begin()
    assert scene.environment.pid("east") is None
    wait_until(injector.end)

    assert injector.fired
    assert process.returncode in (-signal.SIGKILL, -signal.SIGTERM)
    assert scene.environment.pid("east") == scene.processes[-1].pid != process.pid


def test_a_rank_is_killed_and_its_island_frozen(scene: Scene) -> None:
    supervisor = scene.island("RANK=0 sleep 60 & RANK=1 sleep 60 & wait")
    wait_until(lambda: len(ranks_of(supervisor.pid)) == 2)
    ranks = ranks_of(supervisor.pid)

    freeze = scene.injector_of(Kind.FREEZE, "east", lasts_s=1.0)
    assert freeze.begin()
    wait_until(lambda: all(map(is_frozen, [supervisor.pid, *ranks.values()])))
    assert freeze.end()
    kill = scene.injector_of(Kind.KILL, "east/1")
    assert kill.begin()

    assert (freeze.fired, kill.fired) == (True, True)
    wait_until(lambda: sorted(ranks_of(supervisor.pid)) == [0])
    os.kill(ranks[0], signal.SIGKILL)


def test_what_is_killed_while_it_is_frozen_was_frozen(scene: Scene) -> None:
    scene.island("exec sleep 60")
    freeze = scene.injector_of(Kind.FREEZE, "east", lasts_s=1.0)

    assert freeze.begin()
    assert scene.injector_of(Kind.KILL, "east").begin()
    assert freeze.end()

    assert freeze.fired


def test_a_record_that_was_being_written_is_torn(scene: Scene) -> None:
    process = scene.hold(SYNCER)
    store = scene.store(snapshot_rounds=1)
    newest = commit(store, 2)[-1]
    before = record_path(scene.fragment, 0).read_bytes()
    injector = scene.injector_of(Kind.TRUNCATE, SYNCER)

    assert injector.begin()

    assert injector.fired
    assert exit_code(process, 30.0) == -signal.SIGKILL
    assert scene.fragment.joinpath("v000000000003.record.tmp").stat().st_size == 77
    assert scene.environment.versions() == {0: [1, 2]}
    left = record_path(scene.fragment, 0).read_bytes()
    assert 0 < len(left) < len(before) and before.startswith(left)
    with pytest.raises(RecordInvalid, match=r"torn or damaged|damaged header"):
        store.load(0)
    assert_same(store.recover().record, newest, is_recovered=True)


@pytest.mark.parametrize("scene", [2], indirect=True, ids=["two-syncers"])
def test_of_several_syncers_the_one_that_is_named_is_met(scene: Scene) -> None:
    kept, met = (scene.hold(name) for name in ("syncer-0", "syncer-1"))
    directories = []
    for syncer in scene.environment.syncers.values():
        store = FragmentStore(syncer.store, FRAGMENT, 2)
        store.recover()
        commit(store, 2)
        directories.append(fragment_directory(syncer.store, 0))
    before = sorted(directories[0].iterdir())
    injector = scene.injector_of(Kind.TRUNCATE, "syncer-1")

    assert injector.begin()

    assert injector.fired
    assert exit_code(met, 30.0) == -signal.SIGKILL
    assert scene.environment.serving_pid("syncer-0") == kept.pid and kept.poll() is None
    assert sorted(directories[0].iterdir()) == before
    assert directories[1].joinpath("v000000000003.record.tmp").stat().st_size == 77
    assert scene.environment.fragments() == directories


def test_a_frame_that_was_being_written_is_torn(scene: Scene) -> None:
    scene.hold(SYNCER)
    store = scene.store(snapshot_rounds=4)
    commit(store, 2)
    injector = scene.injector_of(Kind.TRUNCATE, SYNCER)
    assert not injector.begin(), "there is one record only"
    newest = commit(scene.store(snapshot_rounds=4), 5)[-1]

    assert injector.begin()

    assert injector.fired
    assert scene.fragment.joinpath("v000000000006.record.tmp").stat().st_size == 77
    assert_same(store.recover().record, newest, is_recovered=True)


@pytest.mark.parametrize(("snapshot_rounds", "oldest"), [(1, 0), (4, 4)], ids=["record", "log"])
def test_a_bit_of_an_old_record_rots_and_the_newest_is_spared(
    scene: Scene, snapshot_rounds: int, oldest: int
) -> None:
    scene.hold(SYNCER)
    store = scene.store(snapshot_rounds=snapshot_rounds)
    newest = commit(store, oldest + snapshot_rounds)[-1]
    before = record_path(scene.fragment, oldest).read_bytes()
    injector = scene.injector_of(Kind.FLIP, SYNCER)

    assert injector.begin()

    assert injector.fired
    rotten = record_path(scene.fragment, oldest).read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(before, rotten, strict=True)) == 1
    assert_same(store.recover().record, newest, is_recovered=True)


def test_the_newest_record_is_torn_once_islands_hold_it(scene: Scene) -> None:
    process = scene.hold(SYNCER)
    store = scene.store(snapshot_rounds=1)
    commit(store, 2)
    injector = scene.injector_of(Kind.TORN_NEWEST, SYNCER)
    newest = record_path(scene.fragment, 2)
    whole = newest.read_bytes()
    before = time.time()
    supervisor = scene.island("RANK=0 sleep 60 & wait")
    wait_until(lambda: ranks_of(supervisor.pid))
    path = scene.environment.run.config.telemetry_dir / "events-east-0.jsonl"
    path.parent.mkdir(parents=True)

    def merged(version: int, unix_s: float) -> None:
        event = {"kind": "fragment_merged", "fragment_id": 0, "version": version, "unix_s": unix_s}
        path.write_text(json.dumps(event) + "\n")

    merged(1, time.time() + 1.0)
    assert not injector.begin(), "nobody holds it yet"
    merged(2, before - 1.0)
    assert not injector.begin(), "who held it has ended"
    assert process.poll() is None

    merged(2, time.time() + 1.0)
    assert injector.begin()
    os.kill(ranks_of(supervisor.pid)[0], signal.SIGKILL)

    assert injector.fired
    left = newest.read_bytes()
    assert 0 < len(left) < len(whole) and whole.startswith(left)
    recovered = store.recover()
    assert recovered is not None
    assert (recovered.record.version, store.lost) == (1, 2)


def test_the_only_record_is_not_damaged_and_its_syncer_lives(scene: Scene) -> None:
    process = scene.hold(SYNCER)
    commit(scene.store(snapshot_rounds=4), 2)
    injector = scene.injector_of(Kind.FLIP, SYNCER)

    assert not injector.begin()

    assert process.poll() is None


def test_a_full_disk_takes_no_record_and_then_does_again(scene: Scene) -> None:
    commit(scene.store(snapshot_rounds=1), 0)
    scene.hold(SYNCER, WRITES)
    wait_until(lambda: versions_in(scene.fragment)[-1] > 0)
    injector = scene.injector_of(Kind.DISK_FULL, SYNCER, lasts_s=0.2)

    assert injector.begin()
    wait_until((scene.fragment / "refused").exists)
    assert injector.end()

    assert injector.fired
    newest = versions_in(scene.fragment)[-1]
    wait_until(lambda: versions_in(scene.fragment)[-1] > newest + 2)


def test_a_syncer_that_has_just_ended_has_no_full_disk(scene: Scene) -> None:
    leaves_its_lock = "import os, time; os.fork() and os._exit(0); time.sleep(2)"
    scene.hold(SYNCER, leaves_its_lock).wait()

    assert not scene.injector_of(Kind.DISK_FULL, SYNCER).begin()


def test_a_disk_that_takes_everything_is_not_full(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injectors.resource, "prlimit", lambda *_: (0, 0))
    commit(scene.store(snapshot_rounds=1), 0)
    scene.hold(SYNCER, WRITES)
    wait_until(lambda: versions_in(scene.fragment)[-1] > 0)
    injector = scene.injector_of(Kind.DISK_FULL, SYNCER, lasts_s=0.2)

    assert injector.begin()
    before = versions_in(scene.fragment)[-1]
    wait_until(lambda: versions_in(scene.fragment)[-1] > before + 2)
    assert injector.end()

    assert not injector.fired


@pytest.mark.parametrize("target", [COORDINATOR, SYNCER])
def test_a_wall_clock_jumps_and_comes_back(scene: Scene, target: str) -> None:
    scene.hold(target)
    clock = wall_clock({VARIABLE: str(scene.environment.chaos_dir)}, target)
    injector = scene.injector_of(Kind.CLOCK, target)

    wait_until(injector.begin)
    wait_until(lambda: clock() - time.time() > 3599.0)
    wait_until(injector.end)

    assert injector.fired
    wait_until(lambda: abs(clock() - time.time()) < 1.0)


def test_nobody_elses_clock_is_touched() -> None:
    assert wall_clock({}, COORDINATOR) is time.time


class Echo:
    """A peer that answers with what it heard."""

    peer = "127.0.0.1:1"

    async def call(self, method: str, header: bytes, payload: bytes = b"", **_: object) -> Reply:
        await asyncio.sleep(0)
        return Reply(header, payload)

    async def close(self) -> None:
        pass


CALL_KINDS = [kind for kind in Kind if kind.is_of_a_link and kind is not Kind.THIN_LINE]


@pytest.mark.parametrize("kind", CALL_KINDS)
def test_a_link_is_met_by_its_fault(scene: Scene, kind: Kind) -> None:
    scene.island("exec sleep 60")
    links = link_faults({VARIABLE: str(scene.environment.chaos_dir)}, "east", "127.0.0.1:1")
    transport = links.around(cast(Transport, Echo()), carries_fragments=True)
    # To reorder, there must be calls that overtake those that are held.
    share = 0.5 if kind is Kind.REORDER else 1.0
    injector = scene.injector_of(kind, "east", lasts_s=0.5, share=share)

    async def call_until_it_ends() -> None:
        loop = asyncio.get_running_loop()
        wait_until(injector.begin)
        began = loop.time()
        while loop.time() - began < 10 * READ_S or not injector.end():
            calls = (
                transport.call("fragment.submit", b"", b"payload", deadline_s=20.0)
                for _ in range(4)
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await asyncio.gather(*calls)

    asyncio.run(call_until_it_ends())

    assert injector.fired, injector.note
    assert links_path(scene.environment.chaos_dir).read_text() == "{}"


def test_a_thin_line_delays_and_damages_what_crosses_it_until_its_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injectors, "_DAMAGE_EVERY_BYTES", 1 << 10)
    scene.island("exec sleep 60")
    block = bytes(8 << 10)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        environment = {VARIABLE: str(scene.environment.chaos_dir), LINES_VARIABLE: "east,west"}
        links = link_faults(environment, "east", address)
        assert links.route(address) == links.route(address) != address
        links.around(cast(Transport, Echo()), carries_fragments=True)
        near = socket.create_connection(split_address(links.route(address)))
        far, _ = server.accept()
    injector = scene.injector_of(Kind.THIN_LINE, "east", lasts_s=0.5)

    def arrived() -> bytes:
        near.sendall(block)
        return far.recv(len(block), socket.MSG_WAITALL)

    with near, far:
        assert arrived() == block
        wait_until(injector.begin)
        wait_until(lambda: arrived() != block)
        wait_until(injector.end)
        assert injector.fired
        assert "flipped bits" in injector.note
        wait_until(lambda: arrived() == arrived() == block)


def test_a_link_fault_waits_until_a_rank_that_lives_has_read_the_file(scene: Scene) -> None:
    scene.island("exec sleep 60")
    chaos_dir = scene.environment.chaos_dir
    died = subprocess.Popen(["true"])
    died.wait()
    (chaos_dir / f"fired.east.{died.pid}.json").write_text("{}")
    injector = scene.injector_of(Kind.CUT, "east")

    assert not injector.begin(), "its supervisor is there, its rank is being started"
    links = link_faults({VARIABLE: str(chaos_dir)}, "east", "127.0.0.1:1")
    links.around(cast(Transport, Echo()), carries_fragments=True)
    wait_until(injector.begin)


def test_who_is_back_when_the_run_is_over_is_seen(scene: Scene, tmp_path: Path) -> None:
    first = scene.hold(SYNCER)
    fault = TimedFault(0, Kind.KILL, SYNCER, 0.0, 0.0, 77, STRENGTH)
    with FaultLog(tmp_path / "faults.jsonl", time.monotonic, time.time) as log:
        director = Director(scene.environment, log, [fault], lambda done, all_of: None, 60.0)
        director._begin(0.0)
        first.wait()
        scene.hold(SYNCER)

        director.finish()

    lines = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
    assert [line["what"] for line in lines] == ["begun", "ended", "back"]


def test_a_run_does_not_outrun_its_faults(scene: Scene, tmp_path: Path) -> None:
    scene.hold(SYNCER)
    config = scene.environment.run.config
    fault = TimedFault(0, Kind.KILL, SYNCER, 3000.0, 1000.0, 77, STRENGTH)
    scene.island("exec sleep 60")
    config.telemetry_dir.mkdir(parents=True)
    with (
        FaultLog(tmp_path / "faults.jsonl", time.monotonic, time.time) as log,
        (config.telemetry_dir / "events-east-0.jsonl").open("a") as events,
    ):
        director = Director(scene.environment, log, [fault], lambda done, all_of: None, 4000.0)

        for step in range(1, config.run.inner_steps + 1):
            events.write(json.dumps({"kind": "inner_step", "inner_step": step}) + "\n{")
            events.flush()
            director.look()
            if not director._to_come:
                break
            events.write("}\n")

    assert step == 0.75 * config.run.inner_steps


def test_a_run_without_faults_tells_its_tokens(scene: Scene, tmp_path: Path) -> None:
    config = scene.environment.run.config
    scene.island("exec sleep 60")
    config.telemetry_dir.mkdir(parents=True)
    told = []
    with (
        FaultLog(tmp_path / "faults.jsonl", time.monotonic, time.time) as log,
        (config.telemetry_dir / "events-east-0.jsonl").open("a") as events,
    ):
        director = Director(scene.environment, log, (), lambda *values: told.append(values), 60.0)
        for step in (3, config.run.inner_steps + 1):  # where nobody waits it may be beyond
            events.write(json.dumps({"kind": "inner_step", "inner_step": step}) + "\n")
            events.flush()
            director.look()

    assert told == [(3 * 128, config.total_tokens), (config.total_tokens, config.total_tokens)]


def test_faults_of_one_link_come_one_after_the_other(scene: Scene, tmp_path: Path) -> None:
    scene.island("exec sleep 60")
    path = links_path(scene.environment.chaos_dir)
    links = link_faults({VARIABLE: str(scene.environment.chaos_dir)}, "east", "127.0.0.1:1")
    transport = links.around(cast(Transport, Echo()), carries_fragments=True)
    faults = [
        TimedFault(number, kind, "east", 0.0, 0.1, 77, STRENGTH)
        for number, kind in enumerate((Kind.DELAY, Kind.DUPLICATE))
    ]
    seen = []
    wait_until(lambda: faults_of_process.is_read(scene.environment.chaos_dir, "east"))

    with FaultLog(tmp_path / "faults.jsonl", time.monotonic, time.time) as log:
        director = Director(scene.environment, log, faults, lambda done, all_of: None, 60.0)

        def play() -> bool:
            asyncio.run(transport.call("fragment.submit", b"", b"", deadline_s=20.0))
            director._end(log.now_s + 100.0)
            director._begin(0.0)
            seen.append([*(read_json(path) or {}).get("east", {}).get("rates", {})])
            return not (director._to_come or director._under_way)

        wait_until(play)

    assert all(len(rates) < 2 for rates in seen)
    lines = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
    order = [(line["what"], line["number"]) for line in lines]
    assert order == [("begun", 0), ("ended", 0), ("begun", 1), ("ended", 1)]


@pytest.mark.parametrize("end", ["met", "gone", "over"])
def test_a_fault_that_met_nobody_goes_on_until_it_is_met_or_cannot_be(
    scene: Scene, tmp_path: Path, end: str
) -> None:
    island = scene.island("exec sleep 60")
    path = links_path(scene.environment.chaos_dir)
    links = link_faults({VARIABLE: str(scene.environment.chaos_dir)}, "east", "127.0.0.1:1")
    transport = links.around(cast(Transport, Echo()), carries_fragments=True)
    fault = TimedFault(0, Kind.DELAY, "east", 0.0, 1.0, 77, STRENGTH)
    wait_until(lambda: faults_of_process.is_read(scene.environment.chaos_dir, "east"))

    with FaultLog(tmp_path / "faults.jsonl", time.monotonic, time.time) as log:
        director = Director(scene.environment, log, [fault], lambda done, all_of: None, 60.0)
        director._begin(0.0)
        ((end_s, injector),) = director._under_way
        director._end(end_s + 20.0)
        assert "east" in (read_json(path) or {}) and director._under_way

        if end == "met":  # by a call of the next second, when its rank has read the file
            while injector.is_unmet():
                asyncio.run(transport.call("fragment.submit", b"", b"", deadline_s=20.0))
        elif end == "gone":
            island.kill()
            island.wait()
        if end == "over":
            director.finish()
        else:
            director._end(end_s + 20.0)
            assert "east" not in (read_json(path) or {})
            wait_until(lambda: director._end(end_s + 20.0) or not director._under_way)

    *_, ended = map(json.loads, (tmp_path / "faults.jsonl").read_text().splitlines())
    history = read_fault_log([ended], [fault]).faults[0]
    assert (ended["what"], history.fired) == ("ended", end == "met")
    assert history.had_chance == (end != "gone")
    assert history.lasted_s == pytest.approx(21.0)


def test_faults_on_purpose_stay_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beyond this machine's loopback"):
        link_faults({VARIABLE: str(tmp_path)}, "east", "10.0.0.1:4711")


def test_a_join_never_arrives_twice() -> None:
    script = {"rates": {"duplicate": 1.0, "delay": 0.0}}

    assert "duplicate" not in faults_of_process.script_of(script, carries_fragments=False).rates
    assert "duplicate" in faults_of_process.script_of(script, carries_fragments=True).rates
