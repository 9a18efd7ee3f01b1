"""Chooses the run checkpoint that a run is resumed from. Imports no torch.

A run checkpoint is complete when every island has told the coordinator that it keeps its part, and
can be resumed when the syncer's part, its pin, is whole too. Of islands that keep their checkpoints
on this machine the parts are looked at as well; the others' own commands do that.

Source: PROTOCOL.md, "Resume".
"""

from __future__ import annotations

import logging
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from diloco.checkpoint.checkpoints import found_directory, verify
from diloco.checkpoint.mirror import Mirror
from diloco.checkpoint.stores import StorePart, assigned_parts
from diloco.config.classes import fingerprint, identity_difference, identity_json
from diloco.config.load import load_config, resolved_toml
from diloco.config.schema import Config
from diloco.coordinator.journal import Journal
from diloco.durable import DiskFull, write_durably
from diloco.errors import ConfigError
from diloco.launch.process.disk_full_retry import retry_disk_full
from diloco.launch.process.progress import progress_bar
from diloco.objects.lease import is_of_store
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectStore
from diloco.outer.fragments import Plan
from diloco.protocol.run.assignment import FragmentAssignment
from diloco.protocol.run.candidates import newest_first
from diloco.protocol.run.claims import Claims
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.terms import terms_of
from diloco.state_dir import ONLY_SYNCER, StateDir
from diloco.versions.pins import pin_directory, pinned_steps, verify_pin
from diloco.versions.record import RecordInvalid, fragment_directory

logger = logging.getLogger(__name__)

START = "diloco coordinator RUN.toml"
RESUME = f"{START} --resume"
#: Syncers of which an object store is asked at once; each takes several round trips.
_LOOKS_AT_ONCE = 16


@contextmanager
def open_journal(
    path: Path, *, waits_for_room: bool = False, replica: Replica | None = None
) -> Iterator[Journal]:
    """Open a run's journal, and close it in the end; even to be read it needs room on the disk.

    `replica` is where its transactions are before they are here; None: nowhere else.

    Raises:
        ConfigError: If the file is not a journal, or damaged, which may be found at any time while
            it is open, or if the disk is full and room is not waited for.
    """
    journal = Journal(path, replica)
    try:
        try:
            if waits_for_room:
                retry_disk_full("the journal", journal.open, time.sleep)
            else:
                journal.open()
        except DiskFull as error:
            raise ConfigError(
                f"cannot open the journal {path}: {error}. Make room on its disk, then give the "
                f"command again"
            ) from error
        yield journal
    except sqlite3.DatabaseError as error:
        raise _unreadable(path, error) from error
    finally:
        journal.close()


def read_membership(config: Config, journal: Journal) -> Membership:
    """Make a run's membership with all that its open journal remembers.

    Raises:
        ConfigError: If the journal is damaged.
    """
    membership = Membership(
        run=config.run.name,
        islands=tuple(sorted(config.islands)),
        identity_json=identity_json(config),
        identity_difference=identity_difference,
        inner_steps=config.run.inner_steps,
        num_checkpoints=config.checkpoint.keep,
        claims=Claims(config.max_islands, config.islands) if config.outer.is_on_arrival else None,
        assignment=FragmentAssignment(config.syncer_shares),
    )
    membership.members.rules = terms_of(config).rules
    try:
        membership.apply(journal.entries().items())
    except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
        path = StateDir(Path(config.coordinator.state_dir)).journal
        raise _unreadable(path, error) from error
    return membership


def membership_of(config: Config) -> Membership | None:
    """Read what the run's coordinator has noted, once it has ended; None if it noted nothing.

    Raises:
        ConfigError: If its journal is damaged.
    """
    state = StateDir(Path(config.coordinator.state_dir))
    if not state.journal.exists():
        return None
    with open_journal(state.journal) as journal:
        return read_membership(config, journal)


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot read the journal {path}: {error}. Bring it back from a copy; or have it made "
        f"again from what is left (diloco repair {path.parent}); or start again in "
        f"another directory, from a checkpoint of this run if there is one: {START} --set "
        f"coordinator.state_dir=DIRECTORY --set run.warm_start=CHECKPOINT"
    )


