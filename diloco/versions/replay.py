"""Computes every published version again from the one before, and compares with what is kept.

A version follows from its predecessor's state, its contributions, and the rules and coefficients
that its own record names; no configuration of today has a say in it. What must come out is what
was published: digests of the lanes, bytes of the payload, and where a whole record is kept, theta
and moments too. Coefficients come from norms and angles, whose last bits are the hardware's: those
are computed again within `COEFFICIENT_TOLERANCE`, and taken from the record.

What a version was made of is in its record, in its frame, or in `frames.KEPT`. Of several
timelines one past leads to the newest version; what a resume has left behind is told, not made
again. Nothing is changed. Anyone who calls this holds the store's lock, or a copy.

Source: PROTOCOL.md, "Audit log".
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.errors import AggregationError, CodecError
from diloco.outer.combination import Combination, combine, mean_of
from diloco.outer.fragments import Plan
from diloco.outer.units import merge_units
from diloco.versions.frames import KEPT, each_frame_in, frame_path, frames_in
from diloco.versions.gram_matrices import gram_matrices
from diloco.versions.publication import LanePublication, LaneState, PublicationRules, lane_blake3
from diloco.versions.rebuild import lane_of, made_again_
from diloco.versions.record import (
    RecordInvalid,
    StoredRecord,
    check_whole,
    fragment_directory,
    record_path,
    versions_in,
)

#: Largest |c - c'| / max(1, |c'|) between a coefficient that is computed again and the record's.
COEFFICIENT_TOLERANCE = 1e-6

FORGOTTEN = (
    'what it was made of was forgotten; outer.keep_contributions = "all" keeps that of every '
    "version from a run's start on"
)
_NOT_BEFORE = "nothing here leads to the version before it"
_NOT_MERGED = "it was taken back from an island"
_NO_RULES = "its record names no rules, and those of the run may have been others then"


class ReplayVerdict(StrEnum):
    """What became of a version: made again to the bit, or not."""

    RECOMPUTED = "recomputed"
    UNKNOWN = "not recomputable"
    REPAIRED = "repaired"  # taken back from an island, after the syncer had lost it
    ABANDONED = "abandoned"  # by a resume
    DAMAGED = "damaged"  # what is kept is not what was written
    DIFFERENT = "different"  # what is kept is as it was written, and does not come to it


@dataclass(frozen=True, slots=True)
class Replayed:
    """One version of a fragment, and what making it again came to; `detail` says why."""

    fragment_id: int
    timeline: int
    version: int
    verdict: ReplayVerdict
    detail: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether something is not as it was published."""
        return self.verdict in (ReplayVerdict.DAMAGED, ReplayVerdict.DIFFERENT)

    @property
    def is_unknown(self) -> bool:
        """Whether it could not be made again, by no fault of what is kept."""
        return self.verdict is ReplayVerdict.UNKNOWN


