"""A syncer on a machine of its own: who has its place, and what the object store says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diloco.checkpoint.fetch import fetch_run
from diloco.checkpoint.run_checkpoints import _lacks_pin, open_journal
from diloco.checkpoint.stores import StorePart
from diloco.config.classes import fingerprint
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.durable import replicate
from diloco.errors import ConfigError, Fenced
from diloco.objects import lease
from diloco.objects.lease import RunState, own_name, store_replica, until_nobody
from diloco.objects.placed_syncer import PlacedSyncer
from diloco.objects.store import ObjectStore
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.state_dir import StateDir, hold
from tests.run_files import write_run


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    monkeypatch.setattr(lease, "BEAT_S", 0.02)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    placed = [f"run.state=file://{tmp_path}/objects", "syncers.eu={}", "syncers.us={}"]
    return load_config(write_run(tmp_path, {"east": ""}), placed)


def machine(config: Config, directory: Path, name: str = "us") -> StateDir:
    state = StateDir(directory).placed(name, sorted(config.syncers).index(name))
    state.create([state.syncer_name])
    return state


def test_a_machine_that_lives_keeps_its_place_and_one_that_is_silent_loses_it(
    config: Config, tmp_path: Path
) -> None:
    store, one, two = ObjectStore(config.run.state), machine(config, tmp_path / "1"), tmp_path / "2"
    place, said = PlacedSyncer(store, machine(config, two)), list[str]()

    async def looked(in_use: str) -> object:
        own = own_name(machine(config, two))
        return await until_nobody(
            place.holder, own, "syncer us", in_use=in_use, announce=said.append
        )

    async def story() -> None:
        assert await looked("") is None
        first = store_replica(store, one, 3, "test")
        living = PlacedSyncer(store, one)

        async def live() -> None:
            while True:
                living.beat(own_name(one), "host:1")
                await asyncio.sleep(lease.BEAT_S)

        beating = asyncio.create_task(live())
        await asyncio.sleep(0.05)
        with pytest.raises(ConfigError, match=r"in use by .* at host:1"):
            await looked("in use by {}")
        beating.cancel()
        assert await looked("") is not None
        store_replica(store, machine(config, two), 3, "test")
        with pytest.raises(Fenced):
            first.check()

    asyncio.run(asyncio.wait_for(story(), 20.0))
    assert "has been silent for 0.3 s" in said[-1]


def test_a_pin_that_the_object_store_lacks_is_named(config: Config, tmp_path: Path) -> None:
    state = machine(config, tmp_path / "1")
    plan = plan_of_two()
    part = StorePart(state, plan.fragments)
    replica = store_replica(ObjectStore(config.run.state), state, 0, "test")
    pinned = state.store / f"pins/step-{20:012d}/fragment-0000"
    pinned.mkdir(parents=True)
    (pinned / "v000000000001.record").write_bytes(b"x")
    replica.adopt()

    assert "us has no pins/step-000000000020/fragment-0001" in _lacks_pin(config, part, 20)
    assert _lacks_pin(config, StorePart(state, plan.fragments[:1]), 20) == ""


def test_a_run_is_fetched_whole_and_again_what_is_new(config: Config, tmp_path: Path) -> None:
    run = RunState(
        config.run.state, "test", fingerprint(config), StateDir(tmp_path / "c"), lambda e: None
    )
    StateDir(tmp_path / "c").create([])
    asyncio.run(run.take(is_standby=False, syncers=[], announce=lambda line: None))
    replicate(run.replica)
    try:
        (tmp_path / "c" / "secret").write_bytes(b"key")
        run.replica.adopt()
        with open_journal(tmp_path / "c" / "journal.sqlite", replica=run.replica) as journal:
            journal.write([("a", "1")])
            fetched = config.coordinator.model_copy(update={"state_dir": str(tmp_path / "copy")})
            copy = config.model_copy(update={"coordinator": fetched})
            fetch_run(copy, lambda line: None)
            journal.write([("b", "2")])
            fetch_run(copy, lambda line: None)
    finally:
        replicate(None)

    with open_journal(tmp_path / "copy" / "journal.sqlite") as journal:
        assert journal.entries() == {"a": "1", "b": "2"}
    assert (tmp_path / "copy" / "secret").read_bytes() == b"key"
    with hold(tmp_path / "copy" / "coordinator.lock"), pytest.raises(ConfigError, match="at work"):
        fetch_run(copy, lambda line: None)


def plan_of_two() -> Plan:
    return make_plan([TensorSpec(name, (3,)) for name in "uv"], num_fragments=2)


def test_a_directory_that_has_a_run_of_its_own_is_not_fetched_into(
    config: Config, tmp_path: Path
) -> None:
    StateDir(tmp_path / "c").create([])
    run = RunState(
        config.run.state, "test", fingerprint(config), StateDir(tmp_path / "c"), lambda e: None
    )
    asyncio.run(run.take(is_standby=False, syncers=[], announce=lambda line: None))
    own = StateDir(tmp_path / "own")
    own.create([])
    with open_journal(own.journal) as journal:
        journal.write([("a", "1")])
    at = config.coordinator.model_copy(update={"state_dir": str(own.root)})

    with pytest.raises(ConfigError, match=r"holds a run of its own.*state_dir=DIRECTORY"):
        fetch_run(config.model_copy(update={"coordinator": at}), lambda line: None)

    with open_journal(own.journal) as journal:
        assert journal.entries() == {"a": "1"}


def test_a_machine_that_nobody_waited_for_is_not_followed(config: Config, tmp_path: Path) -> None:
    store, one, two = (
        ObjectStore(config.run.state),
        machine(config, tmp_path / "1"),
        machine(config, tmp_path / "2"),
    )
    store_replica(store, one, 3, "test", follows=[None])
    taken = store_replica(store, two, 3, "test", follows=[own_name(one)])

    with pytest.raises(Fenced, match="serves as syncer-us"):  # an hour later, with what it knew
        store_replica(store, one, 3, "test", follows=[None])

    taken.check()
