"""Moves a fragment from the store of one syncer to that of another, by way of the object store.

    fragment-0003/let-go.json    the timeline in which the first syncer let go of it, in its store
    fragments.json               of each store: the fragments that its syncer serves
    moved/fragment-0003/         in the store of the second one: what it has copied so far
    withdrawn.json               of each store: moves that its syncer does not make any more

A fragment is served by whose `fragments.json` names it, as the object store has that file. The
second syncer copies what there is of it while the first one serves it, again and again, and what it
has copied is in its own chain, too: all that is left to do once the first one has let go is to copy
what came last, and to give the files their names. The first syncer removes the fragment from its
own file, or the coordinator does where that one is lost, whose later writes the chain then refuses;
only then does the second one take it, and name it in its file. Killed at any instruction, each step
is done again. An entry of the chain that was not acknowledged may have been read: what is tried
again writes nothing before it that would take it back.

Nothing here decides that a fragment moves.

Source: PROTOCOL.md, "Moves of fragments".
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco import durable
from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.objects.lease import is_of_store, store_replica
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectStore
from diloco.objects.stored_file import StoredFile
from diloco.outer.fragments import Fragment
from diloco.state_dir import StateDir, Timeline, read_timeline
from diloco.transport.units import format_bytes
from diloco.versions.pins import pin_directory, pinned_steps, restore, restore_fragments
from diloco.versions.record import RecordInvalid, fragment_directory

logger = logging.getLogger(__name__)

_LET_GO = "let-go.json"
_ASKED = ".asked"
#: A copy that takes so many seconds has brought little, whatever there was of it.
_LITTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class _One:
    """A plan of one fragment."""

    fragments: tuple[Fragment, ...]


class CopyStopped(Exception):
    """The fragment is not to be copied any more."""


class SyncerFiles:
    """What a syncer's store says of moves, as the object store has it; read again, what is new."""

    def __init__(self, store: ObjectStore, state: StateDir) -> None:
        """Assign only."""
        self._state = state
        said = {state.fragments.name, state.withdrawn.name}
        self._replica = Replica(
            store, state.syncer_name, state.store, is_of_store, reads=said.__contains__
        )

    def read(self) -> tuple[list[int] | None, dict[int, int]]:
        """Read which fragments the syncer serves, and which moves it does not make any more.

        Returns:
            The fragments; None: it has none of it. And the withdrawn moves: fragment -> number.

        Raises:
            ObjectLost: If objects are gone.
            StoreAway: If the store does not answer.
        """
        self._replica.look()
        found = self._replica.contents([self._state.withdrawn.name])
        withdrawn = {int(p): n for each in found.values() for p, n in json.loads(each).items()}
        return _served(self._replica, self._state), withdrawn


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


def withdrawn(state: StateDir) -> dict[int, int]:
    """Moves to a syncer that it does not make any more: fragment -> number of a later one."""
    return {int(p): int(n) for p, n in (durable.read_json(state.withdrawn) or {}).items()}


def withdraw(state: StateDir, moves: Mapping[int, int]) -> None:
    """Say durably that no move of some fragments before these is made here.

    Raises:
        DiskFull: If there is no room for it: they may be made.
    """
    known = withdrawn(state)
    later = {p: number for p, number in moves.items() if number > known.get(p, 0)}
    if later:
        durable.write_json(state.withdrawn, known | later)
        logger.info("fragments %s are not taken here", sorted(later))


def let_go_for_lost(
    store: ObjectStore, state: StateDir, lease: int, run: str, assigned: Collection[int]
) -> None:
    """Have a syncer that is lost for good serve what it was `assigned` no more, nor write anything.

    Others that it has taken, while nobody knows it yet, it has still: they are newest there. One
    that never began has let go of all.

    Raises:
        Fenced: If another coordinator has taken the run over.
        StoreAway: If the store does not answer.
    """

    def change(there: StateDir, served: list[int] | None) -> None:
        let_go(there, [p for p in assigned if served is None or p in served])

    _for_lost(store, state, lease, run, change)


def withdraw_for_lost(
    store: ObjectStore, state: StateDir, lease: int, run: str, moves: Mapping[int, int]
) -> None:
    """Have a syncer that is silent make no move of some fragments before these, as `withdraw`.

    What it has taken already it serves. It writes nothing any more before it starts again.

    Raises:
        Fenced: If another coordinator has taken the run over.
        StoreAway: If the store does not answer.
    """
    _for_lost(store, state, lease, run, lambda there, served: withdraw(there, moves))