class FragmentReplay:
    """What is kept of one fragment's versions; `newest` is the last of them, -1 of none."""

    def __init__(
        self,
        store_dir: Path,
        plan: Plan,
        fragment_id: int,
        *,
        indexed: Sequence[Mapping[str, Any]] = (),
        timeline: int = 0,
    ) -> None:
        """Look at what there is; nothing but headers is read.

        Args:
            store_dir: The store.
            plan: Of the run.
            fragment_id: Of the fragment.
            indexed: Headers that the coordinator has indexed, of all fragments; none: those in the
                store are all that is known.
            timeline: That the store is of.
        """
        self._plan = plan
        self._fragment = plan.fragments[fragment_id]
        self._directory = fragment_directory(store_dir, fragment_id)
        #: Timelines alone: of a run that keeps all, the headers are more than a machine's memory.
        self._kept = {v: f.header["timeline"] for v, f in each_frame_in(self._directory / KEPT)}
        self._frames = frames_in(self._directory)
        self._records: dict[int, StoredRecord] = {}
        self._unreadable: dict[int, str] = {}
        for version in versions_in(self._directory):
            path = record_path(self._directory, version)
            try:
                record = check_whole(path)
                record.check(version, self._fragment)
                self._records[version] = record
            except RecordInvalid as error:
                self._unreadable[version] = str(error)
        self._indexed = {
            (header["timeline"], header["version"]): header
            for header in indexed
            if header["fragment_id"] == fragment_id
        }
        self._stored_newest = max({*self._records, *self._frames}, default=-1)
        told = (version for of, version in self._indexed if of == timeline)
        self.newest = max(self._stored_newest, *told, -1)
        self._timelines = self._past(timeline)

    def _past(self, timeline: int) -> dict[int, int]:
        """Say of each version that leads to the newest in which timeline it was published."""
        past = {}
        indexed: defaultdict[int, list[int]] = defaultdict(list)
        for of, version in self._indexed:
            indexed[version].append(of)
        for version in range(self.newest, -1, -1):
            own = self._records.get(version) or self._frames.get(version)
            if own is not None:
                timeline = own.header["timeline"]
            elif told := [t for t in indexed[version] if t <= timeline]:
                timeline = max(told)
            elif version in self._kept:
                timeline = min(timeline, self._kept[version])
            past[version] = timeline
        return past

    def run(self, first: int = 1, *, num_threads: int = 1) -> Iterator[Replayed]:
        """Make versions again, ascending; then tell which were abandoned.

        Args:
            first: The first that is asked for, at least 1. Those before it are made again where
                no record leads to it otherwise.
            num_threads: Lanes made again at once.
        """
        state: Sequence[LaneState] | None = None
        start = max(0, first - 1)
        for version in sorted((v for v in self._records if v < first), reverse=True):
            try:
                state, start = self._state_of(self._records[version]), version
                break
            except RecordInvalid as error:
                yield self._replayed(version, ReplayVerdict.DAMAGED, str(error))
        with ThreadPoolExecutor(num_threads, "lanes") as pool:
            for version in range(start + 1, self.newest + 1):
                replayed, state = self._step(version, state, pool)
                if version >= first:
                    yield replayed
        for timeline, version in sorted(self._indexed):
            if version >= first and self._timelines.get(version) != timeline:
                detail = f"a resume left timeline {timeline} behind"
                id_ = self._fragment.fragment_id
                yield Replayed(id_, timeline, version, ReplayVerdict.ABANDONED, detail)

    def _replayed(self, version: int, verdict: ReplayVerdict, detail: str = "") -> Replayed:
        timeline = self._timelines[version]
        return Replayed(self._fragment.fragment_id, timeline, version, verdict, detail)

    def _step(
        self, version: int, before: Sequence[LaneState] | None, pool: Executor
    ) -> tuple[Replayed, Sequence[LaneState] | None]:
        """Make one version again; returns the result, and the state that the next one begins with.

        Args:
            version: The version.
            before: State of the version before, moved in place; None: it is not known.
            pool: Makes lanes.
        """
        if (stored := self._stored(version)) is None:
            return self._absent(version), None
        damage, differences = "", [*self._told_otherwise(stored)]
        made: list[LanePublication] = []
        why_not = self._why_not(stored, before)
        try:
            if why_not or before is None:
                stored.verify()
            else:
                made = self._made(stored, before, pool)
                differences += self._differences(stored, made, pool)
        except RecordInvalid as error:
            damage = str(error)
        except (AggregationError, CodecError) as error:
            differences.append(f"what is kept cannot be merged: {error}")
        is_same = [lane.blake3.hex() for lane in made] == stored.header["lane_blake3"]
        after = [lane.state for lane in made] if is_same else None
        if version in self._records:
            try:
                kept = self._state_of(stored)
                differences += _state_differences(kept, after) if after is not None else []
                after = kept
            except RecordInvalid as error:
                damage = damage or str(error)
        if damage:
            return self._replayed(version, ReplayVerdict.DAMAGED, damage), after
        if differences:
            return self._replayed(version, ReplayVerdict.DIFFERENT, "; ".join(differences)), after
        if island := stored.header.get("repaired"):
            detail = f"taken back from island {island}; what it was made of is gone"
            return self._replayed(version, ReplayVerdict.REPAIRED, detail), after
        if why_not:
            return self._replayed(version, ReplayVerdict.UNKNOWN, why_not), after
        return self._replayed(version, ReplayVerdict.RECOMPUTED), after

    # -- what there is ---------------------------------------------------------------------------

    def _stored(self, version: int) -> StoredRecord | None:
        """Find what is kept of a version; not of one of the same number in an abandoned past."""
        own = self._records.get(version) or self._frames.get(version)
        if own is not None or self._kept.get(version) != self._timelines[version]:
            return own
        with contextlib.suppress(RecordInvalid):  # if it is damaged by now, `_absent` says so
            return check_whole(frame_path(self._directory / KEPT, version))
        return None

    def _absent(self, version: int) -> Replayed:
        if problem := self._unreadable.get(version) or self._damaged_frame(version):
            return self._replayed(version, ReplayVerdict.DAMAGED, problem)
        if version > self._stored_newest:
            problem = "it was published, as the audit log says, and nothing here leads to it"
            return self._replayed(version, ReplayVerdict.DAMAGED, problem)
        return self._replayed(version, ReplayVerdict.UNKNOWN, FORGOTTEN)

    def _damaged_frame(self, version: int) -> str:
        """Say what is wrong with the frame of a version; empty: it has none."""
        for directory in (self._directory, self._directory / KEPT):
            path = frame_path(directory, version)
            try:
                check_whole(path)
            except RecordInvalid as error:
                if path.exists():
                    return str(error)
        return ""

    def _state_of(self, record: StoredRecord) -> list[LaneState]:
        """Read the state of a whole record, and insist that its digests are of it."""
        lanes = [lane_of(record, lane.lane_id) for lane in self._fragment.lanes]
        if [lane_blake3(s.published).hex() for s in lanes] != record.header["lane_blake3"]:
            raise RecordInvalid(f"{record.path} holds other published values than it says")
        return lanes

    # -- one version -----------------------------------------------------------------------------

    def _why_not(self, stored: StoredRecord, before: Sequence[LaneState] | None) -> str:
        """Say why a version cannot be made again; empty: it can."""
        if stored.header.get("repaired"):
            return _NOT_MERGED
        if not stored.header.get("rules"):
            return _NO_RULES
        return _NOT_BEFORE if before is None else ""

    def _made(
        self, stored: StoredRecord, before: Sequence[LaneState], pool: Executor
    ) -> list[LanePublication]:
        rules = PublicationRules.from_json(stored.header["rules"])

        def make(lane_id: int) -> LanePublication:
            return made_again_(stored, before[lane_id], rules, self._fragment, lane_id)

        return list(pool.map(make, range(len(before))))

    def _told_otherwise(self, stored: StoredRecord) -> Iterator[str]:
        """Compare a header with the audit log's, which leaves out what has no room in a message."""
        header = stored.header
        told = self._indexed.get((header["timeline"], header["version"]), {})
        if other := sorted(key for key, value in told.items() if header.get(key) != value):
            yield f"the audit log says otherwise of its {', '.join(other)}"

    def _differences(
        self, stored: StoredRecord, made: Sequence[LanePublication], pool: Executor
    ) -> Iterator[str]:
        """Say in what a version that was made again is not what is kept of it."""
        header = stored.header
        for contributor in header["contributors"]:
            for lane_id, accepted in enumerate(contributor["lane_digests"]):
                name = f"contribution/{contributor['island']}/{lane_id}"
                if stored.sections[name].digest != accepted:
                    yield f"{name} is not what was accepted"
        for lane_id, lane in enumerate(made):
            found = f"digest {lane.digest.hex()} and blake3 {lane.blake3.hex()}"
            digest, of_bytes = (header[each][lane_id] for each in ("lane_digests", "lane_blake3"))
            if found != (said := f"digest {digest} and blake3 {of_bytes}"):
                yield f"lane {lane_id} comes to {found}, published was {said}"
            elif bytes(lane.payload) != stored.read(f"payload/{lane_id}"):
                yield f"lane {lane_id} comes to another payload"
        if "rules" in header:
            expected = self._combination(stored, pool)
            merge = header.get("merge")
            tokens = [c["weight_tokens"] for c in header["contributors"]]
            used = (
                Combination.from_json(merge)
                if merge
                else mean_of(tokens, self._fragment.padded_numel)
            )
            if (distance := used.distance(expected)) > COEFFICIENT_TOLERANCE:
                yield f"coefficients are {distance:.2g} from what the contributions give"

    def _combination(self, stored: StoredRecord, pool: Executor) -> Combination:
        """Compute the coefficients of those that were counted; who was rejected is not kept."""
        rules = PublicationRules.from_json(stored.header["rules"])
        rule, is_flush = rules.merge, stored.header["is_flush"]
        contributors = stored.header["contributors"]
        weights = [
            rule.weight(c["weight_tokens"], c["weight_steps"], is_flush=is_flush)
            for c in contributors
        ]
        if not rule.needs_norms(is_flush=is_flush):
            return mean_of(weights, self._fragment.padded_numel)
        units = merge_units(
            self._plan,
            self._fragment.fragment_id,
            plain_mean=rule.plain_mean,
            experts=rule.experts,
        )
        grams = gram_matrices(
            lambda i: (stored.parts(f"contribution/{c['island']}/{i}") for c in contributors),
            len(contributors),
            self._fragment,
            units,
            rules.uplink_codec,
            has_products=rule.is_by_unit(is_flush=is_flush),
            across=pool.map,
        )
        return combine(grams, units, weights, rule, is_flush=is_flush)


def _state_differences(kept: Sequence[LaneState], made: Sequence[LaneState]) -> list[str]:
    return [
        f"{name} of lane {lane_id} comes to other values"
        for lane_id, (one, other) in enumerate(zip(kept, made, strict=True))
        for name, vector in one.vectors.items()
        if not _is_same(vector, other.vectors.get(name))
    ]


def _is_same(vector: Tensor, other: Tensor | None) -> bool:
    """Whether two float32 vectors have the same bits."""
    bits = vector.view(torch.int32)
    return other is not None and torch.equal(bits, other.view(torch.int32))
