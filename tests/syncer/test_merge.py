"""The close of a round: the same record from any number of threads, from memory and from disk."""

from __future__ import annotations

import itertools
import re
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import blake3
import pytest
import torch

from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.errors import AggregationError
from diloco.outer.combination import MergeRule, mean_of
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.outer.guard import History
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.units import merge_units
from diloco.protocol.rounds.terms import Close, Contributor, Inclusion, RoundKey
from diloco.syncer.merge import Merger, NothingToMerge, Spooled
from diloco.syncer.spool import Spool
from diloco.telemetry.syncer_meter import SyncerMeter
from diloco.versions.publication import LaneState, PublicationRules, lane_blake3
from diloco.versions.record import RecordDraft, record_path
from diloco.versions.store import FragmentStore
from diloco.versions.value_digest import lane_digest
from diloco.versions.version import VersionRecord, founding_record
from tests.remaking import publish_lane, recompute

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


def threads(num_threads: int) -> Executor:
    return ThreadPoolExecutor(num_threads, "lanes")


def base() -> VersionRecord:
    generator = torch.Generator().manual_seed(1)
    lanes = []
    for lane in FRAGMENT.lanes:
        theta = torch.randn(lane.numel, generator=generator)
        lanes.append(LaneState(theta, theta + 1e-3, torch.ones(lane.numel)))
    digests = tuple(lane_digest(lane.published) for lane in lanes)
    of_bytes = tuple(lane_blake3(lane.published) for lane in lanes)
    return VersionRecord(0, 0, 0, None, False, "float32", digests, of_bytes, tuple(lanes))


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
            FRAGMENT, UNITS, self.store, RULES, SyncerMeter(time.perf_counter), threads(num_threads)
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
        lane_blake3=tuple(lane.blake3 for lane in made),
        lanes=tuple(lane.state for lane in made),
        payloads=tuple(lane.payload for lane in made),
        contributors=CLOSE.contributors,
        contributions={name: [payload(name, i) for i in lanes] for name in ISLANDS},
        refused=CLOSE.refused,
        last_included={
            c.island: Inclusion(c.incarnation, CLOSE.key.version, CLOSE.key.attempt)
            for c in CLOSE.contributors
        },
        merged_tokens=6,
        rules=RULES.to_json(),
    )
    bench = Bench(tmp_path / "by-lane", num_threads=num_threads, spool_bytes=spool_bytes)
    record = bench.publish()
    whole = Bench(tmp_path / "whole")
    whole.store.commit(replace(expected, guard=record.guard))

    assert record.guard == Bench(tmp_path / "another").publish().guard
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
    unguarded = MergeRule(guard=False)
    steep = replace(RULES, optimizer=OuterOptimizer("nesterov", 8.0, 0.9, 0), merge=unguarded)
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


# -- rules in two passes ---------------------------------------------------------------------------

RADIAL = replace(RULES, merge=MergeRule("radial_directional"))
#: 70,000 values in four lanes: the tensors in the middle span several.
TENSORS = [
    TensorSpec("embed", (100, 90)),
    TensorSpec("experts", (3, 100, 110)),
    TensorSpec("norm", (2_000,)),
    TensorSpec("w", (250, 104)),
]


def of_lanes(codec: str, lanes: list[torch.Tensor]) -> list[bytes]:
    return [bytes(to_bytes(get_codec(codec).encode(lane))) for lane in lanes]


class Round(Bench):
    """The same over several tensors, with `num_lanes` lanes, and float32 contributions."""

    def __init__(
        self,
        directory: Path,
        rules: PublicationRules,
        *,
        num_lanes: int = 16,
        num_threads: int = 1,
        spool_bytes: int = 1 << 20,
    ):
        self.plan = make_plan(TENSORS, num_fragments=1, num_lanes=num_lanes)
        self.fragment = self.plan.fragments[0]
        rules = replace(rules, uplink_codec="float32")
        units = merge_units(self.plan, 0, plain_mean=("*embed*",), experts=("*experts*",))
        self.store = FragmentStore(directory / "store", self.fragment, 4)
        self.store.recover()
        theta = torch.randn(self.fragment.padded_numel, generator=torch.Generator().manual_seed(2))
        values = {lane.lane_id: to_bytes(theta[lane.start : lane.end].view(torch.uint8))
                  for lane in self.fragment.lanes}  # fmt: skip
        self.base = founding_record(
            self.fragment, values, 0, has_second_moment=rules.optimizer.has_second_moment
        )
        self.store.commit(self.base)
        self.spool = Spool(directory / "spool", spool_bytes)
        self.spool.start()
        meter = SyncerMeter(time.perf_counter)
        self.merger = Merger(self.fragment, units, self.store, rules, meter, threads(num_threads))

    def deltas(self) -> dict[str, torch.Tensor]:
        deltas = {}
        for seed, name in enumerate(("a", "b", "c", "d")):
            generator = torch.Generator().manual_seed(seed)
            deltas[name] = torch.zeros(self.fragment.padded_numel)
            for entry in self.fragment.entries:
                numel = entry.end - entry.start
                values = torch.randn(numel, generator=generator) * 1e-2
                deltas[name][entry.offset : entry.offset + numel] = values
        return deltas

    def spooled_of(self, deltas: dict[str, torch.Tensor]) -> Spooled:
        coded = {
            name: of_lanes(
                "float32", [delta[lane.start : lane.end] for lane in self.fragment.lanes]
            )
            for name, delta in deltas.items()
        }
        return {
            name: {
                i: self.spool.put(data, blake3.blake3(data).digest())
                for i, data in enumerate(lanes)
            }
            for name, lanes in coded.items()
        }

    def publish(self, deltas: dict[str, torch.Tensor] | None = None) -> VersionRecord:
        return self.merger.publish(self.base, CLOSE, self.spooled_of(deltas or self.deltas()))


