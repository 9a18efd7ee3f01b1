"""Pins the records that run checkpoints need, and takes a store back to one of these.

    pins/step-000000000120/fragment-0003/v000000000012.record    a hard link to the store's record
    pins/step-000000000120/east.asked                            who asked for it; of cuts nobody
    fragment-0003/abandoned-timeline-0000-after-000000000120/    what a resume left behind
    pins/abandoned-timeline-0000-after-000000000120/step-000000000180/

Where islands merge on arrival a checkpoint is a cut, and its number stands for the inner step.

A pin is whole when it holds exactly one valid record of every fragment that the store has. What a
resume abandons is kept until a checkpoint of the new timeline is complete, or until the next
resume. Torch is not imported, so that a coordinator can choose what to resume. Anyone who calls
this holds the store.

Source: PROTOCOL.md, "Run checkpoints and pins" and "Resume".
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from diloco import durable
from diloco.outer.fragments import Fragment
from diloco.versions.record import (
    RecordInvalid,
    fragment_directory,
    record_path,
    verify,
    version_of,
    versions_in,
)

logger = logging.getLogger(__name__)

_ASKED = ".asked"
_ABANDONED = re.compile(r"abandoned-timeline-\d+-after-(\d{12,})")


class HasFragments(Protocol):
    """A plan, or the part of it that one store has."""

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """Those that the store has."""


def pin_directory(store_dir: Path, step: int) -> Path:
    """Where the pin of the run checkpoint of an inner step is; fragments have directories in it."""
    return store_dir / "pins" / f"step-{step:012d}"


def pinned_steps(store_dir: Path) -> list[int]:
    """Inner steps for which there is a pin, whole or not, ascending."""
    return sorted(int(path.name.removeprefix("step-")) for path in _pins(store_dir).glob("step-*"))


def pinned_version(store_dir: Path, step: int, fragment_id: int) -> int | None:
    """Return the version of a fragment that a pin holds on to, or is about to; None: none."""
    versions = versions_in(fragment_directory(pin_directory(store_dir, step), fragment_id))
    return versions[-1] if versions else None


def note_asked(store_dir: Path, step: int, island: str) -> None:
    """Write durably that an island has asked for the pin of an inner step."""
    path = pin_directory(store_dir, step) / f"{island}{_ASKED}"
    if not path.exists():
        durable.write_durably(path, [])


def asked_for(store_dir: Path, step: int) -> list[str]:
    """Return the islands that have asked for the pin of an inner step, sorted."""
    return sorted(
        path.name.removesuffix(_ASKED) for path in pin_directory(store_dir, step).glob(f"*{_ASKED}")
    )


def valid_pins(store_dir: Path, plan: HasFragments) -> list[int]:
    """Inner steps whose pins are whole, ascending; others are passed over with a warning."""
    valid = []
    for step in pinned_steps(store_dir):
        try:
            verify_pin(store_dir, plan, step)
        except RecordInvalid as error:
            logger.warning("pin skipped, step=%d: %s", step, error)
        else:
            valid.append(step)
    return valid


def verify_pin(
    store_dir: Path,
    plan: HasFragments,
    step: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Read every byte that a pin holds on to; `on_progress` hears (bytes read, bytes to read).

    Raises:
        RecordInvalid: If the pin is not whole; says what is missing or damaged.
    """
    paths = [_pinned_record(store_dir, step, fragment) for fragment in plan.fragments]
    sizes = [0 if path.is_symlink() else path.stat().st_size for path in paths]
    for number, (path, fragment) in enumerate(zip(paths, plan.fragments, strict=True), start=1):
        verify(path, version_of(path), fragment)
        on_progress(sum(sizes[:number]), sum(sizes))