def check_run(state: StateDir, *, start: str = START) -> None:
    """Refuse to resume where no run was ever coordinated; `start` is what to type to begin one.

    Raises:
        ConfigError: If there is neither a journal nor a store.
    """
    if not state.journal.exists() and not any(state.root.glob("syncer*/plan.json")):
        raise ConfigError(
            f"--resume: there is no run in coordinator.state_dir = {state.root}. Start one with "
            f"{start}, or give the directory that holds yours"
        )


def check_same_run(config: Config, state: StateDir, ways_out: str) -> None:
    """Refuse a state directory that holds the run of another file; `ways_out` is what to do then.

    Raises:
        ConfigError: Naming the run that is there, and what differs.
    """
    if not state.resolved.exists():
        return
    try:
        there = load_config(state.resolved)
    except ConfigError as error:
        _resolve_again(config, state, error)
        return
    differing = identity_difference(identity_json(config), identity_json(there))
    here, others = (", ".join(each.syncer_shares) for each in (config, there))
    if here != others:  # each fragment stays where it is
        differing.append(f"coordinator.num_syncers, [syncers]: {here} here, {others} there")
    if differing:
        raise ConfigError(
            f"coordinator.state_dir = {config.coordinator.state_dir} holds the run "
            f"{there.run.name!r} (there), which this file (here) does not describe:\n  "
            + "\n  ".join(differing)
            + f"\n{ways_out}"
        )


def _resolve_again(config: Config, state: StateDir, problem: ConfigError) -> None:
    """Write the configuration of a run again that cannot be read, where the file is that run's.

    Raises:
        ConfigError: If nothing says that it is.
    """
    try:
        noted = state.fingerprint.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        noted = ""
    stores = {path.parent.name for path in state.root.glob(f"{ONLY_SYNCER}*/epoch.json")}
    expected = {each.syncer_name for each in state.of_syncers(config.own_syncers)}
    if noted != fingerprint(config) or not stores <= expected:
        raise ConfigError(
            f"{state.resolved}, which says what the run in coordinator.state_dir is, is damaged, "
            f"and {state.fingerprint} does not say that it is the run of this file. Give the file "
            f"that the run was started with, as it was, and it is made again; or bring "
            f"{state.resolved.name} back from a copy (diloco backup); or give this run another "
            f"coordinator.state_dir. What is wrong with it: {problem}"
        ) from problem
    logger.error(
        "%s is damaged, and written again as the run file has it, which is of the same run by its "
        "fingerprint: %s",
        state.resolved, problem,
    )  # fmt: skip
    write_durably(state.resolved, [resolved_toml(config).encode()])


