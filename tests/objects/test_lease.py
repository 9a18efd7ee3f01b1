"""Who holds a run's state: one machine at a time, by no clock but the own."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco.checkpoint.run_checkpoints import open_journal
from diloco.errors import ConfigError, Fenced
from diloco.launch.held_state import holding_state
from diloco.objects import lease
from diloco.objects.lease import RunState, lease_path, store_replica
from diloco.objects.store import ObjectStore, StoreAway
from diloco.state_dir import StateDir


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    monkeypatch.setattr(lease, "BEAT_S", 0.02)


class Machine:
    def __init__(
        self, directory: Path, name: str, run: str = "run", fingerprint: str = "f"
    ) -> None:
        self.state = StateDir(directory / name)
        self.state.create()
        self.fenced: list[Fenced] = []
        self.said: list[str] = []
        url = f"file://{directory / 'objects'}"
        self.store = ObjectStore(url)
        self.run = RunState(url, run, fingerprint, self.state, self.fenced.append)

    async def take(self, *, is_standby: bool = False) -> None:
        await self.run.take(is_standby=is_standby, syncers=["syncer"], announce=self.said.append)

    async def live(self) -> None:
        while True:
            await asyncio.to_thread(self.run.beat, "host:1")
            await asyncio.sleep(lease.BEAT_S)


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    return lambda name, **more: Machine(tmp_path, name, **more)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20.0))


def test_a_holder_that_is_silent_is_followed_by_the_own_clock(
    machine: Callable[..., Machine],
) -> None:
    one, two = machine("one"), machine("two")

    async def story() -> None:
        await one.take()
        living = asyncio.create_task(one.live())
        waiting = asyncio.create_task(two.take(is_standby=True))
        await asyncio.sleep(3 * lease.LEASE_S)
        assert not waiting.done()
        living.cancel()
        await waiting
        assert two.run.lease > one.run.lease
        with pytest.raises(Fenced):
            one.run.replica.check()
        assert one.fenced

    run(story())
    assert "waiting for its end" in two.said[1] and "taking the run 'run' over" in two.said[-1]


def test_who_is_no_standby_is_told_who_holds_it(machine: Callable[..., Machine]) -> None:
    one, two = machine("one"), machine("two")

    async def story() -> None:
        await one.take()
        living = asyncio.create_task(one.live())
        await asyncio.sleep(0.05)
        with pytest.raises(ConfigError, match=r"held by .* at host:1.*--standby"):
            await two.take()
        living.cancel()
        await two.take()  # dead by now

    run(story())


def test_the_same_directory_and_the_next_of_a_good_end_wait_for_nothing(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 1000.0)
    one, again, two = machine("one"), machine("one"), machine("two")

    async def story() -> None:
        await one.take()
        await again.take()
        again.run.beat("", is_over=True)
        await two.take()

    run(story())
    assert one.run.lease < again.run.lease < two.run.lease


def test_a_copy_of_the_directory_is_another_holder(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    one = machine("one")

    async def story() -> None:
        await one.take()
        living = asyncio.create_task(one.live())
        await asyncio.sleep(0.05)
        shutil.copytree(tmp_path / "one", tmp_path / "copy")
        with pytest.raises(ConfigError, match="held by"):
            await machine("copy").take()
        living.cancel()

    run(story())
    assert not one.fenced


def test_of_two_that_wait_one_goes_on_and_one_waits_for_that(
    machine: Callable[..., Machine],
) -> None:
    one, two, three = machine("one"), machine("two"), machine("three")

    async def story() -> None:
        await one.take()
        waiting = [asyncio.create_task(m.take(is_standby=True)) for m in (two, three)]
        done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            assert task.exception() is None
        assert len(left) == 1
        (other,) = left
        await other  # the first says nothing any more
        leases = {m.run.lease for m in (one, two, three)}
        assert len(leases) == 3

    run(story())


def test_another_run_is_refused_by_name(machine: Callable[..., Machine]) -> None:
    one, other = machine("one"), machine("two", run="other")

    async def story() -> None:
        await one.take()
        with pytest.raises(ConfigError, match="holds the run 'run', and this file is of 'other'"):
            await other.take(is_standby=True)
        with pytest.raises(ConfigError, match=r"of another model, seed, plan .*prefix of its own"):
            await machine("three", fingerprint="g").take(is_standby=True)
        assert one.run.lease == 0 and not one.fenced

    run(story())


def test_a_run_of_a_directory_alone_is_put_there_and_overwrites_none(
    machine: Callable[..., Machine],
) -> None:
    one, two, three = machine("one"), machine("two"), machine("three")
    begin(one, "a")
    begin(three, "c")

    async def story() -> None:
        await one.take()
        with open_journal(one.state.journal, replica=one.run.replica) as journal:
            journal.write([("b", "2")])
        await two.take()
        with pytest.raises(ConfigError, match=r"begun without run\.state"):
            await three.take()

    run(story())
    with open_journal(two.state.journal, replica=two.run.replica) as journal:
        assert journal.entries() == {"a": "1", "b": "2"}
    assert (two.state.store / "fragment-0000/v1.record").read_bytes() == b"a" * 100_000
    assert two.state.secret.read_bytes() == b"key"
    assert (three.state.store / "fragment-0000/v1.record").exists()
    assert two.run.lease > one.run.lease


def begin(machine: Machine, key: str) -> None:
    """Leave what a run without an object store leaves."""
    with open_journal(machine.state.journal) as journal:
        journal.write([(key, "1")])
    machine.state.secret.write_bytes(b"key")
    (machine.state.store / "fragment-0000").mkdir()
    (machine.state.store / "fragment-0000/v1.record").write_bytes(key.encode() * 100_000)


def test_a_directory_that_was_being_put_there_when_killed_is_put_there_again(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one")
    begin(one, "a")
    with monkeypatch.context() as patched:
        patched.setattr(one.run.replica, "adopt", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(one.take())

    again, two = machine("one"), machine("two")
    run(again.take())
    with open_journal(again.state.journal, replica=again.run.replica):
        pass
    run(two.take())

    assert (two.state.store / "fragment-0000/v1.record").read_bytes() == b"a" * 100_000
    with open_journal(two.state.journal, replica=two.run.replica) as journal:
        assert journal.entries() == {"a": "1"}


def test_a_syncer_of_an_older_lease_does_not_open_its_chain(
    machine: Callable[..., Machine],
) -> None:
    one, two = machine("one"), machine("two")

    async def story() -> None:
        await one.take()
        await two.take()

    run(story())
    assert lease_path(one.state).read_text() == str(one.run.lease)
    store_replica(two.store, two.state, two.run.lease, "run")
    with pytest.raises(Fenced, match=f"lease {two.run.lease}, this machine has {one.run.lease}"):
        store_replica(one.store, one.state, one.run.lease, "run")


def test_a_standby_bears_with_a_store_that_is_away(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed looks, the first among them, and failures while the state is fetched, end nothing."""
    one, two = machine("one"), machine("two")
    fails = iter([True, False, True, False, False, False, True, False])
    names = ObjectStore.names

    def sometimes(store: ObjectStore, prefix: str) -> list[str]:
        if store is two.run.store and next(fails, False):
            raise StoreAway(5, "503 Slow Down")
        return names(store, prefix)

    async def story() -> None:
        await one.take()
        await asyncio.to_thread(two.run.holder)
        monkeypatch.setattr(ObjectStore, "names", sometimes)
        await two.take(is_standby=True)

    run(story())
    assert two.run.lease > one.run.lease


