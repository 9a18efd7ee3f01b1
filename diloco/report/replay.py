"""`diloco replay`: makes a run's versions again from its journal and its store, offline.

Source: PROTOCOL.md, "Audit log".
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from diloco.checkpoint.stores import read_plan, state_by_fragment
from diloco.config.load import load_config
from diloco.coordinator.journal import AuditRow, Journal
from diloco.errors import ConfigError
from diloco.outer.fragments import Plan
from diloco.state_dir import Held, StateDir, hold, read_timeline
from diloco.system import usable_cpus
from diloco.versions.replay import FragmentReplay, Replayed


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of computing a run's versions again, and the rest of its audit log, in order.

    `keeps_all`: the run keeps what every version is made of, so that none may be unknown.
    """

    versions: tuple[Replayed, ...]
    audit_log: tuple[AuditRow, ...]
    keeps_all: bool


def replay_run(
    state: StateDir,
    *,
    fragment: int | None = None,
    first: int = 1,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Replay:
    """Make the versions of a run that nobody serves again; changes nothing.

    Args:
        state: The run's state directory.
        fragment: Only of this one; None: of all.
        first: The first version of each fragment that is asked for.
        on_progress: Told (what, versions looked at, versions to look at).

    Raises:
        ConfigError: If there is no store, no such fragment, or a syncer serves the store.
    """
    holding = state.syncers
    if (plan := read_plan(state)) is None:
        raise ConfigError(
            f"{state.root} holds no records (there is no {holding[0].plan}): give the run file, or "
            "the coordinator.state_dir of a run that was started"
        )
    last = len(plan.fragments) - 1
    if fragment is not None and not 0 <= fragment <= last:
        raise ConfigError(
            f"--fragment {fragment}: the run has fragments 0 to {last}: diloco replay "
            f"{state.root} --fragment {last}"
        )
    try:
        with contextlib.ExitStack() as held:
            for each in holding:
                held.enter_context(hold(each.store_lock))
            return _replayed(state, plan, fragment, first, on_progress)
    except Held as error:
        raise ConfigError(
            f"the store of {state.root} is in use: {error}. Replay a copy of it: diloco backup "
            "HOST:PORT DIRECTORY, then diloco replay DIRECTORY; or stop the run first"
        ) from error


def _replayed(
    state: StateDir,
    plan: Plan,
    fragment: int | None,
    first: int,
    on_progress: Callable[[str, int, int], None],
) -> Replay:
    headers, entries = _read_journal(state)
    stored = state_by_fragment(state, plan)
    config = load_config(state.resolved)
    replays = [
        FragmentReplay(
            stored[p].store,
            plan,
            p,
            indexed=headers,
            timeline=read_timeline(stored[p].store_timeline).number,
        )
        for p in (range(len(plan.fragments)) if fragment is None else [fragment])
    ]
    total = sum(max(0, replay.newest - first + 1) for replay in replays)
    versions: list[Replayed] = []
    for replay in replays:
        for each in replay.run(first, num_threads=usable_cpus()):
            versions.append(each)
            on_progress("making versions again", min(len(versions), total), total)
    keeps_all = config.outer.keep_contributions == "all"
    return Replay(tuple(versions), entries, keeps_all)


def _read_journal(state: StateDir) -> tuple[list[dict[str, object]], tuple[AuditRow, ...]]:
    """Read what the coordinator has indexed; nothing where its journal is on another machine."""
    if not state.journal.is_file():
        return [], ()
    journal = Journal(state.journal)
    journal.open()
    try:
        return [json.loads(header) for header in journal.headers()], tuple(journal.audit_rows())
    finally:
        journal.close()