def choose_checkpoint(
    config: Config,
    state: StateDir,
    membership: Membership,
    at_step: int | None,
    announce: Callable[[str], None],
    *,
    start: str = START,
) -> int | None:
    """Choose what to resume: the newest complete checkpoint that is whole, or the one asked for.

    One that was judged bad only where there is no other. None before there is any, of a run that
    has neither ended nor been stopped: it goes on where it was, with what is published.

    Args:
        config: The run, with the islands' `checkpoint.dir` on this machine.
        state: The run's state directory.
        membership: With the journal's entries applied.
        at_step: Inner step of the checkpoint asked for; None takes the newest.
        announce: Called with what was found, skipped and taken.
        start: What to type to start the run; to resume it, ``--resume`` and ``--at STEP`` are put
            behind it.

    Returns:
        The inner step of the checkpoint, or None.

    Raises:
        ConfigError: If the run has ended without a checkpoint, has finished and no step was asked
            for, if there is no such checkpoint, or none is whole.
    """
    complete = membership.checkpoints
    _check_complete(state, membership, at_step, start)
    if not complete:
        last = membership.cuts.last(membership.timeline)
        announce(
            "every island has written its part of the stop's checkpoint: it is completed first, "
            "and the run stops; then resume it"
            if last is not None and last.is_taken
            else "no checkpoint is complete yet: the run goes on from what it has published"
        )
        return None
    announce(_found_text(state, membership))
    plan = Plan.from_json(membership.plan_json)
    torn: dict[int, str] = {}
    candidates = membership.candidates
    for step in newest_first(complete, candidates) if at_step is None else [at_step]:
        if words := candidates.problem(step):
            announce(f"warning: the checkpoint of {membership.checkpoint_name(step)}: {words}")
        problem = next(_problems(config, state, plan, step, membership, announce), "")
        if not problem:
            announce(
                f"resuming from the checkpoint of {membership.checkpoint_name(step)}, now timeline "
                f"{membership.timeline + 1}; what was published after it is abandoned"
                f"{_missing_text(membership, step)}"
            )
            return step
        torn[step] = problem
        if at_step is None:
            announce(
                f"warning: the checkpoint of {membership.checkpoint_name(step)} is torn, skipped: "
                f"{problem}"
            )
    others = [step for step in complete if step not in torn]
    raise ConfigError(
        f"cannot resume the run {membership.run!r}: "
        + "; ".join(
            f"the checkpoint of {membership.checkpoint_name(s)} is torn: {why}"
            for s, why in torn.items()
        )
        + (
            _go_back(others, start)
            or f". diloco repair {state.root} makes torn versions again from what is left: type "
            f"it, then this again. If that does not help: {take_published(state)}"
        )
    )


def choose_good(
    config: Config, state: StateDir, membership: Membership, announce: Callable[[str], None]
) -> int | None:
    """Choose where the run returns to by itself: the newest good checkpoint that is whole.

    None newer than was decided; None where none is whole.
    """
    decided = membership.candidates.pending
    assert decided is not None
    plan = Plan.from_json(membership.plan_json)
    for step in membership.candidates.good(membership.checkpoints):
        if step > decided.to:
            continue
        name = membership.checkpoint_name(step)
        problem = next(_problems(config, state, plan, step, membership, announce), "")
        if not problem:
            announce(
                f"the run returns to the checkpoint of {name} by itself, now timeline "
                f"{membership.timeline + 1}: {decided.why}"
            )
            return step
        announce(f"warning: the checkpoint of {name} is torn, skipped: {problem}")
    return None


def commands_of_islands(config: Config) -> str:
    """Name the commands that start all islands."""
    return "; ".join(f"diloco island RUN.toml --island {name}" for name in sorted(config.islands))


def _check_complete(
    state: StateDir, membership: Membership, at_step: int | None, start: str
) -> None:
    complete, run = membership.checkpoints, f"the run {membership.run!r} in {state.root}"
    if membership.is_finished and (at_step is None or not complete):
        raise ConfigError(
            f"{run} has finished, there is nothing to resume: take its parameters with diloco "
            f"export {state.root}{_go_back(complete, start)}"
        )
    if not complete and (at_step is not None or membership.is_stopped or membership.fatal_reason):
        if membership.is_stopped or membership.fatal_reason:
            way = f"It has ended. {take_published(state)}; or start it again there"
        else:
            way = (
                f"It was neither stopped nor has failed, so it goes on where it was: {start} "
                f"--resume"
            )
        raise ConfigError(
            f"{run} has no complete checkpoint to resume{_partial_text(state, membership)}. {way}. "
            f"checkpoint.every_inner_steps makes checkpoints"
        )
    if at_step is not None and at_step not in complete:
        raise ConfigError(
            f"--at {at_step}: {run} has no complete checkpoint of that inner step"
            f"{_go_back(complete, start)}"
        )


def take_published(state: StateDir) -> str:
    """Say how another run begins with what an ended one has published."""
    return (
        f"Take the newest published parameters (diloco export {shlex.quote(str(state.root))}), and "
        f"start another "
        f"run from them (run.warm_start, in an empty coordinator.state_dir)"
    )