def vector(record: VersionRecord, name: str = "theta") -> torch.Tensor:
    return torch.cat([lane.vectors[name] for lane in record.lanes])


def test_radial_averages_go_by_tensor_and_expert_across_lanes(tmp_path: Path) -> None:
    bench = Round(tmp_path, replace(RADIAL, optimizer=OuterOptimizer("sgd", 1.0, 0.0, 0)))
    before = vector(bench.base).clone()
    deltas = [bench.deltas()[name].double() for name in ISLANDS]

    merged = before - vector(bench.publish())

    weights = [3, 1, 2]
    mean = sum(w / 6 * d for w, d in zip(weights, deltas, strict=True))
    assert float(merged.norm() / mean.norm()) > 1.4, "they are nearly orthogonal"
    for entry in bench.fragment.entries:
        parts = 3 if entry.name == "experts" else 1
        size = (entry.end - entry.start) // parts
        for part in range(parts):
            place = slice(entry.offset + part * size, entry.offset + (part + 1) * size)
            expected = mean[place]
            if entry.name != "embed":
                norms = [d[place].norm() for d in deltas]
                u = sum(
                    w / 6 * d[place] / n for w, d, n in zip(weights, deltas, norms, strict=True)
                )
                radius = sum(w / 6 * n for w, n in zip(weights, norms, strict=True))
                expected = radius * u / u.norm()
            # Theta is near 4 at most, and rounded once: 2^-22.
            torch.testing.assert_close(merged[place].double(), expected, rtol=1e-5, atol=2.0**-22)


@pytest.mark.parametrize("rules", [RADIAL, replace(RULES, merge=MergeRule(clip_norm_ratio=1.0))])
def test_lanes_and_threads_do_not_change_a_version(tmp_path: Path, rules: PublicationRules) -> None:
    whole = Round(tmp_path / "1", rules, num_lanes=1)
    split = Round(tmp_path / "4", rules, num_threads=3)
    assert (len(whole.fragment.lanes), len(split.fragment.lanes)) == (1, 4)

    one, four = whole.publish(), split.publish()

    # Sums of other parts may round a coefficient to its neighbour: 2^-23 of a delta of 0.05.
    torch.testing.assert_close(vector(one), vector(four), rtol=0, atol=2.0**-22)
    for spool_bytes in (0, 1 << 30):
        again = Round(tmp_path / f"{spool_bytes}", rules, spool_bytes=spool_bytes).publish()
        assert again.header() == four.header()


@pytest.mark.parametrize("is_flush", [False, True], ids=["round", "flush"])
@pytest.mark.parametrize("name", ["mean", "radial_directional"])
def test_what_an_island_sends_in_padding_is_never_merged(
    tmp_path: Path, name: Literal["mean", "radial_directional"], is_flush: bool
) -> None:
    """Islands keep none: their digest of the last version would be another."""
    rules, close = replace(RULES, merge=MergeRule(name)), replace(CLOSE, is_flush=is_flush)
    bench, clean = Round(tmp_path / "1", rules, num_threads=2), Round(tmp_path / "2", rules)
    deltas = bench.deltas()
    expected = clean.merger.publish(clean.base, close, clean.spooled_of(deltas))
    is_padding = torch.ones(bench.fragment.padded_numel, dtype=torch.bool)
    for entry in bench.fragment.entries:
        is_padding[entry.offset : entry.offset + entry.end - entry.start] = False
    assert is_padding.sum() > 100
    deltas["b"][is_padding] = 1e-2

    record = bench.merger.publish(bench.base, close, bench.spooled_of(deltas))

    assert len(record.contributors) == 3
    assert record.digest == expected.digest
    assert torch.equal(vector(record, "momentum"), vector(expected, "momentum"))


