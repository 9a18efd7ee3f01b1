"""Reads what a run under chaos left behind: events, audit log, records.

The one module here that opens tensors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.chaos.evidence import Evidence, Newest, Recomputed
from diloco.chaos.fault_log import read_fault_log
from diloco.chaos.plan import TimedFault
from diloco.chaos.runner import FAULT_LOG, Ended
from diloco.checkpoint.stores import read_plan, state_by_fragment
from diloco.compression.lanes import lane_codec
from diloco.coordinator.journal import Journal
from diloco.protocol.rounds.terms import Weights
from diloco.state_dir import StateDir
from diloco.versions.frames import headers_in
from diloco.versions.record import fragment_directory
from diloco.versions.replay import FragmentReplay, ReplayVerdict
from diloco.versions.stored import StoredVersions

logger = logging.getLogger(__name__)


def gather(ended: Ended, faults: Sequence[TimedFault]) -> Evidence:
    """Read everything; nothing serves the store any more."""
    config = ended.config
    state = StateDir(Path(config.coordinator.state_dir))
    lines = _json_lines(state.root / FAULT_LOG)
    stores, newest, recomputed, contribution_bytes = [], {}, [], {}
    if (plan := read_plan(state)) is not None:
        for p, own in sorted(state_by_fragment(state, plan).items()):
            store = StoredVersions(own.store, plan.fragments[p])
            stores.append(store)
            contribution_bytes[p] = sum(
                lane_codec(config.outer.uplink, store.fragment, lane.lane_id).wire_bytes(lane.numel)
                for lane in store.fragment.lanes
            )
            if (record := store.newest()) is None:
                continue
            newest[p] = Newest(record.version, record.digest.hex())
            for each in FragmentReplay(store.store_dir, plan, p).run():
                is_made = each.verdict in (ReplayVerdict.RECOMPUTED, ReplayVerdict.DIFFERENT)
                if is_made or each.version == record.version:  # others: forgotten, damaged
                    recomputed.append(Recomputed(p, each.version, each.detail))
    return Evidence(
        history=read_fault_log([*lines], faults),
        events={
            island: [
                event
                for path in sorted(config.telemetry_dir.glob("events-*.jsonl"))
                for event in _json_lines(path)
                if "island_rank" in event and event["island"] == island  # a rank's, no syncer's
            ]
            for island in sorted(config.islands)
        },
        headers=[*_indexed(state), *_kept_headers(stores)],
        newest=newest,
        repaired=_repaired(state),
        recomputed=recomputed,
        exit_codes=ended.exit_codes,
        problem=ended.problem,
        stored=None if ended.copy is None else _stored(StateDir(ended.copy)),
        local_mix=config.outer.local_mix,
        is_on_arrival=config.outer.is_on_arrival,
        contribution_bytes=contribution_bytes,
        most_steps=Weights(config.outer.inner_steps_per_round).most_steps,
    )


def _stored(copy: StateDir) -> dict[int, Newest]:
    """Read the newest versions of a run's copy; none of a copy that could not be made."""
    found: dict[int, Newest] = {}
    if (plan := read_plan(copy)) is None:
        return found
    for p, own in state_by_fragment(copy, plan).items():
        if (record := StoredVersions(own.store, plan.fragments[p]).newest()) is not None:
            found[p] = Newest(record.version, record.digest.hex())
    return found


def _indexed(state: StateDir) -> Iterator[dict[str, Any]]:
    if not state.journal.exists():
        return
    journal = Journal(state.journal)
    journal.open()
    try:
        for header in journal.headers():
            yield json.loads(header)
    finally:
        journal.close()


def _repaired(state: StateDir) -> tuple[tuple[int, int], ...]:
    """Fragment and version of what was taken back from islands, as the audit log has it."""
    if not state.journal.exists():
        return ()
    journal = Journal(state.journal)
    journal.open()
    try:
        told = [entry.content for entry in journal.audit_rows() if entry.kind == "repair"]
    finally:
        journal.close()
    return tuple((each["fragment_id"], each["version"]) for each in told if "from_island" in each)


def _kept_headers(stores: Sequence[StoredVersions]) -> Iterator[Mapping[str, Any]]:
    for store in stores:
        yield from headers_in(fragment_directory(store.store_dir, store.fragment.fragment_id))


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; one that a kill tore is passed over."""
    if not path.exists():
        return
    for line in path.read_text(errors="replace").split("\n"):
        try:
            event = json.loads(line)
        except ValueError:
            if line:
                logger.info("torn line passed over, path=%s", path)
            continue
        if isinstance(event, dict):
            yield event
