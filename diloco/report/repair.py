"""`diloco repair`: a run's store verified, mended where it can be, and what remains, offline.

Source: PROTOCOL.md, "Damaged fragments" and "Lost journal".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from diloco.checkpoint.checkpoints import found_directory, verify_sizes, written_steps
from diloco.checkpoint.lost_journal import has_journal, rebuild_journal
from diloco.checkpoint.run_checkpoints import open_journal, read_membership
from diloco.checkpoint.stores import StorePart, known_plan, parts_of
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.coordinator.journal import AuditEntry, Journal
from diloco.durable import read_json, write_json
from diloco.errors import ConfigError
from diloco.outer.fragments import Plan
from diloco.protocol.run.members import read_member
from diloco.protocol.run.membership import Membership
from diloco.state_dir import ONLY_SYNCER, Held, StateDir, hold, read_timeline
from diloco.versions.pins import pin_directory, verify_pin
from diloco.versions.record import RecordInvalid
from diloco.versions.repair import Condition, RepairFinding, repair_fragment
from diloco.versions.store import FragmentStore

#: Fragment of a finding that is of all of them.
ALL_FRAGMENTS = -1


def repair_run(
    state: StateDir, *, on_finding: Callable[[RepairFinding], None] = lambda finding: None
) -> tuple[RepairFinding, ...]:
    """Verify and repair the store of a run that is not served; returns one finding a part.

    Pins of complete checkpoints are read. Of islands' checkpoints that are on this machine
    manifests and sizes are looked at; a damaged one is nowhere else, but in its mirror.

    Args:
        state: The run's state directory.
        on_finding: Called with each as it is made.

    Raises:
        ConfigError: If there is no store, or a syncer serves it.
        DiskFull: If there is no room for what is made again.
    """
    if not state.resolved.exists() or (plan := known_plan(state)) is None:
        raise ConfigError(
            f"{state.root} holds no store of a syncer (there is no {state.syncers[0].plan}): give "
            f"the run file, or the coordinator.state_dir of a run that was started"
        )
    config = load_config(state.resolved)
    if config.run.state:
        raise ConfigError(
            f"{state.root} is the working copy of a run whose state is in {config.run.state}: what "
            f"is damaged here is fetched from there. Remove the damaged file, then start the "
            f"coordinator again: diloco coordinator RUN.toml"
        )
    rebuilt: tuple[RepairFinding, ...] = ()
    if not has_journal(state, config):
        rebuilt = (_rebuilt(state, config, plan),)
        on_finding(rebuilt[0])
    repaired = _repaired(state, config, plan, on_finding)
    with open_journal(state.journal) as journal:
        membership = read_membership(config, journal)
    checkpoints = []
    pins = _pins(parts_of(state, plan), membership)
    for finding in itertools.chain(pins, _checkpoints(config, membership)):
        checkpoints.append(finding)
        on_finding(finding)
    return (*rebuilt, *repaired, *checkpoints)


def _pins(parts: Sequence[StorePart], membership: Membership) -> Iterator[RepairFinding]:
    """Read the pins of checkpoints that are complete; one that is lost cannot be made again."""
    for part, step in itertools.product(parts, membership.checkpoints):
        condition, detail = Condition.WHOLE, ""
        try:
            verify_pin(part.state.store, part, step)
        except RecordInvalid as error:
            condition, detail = Condition.DAMAGED, f"{error}. A resume takes an older checkpoint"
        name = pin_directory(part.state.store, step).relative_to(part.state.root)
        yield RepairFinding(ALL_FRAGMENTS, f"pin {name}", condition, detail)


def _checkpoints(config: Config, membership: Membership) -> Iterator[RepairFinding]:
    """Hold the islands' checkpoints that are on this machine against their manifests, by size.

    What the journal does not call complete need have none: a writer may have been killed.
    """
    complete, is_elastic = membership.checkpoints, membership.rules.is_elastic
    directory = config.checkpoint_dir
    for path in sorted(each for each in directory.glob("*") if each.is_dir()):
        island = path.name
        if island not in membership.members:
            continue
        for step in sorted({*complete, *written_steps(directory, island)}):
            found = found_directory(directory, island, step, is_cut=is_elastic)
            cut = membership.cuts.find(step)
            has_part = cut is not None and island in cut.parts
            has_part |= not is_elastic and island in membership.members.counted
            if not (has_part or found.exists()):
                continue
            condition, detail = Condition.WHOLE, ""
            try:
                verify_sizes(found)
            except ConfigError as error:
                condition = Condition.DAMAGED
                detail = (
                    f"{error}. Bring it back from a copy or a mirror, or move {found} away; a "
                    f"resume takes the newest checkpoint of which every island has its part"
                )
            yield RepairFinding(
                ALL_FRAGMENTS, f"checkpoint {path.name}/{found.name}", condition, detail
            )


def _rebuilt(state: StateDir, config: Config, plan: Plan) -> RepairFinding:
    """Make the journal again; of several syncers it says whose the fragments are."""
    with hold(state.coordinator_lock), _held(state.syncers):
        said = rebuild_journal(state, config, plan, unix_s=time.time())
    return RepairFinding(ALL_FRAGMENTS, state.journal.name, Condition.REPAIRED, said)


def _repaired(
    state: StateDir, config: Config, plan: Plan, on_finding: Callable[[RepairFinding], None]
) -> tuple[RepairFinding, ...]:
    parts = parts_of(state, plan)
    with _held(state.syncers):
        found = []
        for part in parts:
            for finding in _findings(part, config):
                found.append(finding)
                on_finding(finding)
        _record(state, found)
        return tuple(found)


@contextlib.contextmanager
def _held(stores: Sequence[StateDir]) -> Iterator[None]:
    """Hold the stores of a run, so that nobody serves them.

    Raises:
        ConfigError: If somebody does.
    """
    try:
        with contextlib.ExitStack() as held:
            for each in stores:
                if each.store.is_dir():
                    held.enter_context(hold(each.store_lock))
            yield
    except Held as error:
        raise ConfigError(
            f"the store of the run is in use: {error}. Stop the run first (Ctrl-C at its "
            "coordinator, which stops its syncer and islands), then repair it again"
        ) from error


def _record(state: StateDir, found: Sequence[RepairFinding]) -> None:
    """Put in the audit log what was made again, where the coordinator's journal is here."""
    told = [
        AuditEntry(
            "repair",
            f"f{finding.fragment_id}/{finding.what}: {finding.detail}",
            json.dumps({"what": finding.what, "detail": finding.detail}),
        )
        for finding in found
        if finding.condition is Condition.REPAIRED
    ]
    if told and state.journal.is_file():
        journal = Journal(state.journal)
        journal.open()
        try:
            journal.write((), told=told)
        finally:
            journal.close()


