"""Finds what of a store is damaged, and makes again what can be made from what is whole.

A version whose contributions are whole is made again from the version before it, by the rules and
with the coefficients that its header names, and must come to the digests that are there. A pin is
linked to the store's record of its version again. Leftovers of a killed writer never existed. A
contribution, or a header, is nowhere else: what needs it stays damaged, and is left as it is.

Anyone who calls this holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from diloco import durable
from diloco.outer.fragments import Fragment
from diloco.versions.pins import pin_directory, pinned_steps
from diloco.versions.record import (
    RecordInvalid,
    fragment_directory,
    locate,
    record_path,
    verify,
    versions_in,
)
from diloco.versions.store import FragmentStore


class Condition(StrEnum):
    """How a part of a store was found, or left."""

    WHOLE = "whole"
    REPAIRED = "repaired"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class RepairFinding:
    """One part of a store: a version, a pin, a file half written."""

    fragment_id: int
    what: str
    condition: Condition
    detail: str = ""


def repair_fragment(store: FragmentStore) -> Iterator[RepairFinding]:
    """Verify every byte of a fragment's store, and make again what can be made.

    Raises:
        DiskFull: If there is no room for what is made again; what was there is.
    """
    fragment_id = store.fragment.fragment_id
    directory = fragment_directory(store.store_dir, fragment_id)
    # First what is named, so that nothing of it counts as torn that can be made again.
    for version in store.versions():
        yield _repaired(store, version)
    unfinished = {path: path.stat().st_size for path in directory.glob("*.tmp")}
    store.recover()
    for path, size in unfinished.items():
        what = f"{size} bytes half written, and never a version: removed"
        yield RepairFinding(fragment_id, path.name, Condition.REPAIRED, what)
    for step in pinned_steps(store.store_dir):
        for version in versions_in(
            pinned := fragment_directory(pin_directory(store.store_dir, step), fragment_id)
        ):
            yield _repaired_pin(store, step, record_path(pinned, version), version)


def _repaired(store: FragmentStore, version: int) -> RepairFinding:
    fragment_id, what = store.fragment.fragment_id, f"version {version}"
    try:
        store.verify(version)
        return RepairFinding(fragment_id, what, Condition.WHOLE)
    except RecordInvalid as error:
        problem = str(error)
    try:
        store.make_again(version)
    except RecordInvalid as error:
        why = "" if str(error) == problem else f"; it cannot be made again: {error}"
        return RepairFinding(fragment_id, what, Condition.DAMAGED, problem + why)
    detail = f"made again from version {version - 1}: {problem}"
    return RepairFinding(fragment_id, what, Condition.REPAIRED, detail)


def _repaired_pin(store: FragmentStore, step: int, path: Path, version: int) -> RepairFinding:
    fragment_id, what = store.fragment.fragment_id, f"pin of inner step {step}, version {version}"
    try:
        verify(path, version, store.fragment)
        return RepairFinding(fragment_id, what, Condition.WHOLE)
    except RecordInvalid as error:
        problem = str(error)
    own = record_path(fragment_directory(store.store_dir, fragment_id), version)
    if not _is_same_version(own, path, store.fragment, version):
        return RepairFinding(fragment_id, what, Condition.DAMAGED, problem)
    fresh = path.with_name(path.name + ".tmp")
    durable.unlink(fresh)
    durable.link(own, fresh)
    durable.rename(fresh, path)
    durable.sync_directory(path.parent)
    return RepairFinding(fragment_id, what, Condition.REPAIRED, f"linked again: {problem}")


def _is_same_version(own: Path, pinned: Path, fragment: Fragment, version: int) -> bool:
    """Whether the store's record is whole, and of the past that the pin is of as far as it tells.

    A pin whose header is damaged tells nothing: a resume may have left another past in the store.
    """
    try:
        return verify(own, version, fragment) == locate(pinned).header
    except RecordInvalid:
        return False