def test_a_restart_waits_for_a_store_that_is_away_and_a_first_start_says_so(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, new = machine("one"), machine("new")
    names, num_failures = ObjectStore.names, 0

    def away(store: ObjectStore, prefix: str) -> list[str]:
        nonlocal num_failures
        if num_failures < 3:
            num_failures += 1
            raise StoreAway(5, "503 Slow Down")
        return names(store, prefix)

    run(one.take())
    monkeypatch.setattr(ObjectStore, "names", away)
    with pytest.raises(StoreAway):
        run(new.take())
    assert num_failures == 1
    again = machine("one")
    run(again.take())
    assert num_failures == 3 and again.run.lease > one.run.lease


def test_the_working_copy_is_not_served_without_its_state(
    machine: Callable[..., Machine],
) -> None:
    one = machine("one")
    run(one.take())
    config = SimpleNamespace(run=SimpleNamespace(state=""))

    async def story() -> None:
        async with holding_state(cast(Any, config), one.state, one.said.append, is_standby=False):
            raise AssertionError("it is served")

    with pytest.raises(ConfigError, match="working copy of a run"):
        run(story())


def test_a_sign_of_life_that_fails_as_the_lease_is_taken_doubles_nothing(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two")
    beats, beat = [], RunState.beat

    def sometimes(state: RunState, address: str, *, is_over: bool = False) -> None:
        beats.append(state.lease)
        if len(beats) == 1:
            raise StoreAway(5, "503 Slow Down")
        beat(state, address, is_over=is_over)

    async def story() -> None:
        await one.take()
        with open_journal(one.state.journal, replica=one.run.replica) as journal:
            for number in range(5):
                journal.write([("n", str(number))])
        monkeypatch.setattr(RunState, "beat", sometimes)
        await two.take()

    run(story())
    rows = [number for number, _ in two.run.replica.rows_after(-1)]
    assert len(rows) == 5 and rows == sorted(set(rows))
    assert two.run.lease == beats[-1] > beats[0]


def test_a_thread_that_gives_signs_of_life_bears_with_any_error() -> None:
    is_over, signs = threading.Event(), []

    def sign() -> None:
        signs.append(1)
        if len(signs) == 2:
            is_over.set()
        raise OSError("too many open files")

    async def repeated() -> None:
        async with lease.repeating(sign):
            assert await asyncio.to_thread(is_over.wait, 20.0)

    asyncio.run(repeated())
