"""Detects a store whose journal was lost, and makes the journal again.

`check_journal` keeps a coordinator from founding the run a second time next to what is left of
it; `rebuild_journal` is what `diloco repair` does of it.

Source: PROTOCOL.md, "Lost journal".
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco.checkpoint.checkpoints import found_directory, read_manifest, written_steps
from diloco.checkpoint.run_checkpoints import read_membership
from diloco.checkpoint.stores import known_plan
from diloco.config.schema import Config
from diloco.coordinator.journal import AuditEntry, Journal
from diloco.durable import read_json, rename
from diloco.errors import ConfigError, PlanMismatch
from diloco.outer.fragments import Plan
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.run.cuts import Part as CutPart
from diloco.protocol.run.rebuilt import Remains, entries_of
from diloco.state_dir import ONLY_SYNCER, StateDir, read_timeline
from diloco.versions.frames import KEPT, headers_in
from diloco.versions.pins import pin_directory, pinned_steps

logger = logging.getLogger(__name__)

#: What a run's founding leaves in a store.
_FOUNDED = ("fragment-*/v*", "pins/step-*", "incarnations.json", "timeline.json")


def check_journal(state: StateDir, journal: Journal) -> None:
    """Refuse to found a run next to a store that has been served, or next to that of another run.

    Raises:
        ConfigError: If the journal is empty and a store is not, or if they are of two runs; says
            what can be made again, and the command.
    """
    entries = journal.entries()
    stores = [
        each.store
        for each in state.own_syncers
        if any(next(each.store.glob(pattern), None) for pattern in _FOUNDED)
    ]
    if stores and journal.is_empty:
        where = ", ".join(map(str, stores))
        raise ConfigError(
            f"the journal {state.journal} is missing or empty, and {where} holds a run: started "
            f"so, its islands would begin at inner step 0 and its checkpoints be written over. "
            f"Bring {state.journal.name} back from a copy of that day (diloco backup), or: diloco "
            f"repair {state.root} makes it again from what the store holds, its pins and the "
            f"islands' checkpoints, and says what cannot be known; nothing is lost that was "
            f"published. A new run needs a coordinator.state_dir of its own"
        )
    there = None
    try:
        there = known_plan(state) if stores else None
    except PlanMismatch as error:
        if "plan" not in entries:
            raise
        logger.error("the syncer gets the plan again at its next start: %s", error)
    if there is not None and "plan" in entries and there.to_json() != entries["plan"]:
        raise ConfigError(
            f"the journal {state.journal} and the store {stores[0]} are of two runs: their plans "
            f"differ. One of them is a copy from elsewhere: bring back the other"
        )


def rebuild_journal(state: StateDir, config: Config, plan: Plan, *, unix_s: float) -> str:
    """Make an empty journal again from what is left of the run; returns in words what it says.

    The caller holds the stores.

    Args:
        state: The run's state directory.
        config: The run's configuration.
        plan: The run's plan.
        unix_s: Now, by the wall clock.

    Raises:
        DiskFull: If there is no room; the journal is empty then.
    """
    remains = _remains(state, config, plan, unix_s)
    rounds = [
        (h["timeline"], h["fragment_id"], h["version"], json.dumps(h, sort_keys=True))
        for h in remains.headers
    ]
    said = _said(remains)
    journal = Journal(state.journal)
    journal.open()
    try:
        told = AuditEntry("repair", f"journal at {unix_s:.0f}", json.dumps({"what": said}))
        journal.write(entries_of(remains), rounds, [told])
    finally:
        journal.close()
    return said


def has_journal(state: StateDir, config: Config) -> bool:
    """Whether a run's journal is there, and says anything; a damaged one is set aside."""
    if not state.journal.exists():
        return False
    journal = Journal(state.journal)
    try:
        journal.open()
        journal.check()
        if not journal.is_empty:
            read_membership(config, journal)
            return True
        return False
    except (sqlite3.DatabaseError, ConfigError) as error:
        logger.error("%s is damaged and set aside: %s", state.journal, error)
    finally:
        journal.close()
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            rename(Path(f"{state.journal}{suffix}"), Path(f"{state.journal}.damaged{suffix}"))
    return False