def _for_lost(
    store: ObjectStore,
    state: StateDir,
    lease: int,
    run: str,
    change: Callable[[StateDir, list[int] | None], None],
) -> None:
    """Change small files of a store as the newest writer of its chain, which fences the others."""
    with tempfile.TemporaryDirectory() as directory:
        there = StateDir(Path(directory), state.syncer_name, state.syncer_id)
        replica = store_replica(store, there, lease, run)
        durable.make_directory_durably(there.store)
        names = there.fragments.name, there.store_timeline.name, there.withdrawn.name
        for name, content in replica.contents(names).items():
            durable.write_durably(there.store / name, [content])
        change(there, _served(replica, there))
        replica.adopt()


class FragmentCopy:
    """The copy of a fragment that its second syncer makes out of the chain of the first one.

    Its calls block, one thread at a time; what it says of itself any other may read.

    Attributes:
        copied_bytes: That are here, of `total_bytes` at the last look.
        is_let_go: Whether the last look found that the first syncer has let go of it.
        is_ready: Whether the last `copy` has brought little, so that little is lacking now.
    """

    def __init__(
        self, store: ObjectStore, state: StateDir, fragment: Fragment, source: str
    ) -> None:
        """Assign only.

        Args:
            store: Where the chains are.
            state: As the syncer sees it that takes the fragment.
            fragment: Of the run's plan.
            source: Name of the syncer's chain that has it.
        """
        self._state, self._fragment, self._source = state, fragment, source
        self._staging = fragment_directory(state.moved, fragment.fragment_id)
        served = state.fragments.name
        self._replica = Replica(
            store,
            source,
            self._staging,
            is_of_store,
            reads=lambda name: name == served or self._is_wanted(name),
        )
        self._whole: dict[str, StoredFile] | None = None  # what the last `copy` has made whole
        self._is_stopped = threading.Event()
        self.copied_bytes = self.total_bytes = 0
        self.is_let_go = self.is_ready = False

    def stop(self) -> None:
        """Have `copy` end soon, if it is under way, with `CopyStopped`; any thread."""
        self._is_stopped.set()

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped."""
        return self._is_stopped.is_set()

    def copy(self) -> bool:
        """Copy what there is of the fragment, and is not here; whether it was let go of before.

        What has expired there is removed here. What was copied before a failure is not copied
        again, unless the disk is full.

        Raises:
            ConfigError: If objects are gone, or the disk has no room for the fragment.
            CopyStopped: If it is not to be copied any more.
            DiskFull: If there is no room for it, or the object store does not answer.
        """
        began = time.monotonic()
        self._on_piece(0)
        self._replica.look()
        served = _served(self._replica, self._state)
        is_let_go = served is not None and self._fragment.fragment_id not in served
        self.is_let_go = is_let_go
        if (wanted := self._replica.files(only=self._is_wanted)) == self._whole:
            self.is_ready = True
            return is_let_go
        self._whole = None
        self._link(wanted)
        self._look_for_room(wanted)
        num_bytes = self._fetch()
        self._whole = self._replica.files(only=self._is_wanted)
        largest = max((file.num_bytes for file in self._whole.values()), default=0)
        self.is_ready = num_bytes <= largest or time.monotonic() - began <= _LITTLE_S
        return is_let_go

    def take(self, timeline: Timeline) -> None:
        """Have the fragment in this store with its versions and pins; not served before `serve`.

        Once `copy` has returned that it was let go of.

        Args:
            timeline: Of the run, at which the own store is; an older one is taken back to its
                start.

        Raises:
            ConfigError: If the pin that the timeline began from is not whole.
            DiskFull: If there is no room for it, or the object store does not answer.
        """
        p, staging = self._fragment.fragment_id, self._staging
        let_go_in = durable.read_json(fragment_directory(staging, p) / _LET_GO)
        if let_go_in is None:
            raise ConfigError(f"{self._source} does not serve fragment {p}, nor did it let go")
        self._whole = None
        durable.unlink(fragment_directory(staging, p) / _LET_GO)
        _to_timeline(staging, self._fragment, timeline, let_go_in, restore, self._source)
        forget(self._state, p)
        there = (path for path in staging.rglob("*") if path.is_file() and path.suffix != ".tmp")
        for directory, paths in itertools.groupby(sorted(there), lambda path: path.parent):
            target = self._state.store / directory.relative_to(staging)
            durable.make_directory_durably(target)
            for path in paths:
                durable.rename(path, target / path.name)
            durable.sync_directory(target)
        forget_copy(self._state, p)
        logger.info("fragment %d taken from %s, bytes=%d", p, self._source, self.total_bytes)

    def _is_wanted(self, name: str) -> bool:
        return _belongs(Path(name), self._fragment.fragment_id)

    def _on_piece(self, num_bytes: int) -> None:
        if self._is_stopped.is_set():
            raise CopyStopped
        self.copied_bytes += num_bytes

    def _link(self, wanted: Mapping[str, StoredFile]) -> None:
        """Have here what `take` has given its name already, before it was killed."""
        for name, file in wanted.items():
            own, path = self._state.store / name, self._staging / name
            if not path.exists() and file.is_at(own):
                durable.make_directory_durably(path.parent)
                durable.link(own, path)
                durable.sync_directory(path.parent)

    def _look_for_room(self, wanted: Mapping[str, StoredFile]) -> None:
        """Look for room; what is lacking takes none from the fragments that are served here.

        Raises:
            ConfigError: If there is less than it needs.
        """
        p = self._fragment.fragment_id
        durable.make_directory_durably(self._staging)
        lacking = {n: file for n, file in wanted.items() if not file.is_at(self._staging / n)}
        needed, self.total_bytes = map(_num_bytes, (lacking.values(), wanted.values()))
        self.copied_bytes = self.total_bytes - needed
        begun = {file.unfinished_at(self._staging / name) for name, file in lacking.items()}
        needed -= sum(path.stat().st_size for path in begun if path.exists())
        if needed > (free := shutil.disk_usage(self._staging).free):
            raise ConfigError(
                f"{format_bytes(needed)} are needed and {format_bytes(free)} are free below "
                f"{self._staging}: make room, or move it to another syncer (diloco move HOST:PORT "
                f"--fragments {p} --to NAME)"
            )

    def _fetch(self) -> int:
        try:
            return self._replica.fetch_all(only=self._is_wanted, on_piece=self._on_piece)
        except DiskFull as error:
            if error.is_room:
                forget_copy(self._state, self._fragment.fragment_id)
            raise


def take_back(state: StateDir, fragment: Fragment, timeline: Timeline) -> None:
    """Have a fragment that was let go of here, and that nobody has taken, fit to be served again.

    Args:
        state: Of the syncer that let go of it.
        fragment: Of the run's plan.
        timeline: Of the run, at which the store is; what was let go of in an older one is taken
            back to its start.

    Raises:
        ConfigError: If the pin that the timeline began from is not whole.
        DiskFull: If there is no room for it, or the object store does not answer.
    """
    let_go_in = durable.read_json(fragment_directory(state.store, fragment.fragment_id) / _LET_GO)
    if let_go_in is not None:
        _to_timeline(
            state.store, fragment, timeline, let_go_in, restore_fragments, state.syncer_name
        )


def _to_timeline(
    store: Path,
    fragment: Fragment,
    timeline: Timeline,
    let_go_in: int,
    restore: Callable[..., object],
    name: str,
) -> None:
    """Take a fragment of an older timeline back to where the run's began; else change nothing."""
    if let_go_in >= timeline.number:
        return
    try:
        restore(store, _One((fragment,)), step=timeline.resume_step, abandoned_timeline=let_go_in)
    except RecordInvalid as error:
        raise ConfigError(
            f"fragment {fragment.fragment_id} of {name} cannot be taken back to checkpoint "
            f"{timeline.resume_step}: {error}. Resume an older one: diloco coordinator RUN.toml "
            f"--resume --at CHECKPOINT"
        ) from error


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


