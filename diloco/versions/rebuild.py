"""Computes a version again from what it was made of, and the state of a frame.

That state is computed from a snapshot before it and the frames up to it: every frame is merged
again by the code that published it, with the rules that it names, and must come to the digests
that it names: one that does not is damaged.

Source: PROTOCOL.md, "Records and frames".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from diloco.compression.base import from_bytes
from diloco.errors import AggregationError, CodecError
from diloco.outer.combination import Combination, mean_of
from diloco.outer.fragments import Fragment
from diloco.protocol.rounds.terms import RoundKey
from diloco.versions.frames import frames_of
from diloco.versions.publication import (
    LanePublication,
    LaneState,
    PublicationRules,
    publish_lane_,
)
from diloco.versions.record import (
    RecordInvalid,
    StoredRecord,
    locate,
    record_path,
    state_sections,
    versions_in,
)


def rebuild(
    directory: Path, version: int, fragment: Fragment, lane_ids: Sequence[int], num_threads: int
) -> tuple[LaneState, ...]:
    """Compute lanes of a version from the nearest snapshot that leads to it; changes nothing.

    Only the sections of these lanes are read. Where the way from one snapshot is damaged, an older
    one is tried.

    Args:
        directory: Of the fragment.
        version: To come to.
        fragment: Of the run's plan.
        lane_ids: Of the lanes.
        num_threads: Lanes computed at once.

    Raises:
        RecordInvalid: If nothing leads there, or what does is torn or damaged.
    """
    problem = RecordInvalid(f"{directory} holds no snapshot that leads to version {version}")
    for start in reversed([v for v in versions_in(directory) if v <= version]):
        needed = range(start + 1, version + 1)
        try:
            chain = frames_of(directory, needed)
        except RecordInvalid:
            break
        try:
            snapshot = locate(record_path(directory, start))
            for stored, expected in zip([snapshot, *chain], (start, *needed), strict=True):
                stored.check(expected, fragment)
            with ThreadPoolExecutor(num_threads, "lanes") as pool:
                return tuple(pool.map(partial(_lane, snapshot, chain, fragment), lane_ids))
        except RecordInvalid as error:
            problem = error
    raise problem


def _lane(
    snapshot: StoredRecord, chain: Sequence[StoredRecord], fragment: Fragment, lane_id: int
) -> LaneState:
    """Take one lane from a snapshot through the frames after it."""
    state = lane_of(snapshot, lane_id)
    for frame in chain:
        state = _next(frame, state, fragment, lane_id)
    return state


def lane_of(record: StoredRecord, lane_id: int) -> LaneState:
    """Read the state of one lane from a whole record; nothing else has the memory.

    Raises:
        RecordInvalid: If it is torn, damaged, or not there.
    """
    return LaneState(
        *(
            from_bytes(record.read(f"{name}/{lane_id}")).view(torch.float32)
            for name in state_sections(record.sections)
        )
    )


def _next(frame: StoredRecord, state: LaneState, fragment: Fragment, lane_id: int) -> LaneState:
    """Take one lane from the version before a frame to the frame's; `state` is moved in place."""
    header = frame.header
    rules = PublicationRules.from_json(header["rules"])
    try:
        made = made_again_(frame, state, rules, fragment, lane_id)
    except (AggregationError, CodecError) as error:
        raise RecordInvalid(f"{frame.path}, version {header['version']}: {error}") from error
    if made.blake3.hex() != header["lane_blake3"][lane_id]:
        raise RecordInvalid(
            f"{frame.path}: lane {lane_id} of version {header['version']} comes to blake3 "
            f"{made.blake3.hex()}, the frame says {header['lane_blake3'][lane_id]}"
        )
    return made.state


def made_again(
    stored: StoredRecord,
    version: int,
    before: Callable[[int], LaneState],
    fragment: Fragment,
) -> Iterator[LanePublication]:
    """Make a version again, lane by lane, out of the one before it and its own contributions.

    Args:
        stored: What is kept of it; its payload and its state are not read.
        version: That it is to be.
        before: Reads a lane of the version before it, which is moved in place.
        fragment: Of the run's plan.

    Raises:
        RecordInvalid: If one of these is damaged, or they do not come to its digests; what is
            returned raises it too.
    """
    header = stored.header
    stored.check(version, fragment)
    if version == 0 or "rules" not in header:
        raise RecordInvalid(f"{stored.path} does not say by which rules version {version} is made")
    rules = PublicationRules.from_json(header["rules"])

    def lane(lane_id: int) -> LanePublication:
        try:
            made = made_again_(stored, before(lane_id), rules, fragment, lane_id)
        except (AggregationError, CodecError) as error:
            raise RecordInvalid(f"{stored.path}: {error}") from error
        if made.blake3.hex() != header["lane_blake3"][lane_id]:
            raise RecordInvalid(f"version {version - 1} does not lead to the digests of {version}")
        return made

    return map(lane, range(len(fragment.lanes)))


def made_again_(
    stored: StoredRecord,
    state: LaneState,
    rules: PublicationRules,
    fragment: Fragment,
    lane_id: int,
) -> LanePublication:
    """Make one lane of a version again, out of its contributions and with its coefficients.

    Args:
        stored: What is kept of the version.
        state: The lane at the version before; all but published is moved in place.
        rules: By which it was made.
        fragment: Of the run's plan.
        lane_id: The lane.

    Raises:
        RecordInvalid: If a contribution is torn or damaged; `state` is worth nothing then, nor
            after the following.
        AggregationError: If the result is not finite.
        CodecError: If a contribution is malformed.
    """
    header = stored.header
    contributors = header["contributors"]
    merge = header.get("merge")
    combination = (
        Combination.from_json(merge)
        if merge
        else mean_of([c["weight_tokens"] for c in contributors], fragment.padded_numel)
    )
    return publish_lane_(
        state,
        (stored.read(f"contribution/{c['island']}/{lane_id}") for c in contributors),
        combination,
        rules,
        fragment=fragment,
        lane_id=lane_id,
        key=RoundKey(
            header["timeline"], header["fragment_id"], header["version"] - 1, header["attempt"]
        ),
        is_flush=header["is_flush"],
    )