def _remains(state: StateDir, config: Config, plan: Plan, unix_s: float) -> Remains:
    syncers = state.syncers
    headers = {
        (h["timeline"], h["fragment_id"], h["version"]): h for h in _headers(syncers)
    }  # of a version that is there twice, either
    orders = [_orders(each) for each in syncers]
    newest = max(orders, key=lambda each: each.policy_revision)
    rosters = [each.roster for each in orders if each.roster is not None]
    timeline = max(
        (read_timeline(p) for p in (state.timeline, *(s.store_timeline for s in syncers))),
        key=lambda each: each.number,
    )
    pins = set.intersection(*(set(pinned_steps(each.store)) for each in syncers))
    return Remains(
        plan_json=plan.to_json(),
        islands=tuple(sorted(config.islands)),
        is_elastic=config.outer.is_on_arrival,
        headers=tuple(headers[key] for key in sorted(headers)),
        unix_s=unix_s,
        assigned=()
        if syncers[0].syncer_name == ONLY_SYNCER
        else tuple(tuple(_read(each.fragments) or ()) for each in syncers),
        incarnations=_most(_read(each.incarnations) or {} for each in syncers),
        fenced=_most(roster.fenced for roster in rosters),
        timeline=timeline.number,
        resume_step=timeline.resume_step,
        pins=tuple(sorted(pins)),
        parts={step: _parts(config, step, len(plan.fragments)) for step in pins},
        policy=json.loads(newest.policy_json or "{}"),
        policy_revision=newest.policy_revision,
        generation=max((roster.generation for roster in rosters), default=0),
        is_paused=any(roster.is_paused for roster in rosters),
        num_slots=config.max_islands,
    )


def _headers(syncers: tuple[StateDir, ...]) -> Iterator[Mapping[str, Any]]:
    """Read the headers of all versions of which a store has anything."""
    for each in syncers:
        for step in pinned_steps(each.store):
            for directory in sorted(pin_directory(each.store, step).glob("fragment-*")):
                yield from headers_in(directory)
        for directory in sorted(each.store.glob("fragment-*")):
            yield from headers_in(directory / KEPT)
            yield from headers_in(directory)


def _orders(state: StateDir) -> Orders:
    with contextlib.suppress(KeyError, TypeError):
        if content := _read(state.orders):
            return Orders.from_json(content)
    return Orders()


def _read(path: Path) -> Any:
    """Read JSON values; None where they are missing or damaged, which another finding says."""
    try:
        return read_json(path)
    except ValueError:
        return None


def _most(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    most: dict[str, int] = {}
    for each in counters:
        for island, number in each.items():
            most[island] = max(number, most.get(island, 0))
    return most


def _parts(config: Config, step: int, num_fragments: int) -> dict[str, CutPart]:
    """Read whose parts of a run checkpoint are on this machine; their files are not verified."""
    parts = {}
    for directory in sorted(config.checkpoint_dir.glob("*")):
        island = directory.name
        if directory.is_dir() and step in written_steps(config.checkpoint_dir, island):
            try:
                manifest = read_manifest(found_directory(config.checkpoint_dir, island, step))
                versions, inner_step = tuple(manifest["versions"]), int(manifest["inner_step"])
            except (ConfigError, KeyError):
                continue
            if len(versions) == num_fragments:
                parts[island] = CutPart(inner_step, versions, manifest.get("text", {}))
    return parts


def _said(remains: Remains) -> str:
    """Say what a rebuilt journal knows, and what it does not."""
    steps = remains.inner_steps
    where = ", ".join(f"{i} at inner step {steps.get(i, 0)}" for i in remains.known_incarnations)
    kind = "cuts" if remains.is_elastic else "inner steps"
    complete = ", ".join(map(str, remains.checkpoints)) or "none of which all parts are here"
    return (
        f"made again: {len(remains.headers)} versions, timeline {remains.timeline}, {where}; "
        f"checkpoints of {kind}: {complete}. Starts from now on have incarnations from "
        f"{remains.first_incarnation} on, earlier ones are fenced: start every island again. Not "
        f"known: who was kicked (diloco kick) or revoked (diloco certs revoke), versions of which "
        f"no header is left"
        + (", text that was drawn since the newest cut: it is drawn again" * remains.is_elastic)
    )