def _missing_text(membership: Membership, step: int) -> str:
    """Name the islands that have no part of a cut: they take what is published."""
    if not membership.rules.is_elastic:
        return ""
    missing = membership.members.keys() - membership.cuts[step].parts.keys()
    return f"; without a part of it: {', '.join(sorted(missing))}" if missing else ""


def _problems(
    config: Config,
    state: StateDir,
    plan: Plan,
    step: int,
    membership: Membership,
    announce: Callable[[str], None],
) -> Iterator[str]:
    """Say what is wrong with the parts of a checkpoint that are on this machine."""
    what = f"verifying the checkpoint of {membership.checkpoint_name(step)}"
    islands = membership.cuts[step].parts if membership.rules.is_elastic else config.islands
    torn: list[str] = []
    parts = assigned_parts(state, plan, membership.assignment)
    if config.syncers:
        with ThreadPoolExecutor(_LOOKS_AT_ONCE, "look") as pool:
            torn += filter(None, pool.map(lambda part: _lacks_pin(config, part, step), parts))
        parts = ()
    for part in parts:
        whose = f"the {part.state.syncer_name}'s part"
        try:
            verify_pin(part.state.store, part, step, progress_bar(f"{what}, {whose}", announce))
        except RecordInvalid as error:
            torn.append(str(error))
    if torn:
        yield "; ".join(torn)
    for island in sorted(islands):
        if (config.checkpoint_dir / island).is_dir():
            try:
                show = progress_bar(f"{what}, island {island}", announce)
                is_cut = membership.rules.is_elastic
                path = found_directory(config.checkpoint_dir, island, step, is_cut=is_cut)
                verify(path, on_progress=show)
            except ConfigError as error:
                if _is_mirrored(config, island, step):
                    announce(f"island {island}: {error}; it will be taken from its mirror")
                else:
                    yield f"island {island}: {error}"


def _lacks_pin(config: Config, part: StorePart, step: int) -> str:
    """Say what a syncer on a machine of its own lacks of a checkpoint; empty: nothing.

    Names and sizes are looked at, in the object store; the syncer verifies what it goes back to.
    """
    state = part.state
    replica = Replica(ObjectStore(config.run.state), state.syncer_name, state.store, is_of_store)
    replica.look()
    pin = pin_directory(Path(), step)
    pinned = (fragment_directory(pin, f.fragment_id).as_posix() for f in part.fragments)
    return next(filter(None, map(replica.lacks, pinned)), "")


def _is_mirrored(config: Config, island: str, step: int) -> bool:
    """Whether the island, which sees this site's files, can take its part from its mirror."""
    if not config.checkpoint.mirror:
        return False
    try:
        Mirror(config.checkpoint.mirror, island).check(step)
        return True
    except Exception as error:  # of as many types as there are file systems
        logger.warning(
            "checkpoint %d of island %s in checkpoint.mirror = %s: %r",
            step, island, config.checkpoint.mirror, error,
        )  # fmt: skip
        return False


def _found_text(state: StateDir, membership: Membership) -> str:
    return (
        f"run {membership.run!r} in {state.root}, timeline {membership.timeline}: complete "
        f"checkpoints of {'cuts' if membership.rules.is_elastic else 'inner steps'} "
        f"{', '.join(map(str, membership.checkpoints))}"
        f"{_partial_text(state, membership)}"
    )


def _partial_text(state: StateDir, membership: Membership) -> str:
    pinned = {step for each in state.syncers for step in pinned_steps(each.store)}
    steps = sorted(pinned.difference(membership.checkpoints))
    listed = ", ".join(map(str, steps))
    return f"; begun, but not complete on every island: {listed}" if steps else ""


def _go_back(steps: Sequence[int], start: str) -> str:
    commands = " or ".join(f"{start} --resume --at {step}" for step in steps)
    return f"; to go back: {commands}" if commands else ""
