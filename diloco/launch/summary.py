"""What a finished run was, from its events and its durable records alone.

Every figure is read or recomputed; `as_text` says them in words, `summary.json` keeps them. An
island that returned, and all of them in a run that was resumed, had several starts: figures are
sums over starts, of what stands (`diloco.launch.lives`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.config.island import IslandConfig
from diloco.config.schema import Config
from diloco.launch.lives import IslandLife, effective, has_ended
from diloco.launch.text_account import TextSummary, text_summary
from diloco.launch.traffic import Traffic, data_parallel_traffic, diloco_traffic
from diloco.outer.fragments import Plan
from diloco.outer.schedule import Schedule
from diloco.rounds.publication import PublicationRules
from diloco.rounds.replay import FragmentReplay, Verdict
from diloco.rounds.store import FragmentStore
from diloco.telemetry.meter import utilisation
from transport.link import LinkProfile
from transport.units import format_bandwidth, format_bytes, format_duration

logger = logging.getLogger(__name__)

#: An island is called slower than another when its undisturbed step takes this many times as long.
_SLOWER = 1.1
#: Share of wall time from which on it is worth saying why an island was blocked.
_WORTH_SAYING = 0.01


@dataclass(frozen=True, slots=True)
class IslandSummary:
    """One island's life; bytes are those of all its carriers, headers included.

    `inner_steps` is where it ended, `num_steps` what it made: fewer after a warm start. Times are
    of its `num_starts` starts together, those of inner steps made in vain left out;
    `undisturbed_step_s` and `overwritten_steps` are of the last start alone; `lost_steps` are those
    that its `num_returns` returns cost. `published_nats_per_byte` is None of one that left early.
    """

    island: str
    shape: str
    inner_steps: int
    num_steps: int
    tokens: int
    local_nats_per_byte: float
    published_nats_per_byte: float | None
    utilisation: float
    goodput: float
    overwritten_steps: float
    blocked_s: float
    wall_s: float
    undisturbed_step_s: float
    bytes_up: int
    bytes_down: int
    digests: tuple[str, ...]
    num_starts: int
    num_returns: int
    lost_steps: int
    dropped_tokens: float = 0.0
    left_tokens: float = 0.0
    tflops_per_s: float = 0.0
    mfu: float = 0.0
    memory_bytes: int = 0

    @property
    def has_left_early(self) -> bool:
        """Whether it ended before the run did, and holds no last version."""
        return not self.digests

    @property
    def is_shared(self) -> bool:
        """Whether its quiet steps were not undisturbed (`diloco.telemetry.meter.utilisation`)."""
        inner_s = self.goodput * self.wall_s
        return self.num_steps * self.undisturbed_step_s > (1 + _WORTH_SAYING) * inner_s


@dataclass(frozen=True, slots=True)
class FragmentSummary:
    """A fragment's last version and whether it could be recomputed from its contributions.

    `is_bit_equal` is None where there was nothing to recompute: nothing was published, or an
    all-reduce handed on the mean of many islands. `problem` says what is not as it was published.
    """

    fragment_id: int
    version: int
    digest: str
    contributors: tuple[str, ...]
    recomputed_versions: tuple[int, ...]
    is_bit_equal: bool | None
    problem: str = ""
    merged_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ArrivalSummary:
    """Rounds of a run in which nobody waited, flushes left out, as its islands saw them merged.

    `num_solo` of them counted one island only. `total_tokens` is what ended the run.
    """

    num_rounds: int
    num_solo: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """What another way of training would have moved, and its time on the same link."""

    name: str
    bytes_up: int
    bytes_down: int
    transfer_s: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished run; `resumed_after`: inner steps of the checkpoints it was resumed from.

    `away` are islands that did not come back before a run ended that waited for nobody; they are
    not among `islands`. `max_nats_per_byte` is what the run file says that the loss must stay
    below; 0: nothing.
    """

    run: str
    link: str
    islands: tuple[IslandSummary, ...]
    fragments: tuple[FragmentSummary, ...]
    alternatives: tuple[Alternative, ...]
    resumed_after: tuple[int, ...]
    max_nats_per_byte: float
    arrival: ArrivalSummary | None = None
    text: TextSummary | None = None
    away: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What must not be in a finished run, each in a sentence; empty for a good one."""
        problems = []
        if not self.are_digests_equal:
            problems.append("islands do not hold the values that the syncer has recorded")
        if not self.are_versions_recomputed:
            problems.append(
                f"recomputing the last versions from their contributions: "
                f"{_recomputed_text(self.fragments)}"
            )
        if not self.is_loss_low_enough:
            problems.append(
                f"held-out loss of the published parameters {self._largest_loss:.4f} nats a byte, "
                f"not below evaluation.max_nats_per_byte = {self.max_nats_per_byte:g}"
            )
        return tuple(problems)

    @property
    def is_loss_low_enough(self) -> bool:
        """Whether the published parameters ended below the loss that the run file demands."""
        return not self.max_nats_per_byte or self._largest_loss < self.max_nats_per_byte

    @property
    def _largest_loss(self) -> float:
        losses = [island.published_nats_per_byte for island in self.islands]
        return max((loss for loss in losses if loss is not None), default=math.inf)

    @property
    def are_digests_equal(self) -> bool:
        """Whether every model that saw the end has what the syncer's last records hold."""
        published = tuple(fragment.digest for fragment in self.fragments)
        held = [island.digests for island in self.islands if not island.has_left_early]
        return bool(held) and all(digests == published for digests in held)

    @property
    def are_versions_recomputed(self) -> bool:
        """Whether all last versions were recomputed to the bit, where there are any."""
        return all(fragment.is_bit_equal is not False for fragment in self.fragments)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            **asdict(self),
            "are_digests_equal": self.are_digests_equal,
            "are_versions_recomputed": self.are_versions_recomputed,
            "problems": self.problems,
        }

    def as_text(self) -> str:
        """Say what happened, in a few sentences a line."""
        lines = [f"Run {self.run}: {len(self.islands)} islands, link {self.link}."]
        if self.resumed_after:
            steps = ", ".join(map(str, self.resumed_after))
            lines.append(
                f"  Resumed after inner step {steps}; figures are sums over the starts, of what "
                f"stands."
            )
        for island in self.islands:
            lines += _island_lines(island, self.islands)
        if self.away:
            lines.append(f"  Away when the run ended, and not counted: {', '.join(self.away)}.")
        if self.arrival is not None:
            lines.append(f"  {_arrival_text(self.arrival, self.islands, self.fragments)}")
        if self.text is not None:
            lines.append(f"  {self.text.as_text()}")
        versions = ", ".join(f"{f.fragment_id}: v{f.version}" for f in self.fragments)
        lines.append(
            f"  Published versions {versions}; digests "
            f"{'equal on every island' if self.are_digests_equal else 'DIFFER BETWEEN ISLANDS'}; "
            f"last versions recomputed from the retained contributions: "
            f"{_recomputed_text(self.fragments)}."
        )
        if self.max_nats_per_byte:
            lines.append(
                f"  Held-out loss of the published parameters "
                f"{'is' if self.is_loss_low_enough else 'IS NOT'} below the "
                f"{self.max_nats_per_byte:g} nats a byte of evaluation.max_nats_per_byte."
            )
        for alternative in self.alternatives:
            lines.append(f"  {_alternative_text(alternative, self.islands)}")
        return "\n".join(lines)


