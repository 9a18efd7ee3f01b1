"""The close of a round: the same record from any number of threads, from memory and from disk."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
import torch

from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.errors import AggregationError
from diloco.outer.combination import mean_of
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.units import merge_units
from diloco.rounds.merge import Merger, Spooled
from diloco.rounds.publication import LaneState, PublicationRules, lane_digest, publish_lane
from diloco.rounds.record import record_path
from diloco.rounds.spool import Spool
from diloco.rounds.state import Close, Contributor, RoundKey
from diloco.rounds.store import FragmentStore, VersionRecord, recompute
from diloco.telemetry.syncer_meter import SyncerMeter

PLAN = make_plan([TensorSpec("w", (70_000,))], num_fragments=1)
FRAGMENT = PLAN.fragments[0]
UNITS = merge_units(PLAN, 0)
RULES = PublicationRules("int4", "int4", OuterOptimizer("nesterov", 0.7, 0.9, 0), seed=0)
ISLANDS = ("a", "b", "c")
CLOSE = Close(
    RoundKey(0, 0, 0, 0),
    tuple(
        Contributor(name, 1, tokens, 4, 8, ())
        for name, tokens in zip("abc", (3, 1, 2), strict=True)
    ),
    is_flush=False,
    refused={"d": "declined: not finite"},
)


def base() -> VersionRecord:
    generator = torch.Generator().manual_seed(1)
    lanes = []
    for lane in FRAGMENT.lanes:
        theta = torch.randn(lane.numel, generator=generator)
        lanes.append(LaneState(theta, theta + 1e-3, torch.ones(lane.numel)))
    digests = tuple(lane_digest(lane.published) for lane in lanes)
    return VersionRecord(0, 0, 0, None, False, "float32", digests, tuple(lanes))


def payload(island: str, lane_id: int, scale: float = 1.0) -> memoryview:
    seed = 100 * ord(island) + lane_id
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(FRAGMENT.lanes[lane_id].numel, generator=generator) * scale
    return to_bytes(get_codec("int4").encode(values))


class Bench:
    """A store with version 0 in it, a spool, and a merger."""

    def __init__(self, directory: Path, *, num_threads: int = 1, spool_bytes: int = 1 << 30):
        self.store = FragmentStore(directory / "store", FRAGMENT, 4)
        self.store.recover()
        self.base = base()
        self.store.commit(self.base)
        self.spool = Spool(directory / "spool", spool_bytes)
        self.spool.start()
        self.merger = Merger(
            FRAGMENT, UNITS, self.store, RULES, SyncerMeter(time.perf_counter), num_threads
        )

    def spooled(self, scale: float = 1.0) -> Spooled:
        def put(data: memoryview) -> object:
            return self.spool.put(data, blake3.blake3(data).digest())

        return {
            name: {i: put(payload(name, i, scale)) for i in range(len(FRAGMENT.lanes))}
            for name in (*ISLANDS, "d")
        }

    def publish(self) -> VersionRecord:
        return self.merger.publish(self.base, CLOSE, self.spooled())

    def file(self, version: int) -> bytes:
        return record_path(self.store.store_dir / "fragment-0000", version).read_bytes()


@pytest.mark.parametrize(
    ("num_threads", "spool_bytes"),
    [(1, 1 << 30), (3, 1 << 30), (3, 0), (2, 70_000)],
    ids=["one-thread", "threads", "on-disk", "some-on-disk"],
)
def test_the_record_is_the_same_to_the_byte_however_it_was_made(
    tmp_path: Path, num_threads: int, spool_bytes: int
) -> None:
    lanes = range(len(FRAGMENT.lanes))
    made = [
        publish_lane(
            state,
            [payload(name, i) for name in ISLANDS],
            mean_of([3, 1, 2], FRAGMENT.padded_numel),
            RULES,
            fragment=FRAGMENT,
            lane_id=i,
            key=CLOSE.key,
            is_flush=False,
        )
        for i, state in enumerate(base().lanes)
    ]
    expected = VersionRecord(
        version=1,
        fragment_id=0,
        timeline=0,
        key=CLOSE.key,
        is_flush=False,
        payload_codec="int4",
        lane_digests=tuple(lane.digest for lane in made),
        lanes=tuple(lane.state for lane in made),
        payloads=tuple(lane.payload for lane in made),
        contributors=CLOSE.contributors,
        contributions={name: [payload(name, i) for i in lanes] for name in ISLANDS},
        refused=CLOSE.refused,
    )
    whole = Bench(tmp_path / "whole")
    whole.store.commit(expected)

    bench = Bench(tmp_path / "by-lane", num_threads=num_threads, spool_bytes=spool_bytes)
    record = bench.publish()

    assert bench.file(1) == whole.file(1)
    assert record.header() == expected.header()
    assert record.contributions == {}
    assert list((tmp_path / "by-lane" / "spool").iterdir()) == [], "of d too, who is not counted"
    stored = bench.store.load(1)
    assert recompute(bench.store.load(0), stored, RULES, FRAGMENT) == record.lane_digests


def test_the_next_version_takes_theta_and_momentum_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    published = [lane.published.clone() for lane in bench.base.lanes]

    record = bench.publish()

    for before, after, served in zip(bench.base.lanes, record.lanes, published, strict=True):
        assert after.theta is before.theta
        assert after.momentum is before.momentum
        assert torch.equal(before.published, served), "islands may be fetching it"


def test_a_result_that_cannot_be_used_leaves_no_trace(tmp_path: Path) -> None:
    bench, untouched = Bench(tmp_path, num_threads=2), base()
    diverged = replace(CLOSE, contributors=CLOSE.contributors[:1])
    steep = replace(RULES, optimizer=OuterOptimizer("nesterov", 8.0, 0.9, 0))
    bench.merger = replace(bench.merger, rules=steep)

    with pytest.raises(AggregationError, match="not finite"):
        bench.merger.publish(bench.base, diverged, bench.spooled(5e37))

    names = ("theta", "published", "momentum")
    for state, expected in zip(bench.base.lanes, untouched.lanes, strict=True):
        assert all(torch.equal(getattr(state, n), getattr(expected, n)) for n in names)
    assert sorted(p.name for p in tmp_path.rglob("v*")) == ["v000000000000.record"]
    bench.merger = replace(bench.merger, rules=RULES)
    fresh = Bench(tmp_path / "fresh")
    assert bench.publish().digest == fresh.publish().digest


def test_a_version_whose_draft_was_never_committed_does_not_exist(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    sizes = {name: [len(payload(name, i)) for i in range(len(FRAGMENT.lanes))] for name in ISLANDS}
    draft = bench.store.draft(replace(bench.base, version=1), sizes["a"], sizes)
    draft.write("theta/0", to_bytes(bench.base.lanes[0].theta.view(torch.uint8)))

    recovered = FragmentStore(tmp_path / "store", FRAGMENT, 4).recover()

    assert recovered is not None
    assert recovered.record.version == 0
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("section", ["published", "payload"])
def test_a_lane_of_a_retained_version_is_read_alone_and_verified(
    tmp_path: Path, section: str
) -> None:
    bench = Bench(tmp_path)
    record = bench.publish()
    whole = record.lanes[1].published.view(torch.uint8)
    expected = to_bytes(whole) if section == "published" else record.payloads[1]

    codec, body = bench.store.load_lane(1, 1, section)

    assert (codec, bytes(body)) == ("int4", bytes(expected))