@pytest.mark.parametrize("name", ["mean", "radial_directional"])
def test_an_outlier_is_not_in_the_version_and_the_record_says_why(
    tmp_path: Path, name: Literal["mean", "radial_directional"]
) -> None:
    rules = replace(RULES, merge=MergeRule(name))
    bench, without = Round(tmp_path / "1", rules), Round(tmp_path / "2", rules)
    deltas = bench.deltas()

    record = bench.publish({**deltas, "b": deltas["b"] * 100})
    pair = replace(CLOSE, contributors=(CLOSE.contributors[0], CLOSE.contributors[2]))
    expected = without.merger.publish(without.base, pair, without.spooled_of(deltas))

    assert [c.island for c in record.contributors] == ["a", "c"]
    assert list(record.rejected) == ["b"]
    assert re.fullmatch(
        r"[a-z ]+ of \w+ is [\d.]+: [\d.]+ is usual, [\d.]+ at most is merged", record.rejected["b"]
    )
    assert record.digest == expected.digest
    stored = bench.store.load(1)
    assert (stored.rejected, stored.combination) == (record.rejected, record.combination)
    assert set(stored.contributions) == {"a", "c"}
    assert list((tmp_path / "1" / "spool").iterdir()) == []


@pytest.mark.parametrize("name", ["mean", "radial_directional"])
def test_whom_the_sum_does_not_hold_is_left_out_too(
    tmp_path: Path, name: Literal["mean", "radial_directional"]
) -> None:
    """Its values are finite, and their sum, or the downlink codec's scale, is not."""
    rules = replace(RULES, merge=MergeRule(name))
    bench, without = Round(tmp_path / "1", rules, num_threads=2), Round(tmp_path / "2", rules)
    deltas = bench.deltas()
    wild = {**deltas, "b": deltas["b"].clone(), "c": deltas["c"].clone()}
    wild["b"][[8_000, 60_000]] = 3.4e38
    wild["c"][60_000] = 3.4e38

    record = bench.publish(wild)
    alone = replace(CLOSE, contributors=CLOSE.contributors[:1])
    expected = without.merger.publish(without.base, alone, without.spooled_of(deltas))

    assert sorted(record.rejected) == ["b", "c"]
    assert record.digest == expected.digest
    assert torch.equal(vector(record, "momentum"), vector(expected, "momentum"))
    assert list((tmp_path / "1" / "spool").iterdir()) == []
    assert not list(tmp_path.rglob("*.tmp"))


def test_where_all_are_refused_nothing_is_published_and_nothing_moves(tmp_path: Path) -> None:
    bench = Round(tmp_path, RULES)
    before = {name: vector(bench.base, name).clone() for name in bench.base.lanes[0].vectors}
    alone = replace(CLOSE, contributors=CLOSE.contributors[:1])
    spool = bench.spooled_of({name: delta * 1e20 for name, delta in bench.deltas().items()})

    with pytest.raises(NothingToMerge, match=r"a: norm of .* at most is merged") as caught:
        bench.merger.publish(bench.base, alone, spool)

    assert list(caught.value.rejected) == ["a"]
    assert all(torch.equal(vector(bench.base, name), values) for name, values in before.items())
    assert bench.publish().version == 1


@pytest.mark.parametrize("snapshot_rounds", [1, 4], ids=["snapshot", "log"])
def test_what_the_guard_knows_is_the_same_after_a_restart(
    tmp_path: Path, snapshot_rounds: int
) -> None:
    bench = Round(tmp_path, RULES)
    bench.store = FragmentStore(
        tmp_path / "store", bench.fragment, 4, snapshot_rounds=snapshot_rounds
    )
    bench.merger = replace(bench.merger, store=bench.store)
    pair = CLOSE.contributors[:2]
    record = bench.base
    for version in range(6):
        close = Close(RoundKey(0, 0, version, 0), pair, is_flush=False)
        record = bench.merger.publish(record, close, bench.spooled_of(bench.deltas()))
        assert not record.rejected

    recovered = FragmentStore(tmp_path / "store", bench.fragment, 4).recover()

    assert recovered is not None
    assert recovered.record.guard == record.guard
    assert len(History.from_bytes(record.guard, len(bench.merger.units))) == 6
    close = Close(RoundKey(0, 0, 6, 0), pair[:1], is_flush=False)
    deltas = {"a": bench.deltas()["a"] * 100}
    with pytest.raises(NothingToMerge):
        bench.merger.publish(recovered.record, close, bench.spooled_of(deltas))