def summarise(
    config: Config,
    plan: Plan,
    schedule: Schedule,
    rules: PublicationRules,
    *,
    stores: Sequence[FragmentStore],
    events: Mapping[str, Sequence[Mapping[str, Any]]],
    link: LinkProfile | None,
) -> Summary:
    """Build the summary.

    Args:
        config: The run's configuration.
        plan: Its plan.
        schedule: Its schedule.
        rules: How an all-reduce published versions; a syncer's records name theirs.
        stores: Store of each fragment, in plan order.
        events: Island id -> effective events of all its ranks (`read_events`).
        link: Profile of the shaped link, None for the real one.

    Raises:
        ConfigError: If the events of an island are not those of one run from beginning to end.
    """
    away = (
        [island for island in sorted(events) if not has_ended(events[island])]
        if config.outer.is_on_arrival
        else []
    )
    lives = {
        island: IslandLife.of(island, config.islands[island].ranks, events[island])
        for island in sorted(events)
        if island not in away
    }
    resumed = {step for life in lives.values() for step in life.resumed_after}
    return Summary(
        run=config.run.name,
        link=_link_text(link),
        islands=tuple(
            _island_summary(island, config.islands[island], life) for island, life in lives.items()
        ),
        fragments=tuple(
            _fragment_summary(store, plan, rules, config.outer.retained_versions)
            for store in stores
        ),
        alternatives=()
        if config.outer.is_on_arrival  # of a schedule, and nobody had one
        else _alternatives(
            plan,
            schedule,
            link,
            start_step=min(life.inner_steps - life.num_steps for life in lives.values()),
        ),
        resumed_after=tuple(sorted(resumed)),
        max_nats_per_byte=config.evaluation.max_nats_per_byte,
        arrival=_arrival_summary(config.total_tokens, events)
        if config.outer.is_on_arrival
        else None,
        text=text_summary(config, events),
        away=tuple(away),
    )