def forget_pins(
    store_dir: Path,
    *,
    complete: Collection[int],
    num_unsure: int,
    asked: Iterable[Sequence[int]] | None = None,
) -> list[int]:
    """Remove the pins that no resume can need, and what a resume abandoned once it is superseded.

    Islands keep their parts by the same rule, so neither outgrows the other; and what one island
    asks for takes nothing from what another has asked for.

    Args:
        store_dir: The store.
        complete: Inner steps of the run checkpoints that are complete: their pins stay.
        num_unsure: Newest pins after the last complete one to keep besides them; at least 1.
        asked: Inner steps that each island has asked for, in that order: of each the last so many
            stay. None: one island has asked for all, in order.

    Returns:
        Inner steps of removed pins that were newer than every complete checkpoint, ascending: they
        were pinned, and never became complete.
    """
    last = max(complete, default=-1)
    pinned = pinned_steps(store_dir)
    unsure = [step for step in pinned if step > last]
    kept = set(complete)
    for steps in [unsure] if asked is None else asked:
        kept.update([step for step in steps if step in unsure][-num_unsure:])
    for step in pinned:
        if step not in kept:
            durable.remove_tree(pin_directory(store_dir, step))
    for aside in store_dir.glob("*/abandoned-*"):
        if (match := _ABANDONED.fullmatch(aside.name)) and last > int(match[1]):
            durable.remove_tree(aside)
    return [step for step in unsure if step not in kept]


def restore(store_dir: Path, plan: HasFragments, *, step: int, abandoned_timeline: int) -> None:
    """Make the pinned version of every fragment its newest; nothing of the run may be served.

    Later versions, announced attempts and the pins of later steps are moved aside; what an earlier
    resume moved aside is removed. Killed at any instruction, it is simply done again: until the
    caller notes the new timeline, whatever was left half done counts for nothing.

    Raises:
        RecordInvalid: If the pin is not whole; nothing was changed.
    """
    aside = restore_fragments(store_dir, plan, step=step, abandoned_timeline=abandoned_timeline)
    pins = _pins(store_dir)
    _clear(pins, aside)
    later = [pin_directory(store_dir, other) for other in pinned_steps(store_dir) if other > step]
    _move(later, pins / aside)


def restore_fragments(
    store_dir: Path, plan: HasFragments, *, step: int, abandoned_timeline: int
) -> str:
    """Restore as `restore` does, but leave the pins as they are: others of the store are served.

    Returns:
        The name of the directories to which later versions were moved.

    Raises:
        RecordInvalid: If the pin is not whole; nothing was changed.
    """
    verify_pin(store_dir, plan, step)
    aside = f"abandoned-timeline-{abandoned_timeline:04d}-after-{step:012d}"
    for fragment in plan.fragments:
        directory = fragment_directory(store_dir, fragment.fragment_id)
        _clear(directory, aside)
        _restore_fragment(directory, _pinned_record(store_dir, step, fragment), aside)
    return aside


def _restore_fragment(directory: Path, pinned: Path, aside: str) -> None:
    version = version_of(pinned)
    later = [path for path in directory.glob("v*.*") if version_of(path) > version]
    own = record_path(directory, version)
    if own.exists() and not own.samefile(pinned):
        later.append(own)
    _move([*later, *directory.glob("attempt.json")], directory / aside)
    with contextlib.suppress(FileExistsError):
        durable.link(pinned, own)
    durable.sync_directory(directory)


def _clear(directory: Path, aside: str) -> None:
    """Remove what is no version: files of a killed writer, and what was moved aside earlier."""
    for leftover in directory.glob("*.tmp"):
        durable.unlink(leftover)
    for earlier in directory.glob("abandoned-timeline-*"):
        if earlier.name != aside:
            durable.remove_tree(earlier)


def _move(paths: list[Path], target: Path) -> None:
    """Move files or directories; durable when this returns."""
    durable.make_directory(target)
    for path in paths:
        durable.rename(path, target / path.name)
    durable.sync_directory(target)
    durable.sync_directory(target.parent)


def _pinned_record(store_dir: Path, step: int, fragment: Fragment) -> Path:
    directory = fragment_directory(pin_directory(store_dir, step), fragment.fragment_id)
    versions = versions_in(directory)
    if len(versions) != 1:
        held = ", ".join(map(str, versions)) or "none"
        raise RecordInvalid(f"{directory} must hold the record of one version, it holds {held}")
    return record_path(directory, versions[0])


def _pins(store_dir: Path) -> Path:
    return store_dir / "pins"
