"""A store without its journal is no new run; `diloco repair` makes the journal again."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco.checkpoint.lost_journal import has_journal
from diloco.checkpoint.run_checkpoints import open_journal, read_membership
from diloco.coordinator.grants import load_or_create_secret
from diloco.errors import ConfigError
from diloco.launch.coordinator import _write_again, run_coordinator
from diloco.launch.local import find_resume_step
from diloco.launch.syncer_files import next_epoch
from diloco.protos.control_pb2 import Grant
from diloco.report.repair import repair_run
from diloco.state_dir import holder, stop_syncer
from diloco.transport.errors import TransportError
from diloco.versions.repair import Condition
from tests.coordinator.test_coordinator_process import founded, indexed, poll, publish, report
from tests.coordinator_site import Site, eventually

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.close()


@dataclass(frozen=True)
class Begun:
    """A run whose processes have ended after version 1 of fragment 0; tests go on with copies."""

    root: Path
    digest: str
    east: Grant

    def copy_to(self, site: Site) -> None:
        shutil.copytree(self.root, site.state.root)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Begun]:
    site = Site(tmp_path_factory.mktemp("begun"))
    try:
        process, coordinator = site.coordinate_until_up()
        syncer, east, west = founded(site, coordinator)
        publish(syncer, [east, west], 0, 0, 1.0)
        digest = poll(syncer, east).fragments[0].digest.hex()
        eventually(lambda: indexed(site) == [(0, 0), (0, 1), (1, 0)], "the index of all versions")
        process.kill()
        process.wait()
        stop_syncer(site.state)
        yield Begun(site.state.root, digest, east)
    finally:
        site.close()


def lose_journal(site: Site) -> None:
    for path in site.state.root.glob("journal.sqlite*"):
        path.unlink()


def test_nothing_is_founded_next_to_a_store_whose_journal_is_lost_until_it_was_made_again(
    site: Site, begun: Begun
) -> None:
    begun.copy_to(site)
    lose_journal(site)
    for resume in (False, True):
        with pytest.raises(ConfigError, match="diloco repair") as caught:
            asyncio.run(run_coordinator(site.config(), announce=print, resume=resume))
        assert "is missing or empty" in str(caught.value)
        assert str(site.state.store) in str(caught.value)

    found = repair_run(site.state)

    assert [f.condition for f in found] == [Condition.REPAIRED, *[Condition.WHOLE] * 3]
    assert "made again: 3 versions, timeline 0, east at inner step 4" in found[0].detail
    _, coordinator = site.coordinate_until_up()
    joined = site.join(coordinator, "east", "east-2").grant
    assert joined.incarnation > time.time() - 1000
    syncer = site.syncer_address(coordinator, "east", "east-2")
    (first, second) = poll(syncer, joined).fragments
    assert (first.version, first.digest.hex()) == (1, begun.digest)
    assert (second.version, second.is_founded) == (0, True)


@pytest.mark.slow
def test_starts_of_before_are_fenced_everywhere(site: Site, begun: Begun) -> None:
    begun.copy_to(site)
    lose_journal(site)
    repair_run(site.state)

    _, coordinator = site.coordinate_until_up()
    told = report(coordinator, begun.east)
    assert (told.stop, told.exit_code) == (True, 41)
    site.join(coordinator, "west", "west-2")
    syncer = site.syncer_address(coordinator, "west", "west-2")
    eventually(lambda: poll(syncer, begun.east).is_fenced, "the syncer hears who counts")


@pytest.mark.slow
def test_a_store_without_the_versions_that_the_journal_knows_founds_nothing(
    site: Site, begun: Begun
) -> None:
    begun.copy_to(site)
    for directory in site.state.store.glob("fragment-*"):
        shutil.rmtree(directory)
    _, coordinator = site.coordinate_until_up()
    syncer = site.syncer_address(coordinator, "east", "east-2")
    grants = [site.join(coordinator, name, f"{name}-2").grant for name in ("east", "west")]
    for grant in (*grants, *grants):
        states = poll(syncer, grant).fragments
        assert [(s.is_founded, s.is_damaged, s.wants_initial) for s in states] == [
            (False, True, False)
        ] * 2


def test_a_resume_without_the_journal_says_that_it_is_missing_and_what_makes_it_again(
    site: Site, begun: Begun
) -> None:
    begun.copy_to(site)
    lose_journal(site)
    with pytest.raises(ConfigError, match=r"is missing or empty, and .* diloco repair"):
        find_resume_step(site.config(), None, print, start="diloco local RUN.toml")


def test_the_journal_of_another_run_is_refused(site: Site, begun: Begun) -> None:
    begun.copy_to(site)
    plan = site.state.plan.read_text()
    site.state.plan.write_text(plan.replace("layers.", "blocks."))
    with pytest.raises(ConfigError, match="are of two runs"):
        asyncio.run(run_coordinator(site.config(), announce=print))


def test_a_damaged_journal_is_set_aside_and_made_again(site: Site, begun: Begun) -> None:
    begun.copy_to(site)
    lose_journal(site)
    site.state.journal.write_bytes(b"no journal of any kind" * 1000)
    with pytest.raises(ConfigError, match="diloco repair"):
        asyncio.run(run_coordinator(site.config(), announce=print))
    assert repair_run(site.state)[0].condition is Condition.REPAIRED
    assert has_journal(site.state, site.config())
    assert Path(f"{site.state.journal}.damaged").exists()
    with open_journal(site.state.journal) as journal:
        membership = read_membership(site.config(), journal)
    assert membership.plan_json == site.state.plan.read_text()
    assert not membership.is_text_known


def test_a_journal_damaged_on_any_page_is_named_set_aside_and_made_again(
    site: Site, begun: Begun, tmp_path: Path
) -> None:
    begun.copy_to(site)
    with closing(sqlite3.connect(site.state.journal)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")  # all of it is in the file itself
        ((page_bytes,),) = connection.execute("PRAGMA page_size")
        query = "SELECT rootpage FROM sqlite_schema WHERE rootpage > 0"
        roots = [page for (page,) in connection.execute(query)]
    whole = site.state.journal.read_bytes()

    def without(page: int) -> bytes:
        start = (page - 1) * page_bytes
        return whole[:start] + bytes(page_bytes) + whole[start + page_bytes :]

    for page in roots:
        site.state.journal.write_bytes(without(page))
        assert not has_journal(site.state, site.config()), page
        assert not site.state.journal.exists(), "it is set aside"
    for was, written in ((b'"version": 1', b'"version"; 1'), (b'"digest', b'"dig\xffst')):
        assert was in whole
        site.state.journal.write_bytes(whole.replace(was, written))
        assert not has_journal(site.state, site.config()), written
    for page in roots[:2]:
        site.state.journal.write_bytes(without(page))
        with pytest.raises(ConfigError, match=r"cannot read the journal .*diloco repair"):
            asyncio.run(run_coordinator(site.config(), announce=print))

    assert repair_run(site.state)[0].condition is Condition.REPAIRED
    assert has_journal(site.state, site.config())


@pytest.mark.slow
def test_damaged_small_files_of_a_syncer_are_no_end(site: Site) -> None:
    process, coordinator = site.coordinate_until_up()
    syncer, east, _ = founded(site, coordinator)
    before = poll(syncer, east).syncer_epoch
    eventually(site.state.orders.exists, "orders")
    pid = holder(site.state.store_lock)
    assert pid is not None
    process.send_signal(signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: holder(site.state.store_lock) is None, "the syncer's end")
        state = site.state
        for path in (
            state.orders, state.syncer_epoch, state.incarnations, state.plan, state.bound,
            state.syncer, state.secret, state.timeline, state.resolved, state.store_timeline,
        ):  # fmt: skip
            path.write_bytes(b"{]\xff")
    finally:
        process.send_signal(signal.SIGCONT)
    eventually(lambda: holder(site.state.store_lock) not in (None, pid), "another syncer")

    def states() -> bool:
        try:  # it has bound another port
            reply = poll(site.syncer_address(coordinator, "east", "east-1"), east)
        except TransportError:
            return False
        assert reply.syncer_epoch > before or not reply.syncer_epoch
        return all(state.is_founded and state.is_open for state in reply.fragments)

    eventually(states, "rounds open again, by orders that were asked for again")
    log = site.state.syncer_log.read_text()
    assert "orders.json is damaged and set aside" in log
    assert "Traceback" not in log


def test_what_a_syncer_reads_of_its_coordinator_is_written_again_where_it_can_be(
    tmp_path: Path,
) -> None:
    unreadable, damaged, lost = (tmp_path / name for name in "abc")
    unreadable.mkdir()
    damaged.write_bytes(b"dolt")

    _write_again(dict.fromkeys((unreadable, damaged, lost), b"told"))

    assert (damaged.read_bytes(), lost.read_bytes()) == (b"told", b"told")


@pytest.mark.parametrize("found", [None, "", "{", "[1]", "7", '"x"'])
def test_the_number_of_a_start_is_higher_than_any_before_whatever_its_file_says(
    tmp_path: Path, found: str | None
) -> None:
    path = tmp_path / "epoch.json"
    assert [next_epoch(path, 1e9) for _ in range(2)] == [10**9, 10**9 + 1]
    path.unlink() if found is None else path.write_text(found)
    assert next_epoch(path, 1e9 + 9) == 10**9 + 9


def test_damaged_incarnations_are_written_again_from_the_journal(site: Site, begun: Begun) -> None:
    begun.copy_to(site)
    site.state.incarnations.write_text("{]")
    (finding, *_) = repair_run(site.state)
    assert (finding.what, finding.condition) == ("incarnations.json", Condition.REPAIRED)
    assert json.loads(site.state.incarnations.read_text()) == {"east": 1, "west": 1}


def test_a_damaged_secret_is_said_with_the_command(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("rotten")
    with pytest.raises(ConfigError, match=f"rm {path}"):
        load_or_create_secret(path)