@pytest.mark.parametrize("num_lanes", [1, 16])
def test_who_goes_another_way_is_left_out_but_not_of_a_flush(
    tmp_path: Path, num_lanes: int
) -> None:
    bench = Round(tmp_path, RULES, num_lanes=num_lanes, num_threads=2)
    without = Round(tmp_path / "without", RULES, num_lanes=num_lanes)
    flushed = Round(tmp_path / "flushed", RULES, num_lanes=num_lanes)
    deltas = {name: delta + bench.deltas()["d"] for name, delta in bench.deltas().items()}
    astray = {**deltas, "b": -deltas["b"]}
    pair = replace(CLOSE, contributors=(CLOSE.contributors[0], CLOSE.contributors[2]))
    expected = without.merger.publish(without.base, pair, without.spooled_of(deltas))
    flush = replace(CLOSE, is_flush=True)

    record = bench.publish(astray)
    last = flushed.merger.publish(flushed.base, flush, flushed.spooled_of(astray))

    assert list(record.rejected) == ["b"]
    assert re.fullmatch(
        r"its mean cosine to the other contributions is -0\.[45]\d+, theirs to each other is "
        r"0\.[45]\d+: 0\.0\d+ at least is merged",
        record.rejected["b"],
    )
    assert record.digest == expected.digest
    assert not last.rejected


def test_a_flush_is_judged_and_says_nothing_about_rounds(tmp_path: Path) -> None:
    bench = Round(tmp_path, RULES)
    deltas = bench.deltas()
    flush = replace(CLOSE, is_flush=True)

    record = bench.merger.publish(
        bench.base, flush, bench.spooled_of({**deltas, "c": deltas["c"] * 50})
    )

    assert list(record.rejected) == ["c"]
    assert record.guard == History.empty(len(bench.merger.units)).to_bytes()


@pytest.mark.parametrize(
    "rules",
    [
        RADIAL,
        replace(RULES, merge=MergeRule(weighting="tokens_times_rate")),
        replace(RULES, optimizer=OuterOptimizer("adam", 0.1, 0.0, 0)),
    ],
    ids=["radial", "rate", "adam"],
)
def test_a_version_is_recomputed_by_the_coefficients_in_its_record(
    tmp_path: Path, rules: PublicationRules
) -> None:
    bench = Round(tmp_path, rules)
    rules = bench.merger.rules
    first = bench.publish()
    second = bench.merger.publish(
        first, replace(CLOSE, key=RoundKey(0, 0, 1, 0)), bench.spooled_of(bench.deltas())
    )

    records = [bench.store.load(version) for version in range(3)]

    assert records[2].header() == second.header()
    for before, after in itertools.pairwise(records):
        # Whatever the rule is by then: the merge is the record's.
        now = replace(rules, merge=MergeRule())
        assert recompute(before, after, now, bench.fragment) == after.lane_digests
    if records[1].combination is not None:
        by_tokens = replace(records[1], combination=None)
        assert recompute(records[0], by_tokens, rules, bench.fragment) != first.lane_digests


def test_the_plain_mean_has_no_word_of_coefficients_in_its_header(tmp_path: Path) -> None:
    assert "merge" not in Round(tmp_path, RULES).publish().header()


def test_two_passes_keep_contributions_until_the_commit(tmp_path: Path) -> None:
    bench = Round(tmp_path, RADIAL)
    spool = bench.spooled_of(bench.deltas())
    seen: list[int] = []
    commit = bench.store.commit

    def watched(record: VersionRecord, draft: RecordDraft | None = None) -> None:
        seen.extend(len(spooled.read()) for lanes in spool.values() for spooled in lanes.values())
        commit(record, draft)

    bench.store.commit = watched  # type: ignore[method-assign]
    bench.merger.publish(bench.base, CLOSE, spool)

    assert len(seen) == 4 * len(bench.fragment.lanes)


def test_an_outer_step_that_diverges_leaves_both_moments_of_adam_alone(tmp_path: Path) -> None:
    adam = replace(RULES, optimizer=OuterOptimizer("adam", 0.1, 0.0, 0))
    bench = Round(tmp_path, adam)
    before = {name: vector(bench.base, name).clone() for name in bench.base.lanes[0].vectors}

    with pytest.raises(AggregationError, match="second_moment is not finite"):
        bench.publish({name: delta * 1e24 for name, delta in bench.deltas().items()})

    assert list(before) == ["theta", "published", "momentum", "second_moment"]
    assert all(torch.equal(vector(bench.base, name), values) for name, values in before.items())
    assert bench.publish().version == 1