def has_not_let_go(state: StateDir, fragment_ids: Iterable[int]) -> None:
    """Remove the mark of fragments that are served here, and were let go of, or nearly so."""
    for path in (fragment_directory(state.store, p) / _LET_GO for p in fragment_ids):
        if path.exists():
            durable.unlink(path)
            durable.sync_directory(path.parent)


def stored_fragments(directory: Path) -> set[int]:
    """Fragments of which a store has anything; or the copies in a directory of one."""
    return {int(path.name.rpartition("-")[2]) for path in directory.glob("fragment-*")}


def forget(state: StateDir, fragment_id: int) -> None:
    """Remove what a store has of a fragment that its syncer does not serve."""
    pins = (pin_directory(state.store, step) for step in pinned_steps(state.store))
    there = (fragment_directory(each, fragment_id) for each in (state.store, *pins))
    _remove(there)


def forget_copy(state: StateDir, fragment_id: int) -> None:
    """Remove what was copied of a fragment that moves."""
    _remove([fragment_directory(state.moved, fragment_id)])


def _remove(directories: Iterable[Path]) -> None:
    for directory in filter(Path.exists, directories):
        durable.remove_tree(directory)
        durable.sync_directory(directory.parent)


def _num_bytes(files: Iterable[StoredFile]) -> int:
    """Add files up; those of the same bytes are one, with several names."""
    return sum({file.digest: file.num_bytes for file in files}.values())


def _served(replica: Replica, state: StateDir) -> list[int] | None:
    found = replica.contents([state.fragments.name])
    return next((list(json.loads(content)) for content in found.values()), None)


def _belongs(path: Path, fragment_id: int) -> bool:
    """Whether a file of a store is one of a fragment, or says who asked for a pin."""
    name = fragment_directory(Path(), fragment_id).name
    is_pinned = path.parts[0] == "pins" and (path.suffix == _ASKED or path.parts[2:3] == (name,))
    return path.parts[0] == name or (is_pinned and path.parts[1].startswith("step-"))
