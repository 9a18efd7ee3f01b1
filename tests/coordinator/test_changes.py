"""Changes: durable before anybody hears of them, many at once, and no disk holds the loop."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.coordinator.changes import Changes
from diloco.coordinator.journal import AuditEntry, Journal
from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectStore
from diloco.protocol.run.admission import Entries
from diloco.protocol.run.membership import Decide, Membership
from diloco.transport.errors import TransportError
from tests.coordinator_in_memory import CoordinatorInMemory, joined, tell
from tests.run_files import write_run


def membership(names: tuple[str, ...] = ("east", "west")) -> Membership:
    return Membership("demo", names, "{}", lambda a, b: [], 100, num_checkpoints=2)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.open()
    yield journal
    journal.close()


@pytest.fixture
def num_transactions(journal: Journal) -> Callable[[], int]:
    """Count what was committed since."""
    commits: list[str] = []
    journal._require().writer.set_trace_callback(
        lambda statement: commits.append(statement) if statement == "COMMIT" else None
    )
    return lambda: len(commits)


def changes_of(membership: Membership, journal: Journal) -> Changes:
    return Changes(membership, journal, on_made=lambda num_conflicts: None)


def operated(number: int) -> Decide:
    """Note one more command; each has the next number, in the order of the calls."""
    return lambda m: m.settings.operated({"said": number})


def set_to(value: object) -> Decide:
    """Set what has the next revision, in the order of the calls."""
    return lambda m: m.settings.changed("a", value)


def started(island: str, number: int) -> Decide:
    """Have one more start of an island."""
    return lambda m: m.members.changed(island, m.members[island].started(f"s{number}", number, 0))


def make_full(journal: Journal) -> Callable[[], object]:
    """Leave no room in a journal; returns what makes some."""
    writer = journal._require().writer
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count = {pages}")
    return lambda: writer.execute("PRAGMA max_page_count = 1000000")


def test_what_a_thousand_ask_at_once_is_durable_in_few_transactions_in_the_order_of_the_calls(
    journal: Journal, num_transactions: Callable[[], int]
) -> None:
    run = membership()
    changes = changes_of(run, journal)

    async def is_durable(number: int) -> bool:
        await changes.make(operated(number))
        found = json.loads(journal.entries()[f"operation/{(number + 1) % 1000}"])
        return bool(found == {"number": number + 1, "said": number})

    async def all_at_once() -> list[bool]:
        return await asyncio.gather(*map(is_durable, range(1000)))

    assert all(asyncio.run(all_at_once()))
    assert num_transactions() < 10


def test_the_membership_has_nothing_that_is_not_durable_and_the_loop_goes_on(
    journal: Journal, num_transactions: Callable[[], int]
) -> None:
    run = membership()
    changes = changes_of(run, journal)

    async def changed() -> None:
        is_free = threading.Event()
        journal._require().thread.submit(is_free.wait)  # as a slow disk
        waiting = []
        for value in range(1, 50):
            waiting.append(asyncio.create_task(changes.make(set_to(value))))
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert run.settings.revision == 0 and not any(task.done() for task in waiting)
        is_free.set()
        await asyncio.gather(*waiting)

    asyncio.run(changed())

    assert (run.settings.revision, run.settings.policy) == (49, {"a": 49})
    assert num_transactions() == 2


def test_what_finds_no_room_changes_nothing_and_is_told_to_all_that_were_in_it(
    journal: Journal,
) -> None:
    run = membership()
    changes = changes_of(run, journal)

    async def full() -> None:
        make_room = make_full(journal)
        large = set_to("x" * 50_000)
        for _ in range(2):
            failed = await asyncio.gather(
                changes.make(large),
                changes.make(operated(1)),
                changes.make(told=[AuditEntry("alarm", "a", "{}")]),
                return_exceptions=True,
            )
            assert [type(error) for error in failed] == [DiskFull] * 3
        assert run.settings.revision == 0 and journal.entries() == {}
        make_room()
        await changes.make(large)

    asyncio.run(full())

    assert run.settings.revision == 1
    assert journal.entries().keys() == {"policy/1"}
    assert [told.kind for told in journal.audit_rows()] == ["policy"]


def test_who_asks_for_what_cannot_be_decided_is_told_and_nobody_else(journal: Journal) -> None:
    run = membership()
    changes = changes_of(run, journal)

    def impossible(m: Membership) -> Entries:
        if m.settings.revision:
            raise ConfigError("more syncers than fragments")
        return m.settings.changed("a", 0)

    async def asked() -> list[BaseException | None]:
        return await asyncio.gather(
            changes.make(set_to(1)),
            changes.make(operated(1), impossible),
            changes.make(set_to(2)),
            return_exceptions=True,
        )

    first, second, third = asyncio.run(asked())

    assert first is third is None and isinstance(second, ConfigError)
    assert journal.entries().keys() == {"policy/1", "policy/2"}


def test_a_call_that_nobody_waits_for_any_more_is_made_all_the_same(journal: Journal) -> None:
    run = membership()
    changes = changes_of(run, journal)

    async def cancelled() -> None:
        call = asyncio.create_task(changes.make(operated(1)))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await changes.settled()

    asyncio.run(cancelled())

    assert json.loads(journal.entries()["operation/1"])["said"] == 1


# -- at a coordinator ------------------------------------------------------------------------------


def test_reports_are_answered_while_a_join_is_being_committed(tmp_path: Path) -> None:
    async def story(coord: CoordinatorInMemory) -> None:
        east = (await coord.join("east")).grant
        is_free = threading.Event()
        coord.journal._require().thread.submit(is_free.wait)  # as a slow disk

        joining = asyncio.create_task(coord.join("west"))
        again = asyncio.create_task(coord.join("east", "b"))
        for _ in range(20):
            reply = await coord.report(east, inner_step=3)
            assert not reply.stop, "the start that fences it is not durable"
        assert coord.membership.members["west"].incarnation == 0
        assert not (joining.done() or again.done())
        is_free.set()

        assert (await joining).grant.incarnation == 1
        assert (await again).grant.incarnation == 2
        assert (await coord.report(east, inner_step=4)).stop

    tell(tmp_path, story)


def test_a_start_that_is_fenced_while_its_report_waits_is_told_so(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path / "run", {"east": "", "west": ""}))

    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        await coord.coordinator.request_stop()
        is_free = threading.Event()
        coord.journal._require().thread.submit(is_free.wait)

        again = asyncio.create_task(coord.join("east", "b"))
        for _ in range(20):  # its plan is read
            await coord.report(west)
        promise = asyncio.create_task(coord.report(east, inner_step=7, hold_step=7, has_hold=True))
        for _ in range(20):
            await coord.report(west)
        is_free.set()

        assert (await again).grant.incarnation == 2
        assert (await promise).stop
        assert coord.membership.promises == {}, "it promises nothing any more"

    tell(tmp_path, story, config=config)


def test_a_call_without_room_changes_nothing_and_is_to_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **__: object) -> int:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    async def story(coord: CoordinatorInMemory) -> None:
        east, west = await joined(coord)
        with monkeypatch.context() as patch:
            patch.setattr(coord.journal, "commit", full)
            for call in (
                coord.join("east", "b"),
                coord.leave(west, exit_code=40),
                coord.operate("kick", island="west"),
                coord.round_report(record={"timeline": 0, "fragment_id": 0, "version": 0}),
            ):
                with pytest.raises(TransportError, match="No space left"):
                    await call
            assert coord.membership.members["east"].incarnation == 1
            for grant in (east, west):
                assert not (await coord.report(grant)).stop

        assert (await coord.join("east", "b")).grant.incarnation == 2
        assert (await coord.report(east)).stop
        assert not (await coord.report(west)).stop

    config = load_config(write_run(tmp_path / "run", {"east": "", "west": ""}))
    tell(tmp_path, story, config=config)


# -- killed at any moment --------------------------------------------------------------------------


class _Slow(ObjectStore):
    """Takes an entry after a while, and its answer takes as long."""

    def create(self, name: str, data: bytes) -> bool:
        threading.Event().wait(0.002)
        created = super().create(name, data)
        threading.Event().wait(0.002)
        return created


_ISLANDS = tuple(f"island-{number:02d}" for number in range(40))


def opened(root: Path, url: str) -> tuple[Membership, Journal]:
    """Open what a coordinator has, of a run whose state is in an object store if there is a URL."""
    replica = None
    if url:
        replica = Replica(_Slow(url), "run", root, lambda path: False)
        replica.open(lambda number: {"lease": number}, lambda found: None)
    journal = Journal(root / "journal.sqlite", replica)
    journal.open()
    run = membership(_ISLANDS)
    run.apply(journal.entries().items())
    return run, journal


async def join_again_and_again(run: Membership, journal: Journal) -> None:
    """Have islands start without end; say of each start that is answered, and all that is seen."""
    changes = changes_of(run, journal)

    async def island(name: str) -> None:
        while True:
            number = run.members[name].incarnation + 1
            await changes.make(started(name, number))
            sys.stdout.write(f"{name} {number}\n")
            sys.stdout.flush()

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.0005)
            for name, member in run.members.items():
                sys.stdout.write(f"{name} {member.incarnation}\n")
            sys.stdout.flush()

    await asyncio.gather(*map(island, _ISLANDS), watch())


@pytest.mark.parametrize("is_in_a_store", [False, True], ids=["disk", "store"])
@pytest.mark.parametrize("num_lines", [40, 700, 3001])
def test_a_killed_process_knows_all_that_anybody_was_told(
    tmp_path: Path, num_lines: int, *, is_in_a_store: bool
) -> None:
    url = f"file://{tmp_path / 'objects'}" if is_in_a_store else ""
    words = [sys.executable, "-m", "tests.coordinator.test_changes", str(tmp_path), url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(num_lines)]
        process.kill()
        said += process.stdout.read().splitlines()[:-1]  # the last line may be half of one

    root = tmp_path
    if is_in_a_store:  # another machine takes it over
        root = tmp_path / "other"
        root.mkdir()
    run, journal = opened(root, url)
    journal.close()

    for name, number in (line.split() for line in said):
        assert run.members[name].incarnation >= int(number)


if __name__ == "__main__":
    asyncio.run(join_again_and_again(*opened(Path(sys.argv[1]), sys.argv[2])))
