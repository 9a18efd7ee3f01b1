"""Moves a fragment from the store of one syncer to that of another, by way of the object store.

    fragment-0003/let-go.json    the timeline in which the first syncer let go of it, in its store
    fragments.json               of each store: the fragments that its syncer serves
    moved/fragment-0003/         what the second one has taken so far, no part of its store

A fragment is served by whose `fragments.json` names it, as the object store has that file: the
first syncer removes it there, or the coordinator does where that one is lost, whose later writes
the chain then refuses; only then does the second one read. It names the fragment in its own file
once all of it is in its own chain. Killed at any instruction, each step is done again. An entry of
the chain that was not acknowledged may have been read: what is tried again writes nothing before it
that would take it back.

Nothing here decides that a fragment moves.

Source: PROTOCOL.md, "Moves of fragments".
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco import durable
from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.objects.lease import is_of_store, store_replica
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectStore
from diloco.outer.fragments import Fragment
from diloco.state_dir import StateDir, Timeline, read_timeline
from diloco.transport.units import format_bytes
from diloco.versions.pins import pin_directory, pinned_steps, restore
from diloco.versions.record import RecordInvalid, fragment_directory

logger = logging.getLogger(__name__)

_LET_GO = "let-go.json"
_ASKED = ".asked"


@dataclass(frozen=True, slots=True)
class _One:
    """A plan of one fragment."""

    fragments: tuple[Fragment, ...]


def served_from(store: ObjectStore, state: StateDir) -> list[int] | None:
    """Read which fragments a syncer serves, as the object store has it; None: it has none of it.

    Raises:
        ObjectLost: If objects are gone.
        StoreAway: If the store does not answer.
    """
    replica = Replica(store, state.syncer_name, state.store, is_of_store)
    replica.look()
    return _served(replica, state)


def let_go(state: StateDir, fragment_ids: Collection[int]) -> None:
    """Serve some fragments no more, durably; nothing of them may be written any more.

    Raises:
        DiskFull: If there is no room for it: they are served as before.
    """
    timeline = read_timeline(state.store_timeline).number
    for p in fragment_ids:
        directory = fragment_directory(state.store, p)
        if durable.read_json(directory / _LET_GO) != timeline:
            durable.make_directory_durably(directory)
            durable.write_json(directory / _LET_GO, timeline)
    own = durable.read_json(state.fragments) or []
    durable.write_json(state.fragments, [p for p in own if p not in fragment_ids])
    logger.info("fragments %s are let go of, timeline=%d", sorted(fragment_ids), timeline)


def was_let_go(state: StateDir, fragment_id: int) -> bool:
    """Whether a fragment was let go of here, and not taken back since."""
    return (fragment_directory(state.store, fragment_id) / _LET_GO).exists()


def let_go_for_lost(
    store: ObjectStore, state: StateDir, lease: int, run: str, assigned: Collection[int]
) -> None:
    """Have a syncer that is lost for good serve no fragment, nor write anything any more.

    One that never began has let go of those that it was `assigned`.

    Raises:
        Fenced: If another coordinator has taken the run over.
        StoreAway: If the store does not answer.
    """
    with tempfile.TemporaryDirectory() as directory:
        there = StateDir(Path(directory), state.syncer_name, state.syncer_id)
        replica = store_replica(store, there, lease, run)
        durable.make_directory_durably(there.store)
        contents = replica.contents([there.fragments.name, there.store_timeline.name])
        for name, content in contents.items():
            durable.write_durably(there.store / name, [content])
        served = _served(replica, there)
        let_go(there, assigned if served is None else served)
        replica.adopt()


def take(
    store: ObjectStore, state: StateDir, fragment: Fragment, source: str, timeline: Timeline
) -> bool:
    """Have a fragment in this store with its versions and pins; false: it was not let go of yet.

    It is not served before `serve`. What was fetched before a failure is not fetched again, unless
    the disk is full.

    Args:
        store: Where the chains are.
        state: As the syncer sees it that takes it.
        fragment: Of the run's plan.
        source: Name of the syncer's chain that has it.
        timeline: Of the run, at which the own store is; an older one is taken back to its start.

    Raises:
        ConfigError: If objects are gone, the disk has no room for the fragment, or the pin that
            the timeline began from is not whole.
        DiskFull: If there is no room for it, or the object store does not answer.
    """
    p = fragment.fragment_id
    staging = fragment_directory(state.moved, p)
    replica = Replica(store, source, staging, is_of_store)
    replica.look()
    served = _served(replica, state)
    if served is None or p in served:
        return False
    durable.make_directory_durably(staging)
    num_bytes = _fetch(replica, p)
    directory = fragment_directory(staging, p)
    if (let_go_in := durable.read_json(directory / _LET_GO)) is None:
        raise ConfigError(f"{source} does not serve fragment {p}, nor did it let go of it")
    durable.unlink(directory / _LET_GO)
    if let_go_in < timeline.number:
        try:
            step = timeline.resume_step
            restore(staging, _One((fragment,)), step=step, abandoned_timeline=let_go_in)
        except RecordInvalid as error:
            raise ConfigError(
                f"fragment {p} of {source} cannot be taken back to checkpoint {step}: {error}. "
                f"Resume an older one: diloco coordinator RUN.toml --resume --at CHECKPOINT"
            ) from error
    forget(state, p)
    there = (path for path in staging.rglob("*") if path.is_file() and path.suffix != ".tmp")
    for path in sorted(there):
        target = state.store / path.relative_to(staging)
        durable.make_directory_durably(target.parent)
        durable.rename(path, target)
        durable.sync_directory(target.parent)
    durable.remove_tree(staging)
    logger.info("fragment %d taken from %s, bytes=%d", p, source, num_bytes)
    return True


def serve(state: StateDir, fragment_ids: Iterable[int], granted: Mapping[str, int]) -> None:
    """Serve fragments that were taken, too, from the next start on; durable when this returns.

    `granted` is the newest start of each island: one that the other syncer has fenced is fenced.

    Raises:
        DiskFull: If there is no room for it.
    """
    known = durable.read_json(state.incarnations) or {}
    newest = {i: n for i, n in granted.items() if n > known.get(i, 0)}
    if newest:
        durable.write_json(state.incarnations, {**known, **newest})
    own = {*(durable.read_json(state.fragments) or []), *fragment_ids}
    durable.write_json(state.fragments, sorted(own))


def stored_fragments(state: StateDir) -> set[int]:
    """Fragments of which a store has anything."""
    return {int(path.name.rpartition("-")[2]) for path in state.store.glob("fragment-*")}


def forget(state: StateDir, fragment_id: int) -> None:
    """Remove what a store has of a fragment that its syncer does not serve."""
    pins = (pin_directory(state.store, step) for step in pinned_steps(state.store))
    there = (fragment_directory(each, fragment_id) for each in (state.store, *pins))
    for directory in filter(Path.exists, there):
        durable.remove_tree(directory)
        durable.sync_directory(directory.parent)


def _fetch(replica: Replica, fragment_id: int) -> int:
    """Fetch what is not here of a fragment; it takes no room from those that are served here.

    Raises:
        ConfigError: If there is less room than it needs.
        DiskFull: If that was taken meanwhile, or the object store does not answer.
    """

    def is_wanted(name: str) -> bool:
        return _belongs(Path(name), fragment_id)

    needed, free = replica.lacking_bytes(only=is_wanted), shutil.disk_usage(replica.root).free
    if needed > free:
        raise ConfigError(
            f"it has {format_bytes(needed)}, and {format_bytes(free)} are free below "
            f"{replica.root}: make room"
        )
    try:
        return replica.fetch_all(only=is_wanted)
    except DiskFull as error:
        if error.is_room:
            durable.remove_tree(replica.root)
        raise


def _served(replica: Replica, state: StateDir) -> list[int] | None:
    found = replica.contents([state.fragments.name])
    return next((list(json.loads(content)) for content in found.values()), None)


def _belongs(path: Path, fragment_id: int) -> bool:
    """Whether a file of a store is one of a fragment, or says who asked for a pin."""
    name = fragment_directory(Path(), fragment_id).name
    is_pinned = path.parts[0] == "pins" and (path.suffix == _ASKED or path.parts[2:3] == (name,))
    return path.parts[0] == name or (is_pinned and path.parts[1].startswith("step-"))