def _findings(part: StorePart, config: Config) -> Iterator[RepairFinding]:
    state = part.state
    if not state.store.is_dir():
        for fragment in part.fragments:
            yield RepairFinding(
                fragment.fragment_id,
                state.store.name,
                Condition.DAMAGED,
                "the store is gone: bring it back from a copy. Without one start the coordinator, "
                "and give the fragment back from an island that holds it: diloco repair HOST:PORT "
                f"--fragment {fragment.fragment_id} --from-island NAME",
            )
        return
    small = state.syncer_epoch, state.incarnations, state.store_timeline, state.bound, state.orders
    for path in small:
        with _told(path) as problem:
            read_json(path)
        if problem:
            place = state.store if state.syncer_name == ONLY_SYNCER else state.root
            name = str(path.relative_to(place))
            is_known = path == state.incarnations and _restore_incarnations(state)
            yield RepairFinding(
                ALL_FRAGMENTS,
                name,
                Condition.REPAIRED if is_known else Condition.DAMAGED,
                f"written again from the journal: {problem[0]}" if is_known else problem[0],
            )
    outer = config.outer
    for fragment in part.fragments:
        store = FragmentStore(
            state.store,
            fragment,
            outer.retained_versions,
            is_indexed=lambda version: False,  # headers stay until a coordinator has them
            snapshot_rounds=outer.snapshot_rounds,
            keeps_all=outer.keep_contributions == "all",
        )
        yield from repair_fragment(store)
        recovered = store.recover()
        newest = -1 if recovered is None else recovered.record.version
        indexed = _newest_indexed(state, fragment.fragment_id)
        if indexed > newest:
            yield RepairFinding(
                fragment.fragment_id,
                f"version {indexed}",
                Condition.DAMAGED,
                f"it was published, and nothing here leads to it. The newest that is left is "
                f"{newest}. Resume a checkpoint: diloco coordinator RUN.toml --resume",
            )


def _restore_incarnations(state: StateDir) -> bool:
    """Write again which starts of islands count, as the journal has granted them."""
    with open_journal(state.journal) as journal:
        granted = {
            key.removeprefix("island/"): read_member(0, value).incarnation
            for key, value in journal.entries().items()
            if key.startswith("island/")
        }
    if granted:
        write_json(state.incarnations, granted)
    return bool(granted)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[list[str]]:
    problem: list[str] = []
    try:
        yield problem
    except (ValueError, OSError) as error:
        problem.append(str(error))


def _newest_indexed(state: StateDir, fragment_id: int) -> int:
    """Newest version that the coordinator knows of, -1 where it knows none."""
    if not state.journal.is_file():
        return -1
    journal = Journal(state.journal)
    journal.open()
    try:
        timeline = read_timeline(state.timeline).number
        headers = journal.newest_rounds(timeline, fragment_id, 1)
        return int(json.loads(headers[0])["version"]) if headers else -1
    finally:
        journal.close()