def _arrival_summary(
    total_tokens: int, events: Mapping[str, Sequence[Mapping[str, Any]]]
) -> ArrivalSummary:
    merges = [e for of in events.values() for e in of if e["kind"] == "fragment_merged"]
    rounds = {
        (e["fragment_id"], e["version"]): len(e["contributors"])
        for e in merges
        if not e["is_flush"]
    }
    return ArrivalSummary(len(rounds), sum(count == 1 for count in rounds.values()), total_tokens)


def read_events(directory: Path, islands: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Read the effective events of all ranks: what later starts made anew or gave up is left out.

    A line that a killed writer tore is left out too, with a warning.
    """
    read = [event for path in sorted(directory.glob("events-*.jsonl")) for event in _whole(path)]
    return {
        name: effective([event for event in read if event.get("island") == name])
        for name in islands
    }


def _whole(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines."""
    for number, line in enumerate(path.read_text(errors="replace").split("\n"), start=1):
        try:
            event = json.loads(line)
        except ValueError:
            if line:
                logger.warning("torn line skipped, path=%s line=%d", path, number)
            continue
        if isinstance(event, dict):
            yield event


def _arrival_text(
    arrival: ArrivalSummary,
    islands: Sequence[IslandSummary],
    fragments: Sequence[FragmentSummary],
) -> str:
    trained = sum(island.tokens for island in islands)
    dropped = sum(island.dropped_tokens for island in islands)
    merged = [fragment.merged_tokens for fragment in fragments]
    solo = arrival.num_solo / arrival.num_rounds if arrival.num_rounds else 0.0
    over = trained / arrival.total_tokens - 1
    return (
        f"Nobody waited: {arrival.total_tokens:,} merged tokens end the run; {trained:,} were "
        f"trained ({over:+.1%} of the plan), {min(merged):,} to {max(merged):,} merged a "
        f"fragment, {dropped:,.0f} ({dropped / trained:.1%}) dropped, as rounds did not wait for "
        f"them. {arrival.num_solo} of {arrival.num_rounds} rounds ({solo:.1%}) counted one island "
        f"only."
    )


def _island_lines(i: IslandSummary, islands: Sequence[IslandSummary]) -> list[str]:
    """Say what one island did."""
    last = " of the last start" if i.num_starts > 1 else ""
    published = (
        "it left before the end with"
        if i.published_nats_per_byte is None
        else f"held-out loss of the published parameters {i.published_nats_per_byte:.4f} nats a "
        f"byte, of its own before the flush"
    )
    lines = [
        f"  {i.island} ({i.shape}): {i.num_steps} inner steps, {i.tokens:,} tokens in "
        f"{format_duration(i.wall_s)}, evaluations not counted; {published} "
        f"{i.local_nats_per_byte:.4f}.",
        f"    utilisation {i.utilisation:.1%} (undisturbed step "
        f"{format_duration(i.undisturbed_step_s)}), not blocked {1 - i.blocked_s / i.wall_s:.1%}, "
        f"goodput {i.goodput:.1%}, blocked {i.blocked_s:.2f} s, overwritten steps{last} "
        f"{i.overwritten_steps:.1f}; moved {format_bytes(i.bytes_up)} up, "
        f"{format_bytes(i.bytes_down)} down.",
    ]
    if i.tflops_per_s:
        mfu = f", MFU {i.mfu:.1%}" if i.mfu else ""
        lines.append(
            f"    Computed {i.tflops_per_s:.3g} TFLOP/s a rank in inner steps{mfu}; a rank took at "
            f"most {format_bytes(i.memory_bytes)} of its host's memory."
        )
    if i.is_shared:
        lines.append(
            "    Utilisation is at most that: its steps beside exchanges were as fast as those "
            "without, so something else ran on its cores."
        )
    if i.num_returns:
        times = "once" if i.num_returns == 1 else f"{i.num_returns} times"
        lines.append(f"    Returned {times}: {i.lost_steps} inner steps were lost.")
    if (waited := _wait_text(i, islands)) is not None:
        lines.append(f"    {waited}")
    return lines


def _island_summary(island: str, config: IslandConfig, life: IslandLife) -> IslandSummary:
    return IslandSummary(
        island=island,
        shape=_shape_text(config),
        inner_steps=life.inner_steps,
        num_steps=life.num_steps,
        tokens=life.tokens,
        local_nats_per_byte=life.nats_per_byte["local"],
        published_nats_per_byte=life.nats_per_byte["published"] if life.digests else None,
        utilisation=utilisation(
            num_steps=life.num_steps,
            undisturbed_step_s=life.undisturbed_step_s,
            inner_s=life.inner_s,
            wall_s=life.wall_s,
        ),
        goodput=life.inner_s / life.wall_s,
        overwritten_steps=life.overwritten_steps,
        blocked_s=life.blocked_s,
        wall_s=life.wall_s,
        undisturbed_step_s=life.undisturbed_step_s,
        bytes_up=life.bytes_up,
        bytes_down=life.bytes_down,
        digests=life.digests,
        num_starts=life.num_starts,
        num_returns=life.num_returns,
        lost_steps=life.lost_steps,
        dropped_tokens=life.dropped_tokens,
        left_tokens=life.left_tokens,
        tflops_per_s=life.tflops_per_s,
        mfu=life.mfu,
        memory_bytes=life.memory_bytes,
    )


def _fragment_summary(
    store: FragmentStore, plan: Plan, rules: PublicationRules, retained_versions: int
) -> FragmentSummary:
    """Make the last versions again (`diloco.rounds.replay`)."""
    recovered = store.recover()
    assert recovered is not None, "a finished run has a durable version of every fragment"
    last = recovered.record
    replay = FragmentReplay(store.store_dir, plan, last.fragment_id, unnamed=rules)
    replayed = list(replay.run(max(1, last.version - retained_versions + 1)))
    made = [each for each in replayed if each.verdict in (Verdict.RECOMPUTED, Verdict.DIFFERENT)]
    wrong = [each for each in replayed if each.is_wrong]
    return FragmentSummary(
        fragment_id=last.fragment_id,
        version=last.version,
        digest=last.digest.hex(),
        contributors=tuple(c.island for c in last.contributors),
        recomputed_versions=tuple(each.version for each in reversed(made)),
        is_bit_equal=not wrong if made or wrong else None,
        problem="; ".join(f"version {each.version}: {each.detail}" for each in wrong),
        merged_tokens=last.merged_tokens,
    )


def _recomputed_text(fragments: Sequence[FragmentSummary]) -> str:
    """Say what recomputing came to, without praise for what was not done."""
    if problems := [f"fragment {f.fragment_id} {f.problem}" for f in fragments if f.problem]:
        return f"NOT EQUAL, {'; '.join(problems)}"
    num_done = sum(len(fragment.recomputed_versions) for fragment in fragments)
    if not num_done:
        return "there are none"
    untouched = [str(f.fragment_id) for f in fragments if f.is_bit_equal is None]
    none_of = f" (none of fragment {', '.join(untouched)})" if untouched else ""
    return f"{num_done} bit-equal{none_of}"


def _alternatives(
    plan: Plan, schedule: Schedule, link: LinkProfile | None, start_step: int
) -> tuple[Alternative, ...]:
    fragments = diloco_traffic(
        plan, schedule, uplink_codec="float32", downlink_codec="float32", start_step=start_step
    )
    data_parallel = data_parallel_traffic(plan, schedule.inner_steps - start_step)
    return (
        _alternative("float32 fragments on the same schedule", fragments, link),
        _alternative("data parallel at every inner step", data_parallel, link),
    )


def _alternative(name: str, traffic: Traffic, link: LinkProfile | None) -> Alternative:
    return Alternative(
        name,
        traffic.bytes_up,
        traffic.bytes_down,
        None if link is None else traffic.transfer_s(link),
    )


def _alternative_text(alternative: Alternative, islands: Sequence[IslandSummary]) -> str:
    moved = max(island.bytes_up + island.bytes_down for island in islands)
    total = alternative.bytes_up + alternative.bytes_down
    text = (
        f"{alternative.name.capitalize()} would have moved {format_bytes(alternative.bytes_up)} up "
        f"and {format_bytes(alternative.bytes_down)} down an island, {total / moved:.1f} times as "
        f"much"
    )
    if alternative.transfer_s is None:
        return text + "."
    return text + f": {format_duration(alternative.transfer_s)} of transfers on this link."


def _wait_text(island: IslandSummary, islands: Sequence[IslandSummary]) -> str | None:
    """Name the slowest island if waiting for it explains most of what this one was blocked.

    All islands make the same number of inner steps, so a faster one waits about
    num_steps * (slowest undisturbed step - its own); what goes beyond is the link's.
    """
    slowest = max(islands, key=lambda other: other.undisturbed_step_s)
    times = slowest.undisturbed_step_s / island.undisturbed_step_s
    ahead_s = island.num_steps * (slowest.undisturbed_step_s - island.undisturbed_step_s)
    is_blocked = island.blocked_s >= _WORTH_SAYING * island.wall_s
    if times < _SLOWER or ahead_s < island.blocked_s / 2 or not is_blocked:
        return None
    return (
        f"Utilisation is lost by waiting: it mostly waited for {slowest.island}, whose inner step "
        f"takes {times:.1f} times as long."
    )


def _shape_text(config: IslandConfig) -> str:
    axes = [f"{name} {size}" for name, size in config.mesh.model_dump().items() if size > 1]
    ranks = f"{config.ranks} rank{'s' if config.ranks > 1 else ''}"
    return ", ".join([ranks, *axes])


def _link_text(link: LinkProfile | None) -> str:
    if link is None:
        return "as it is"
    return (
        f"{link.name} ({format_bandwidth(link.up.bandwidth_bps)} up, "
        f"{format_bandwidth(link.down.bandwidth_bps)} down, "
        f"{format_duration(link.up.delay_s + link.down.delay_s)} round trip)"
    )
