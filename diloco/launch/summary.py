"""What a finished run was, from its events and its durable records alone.

Every figure is read or recomputed; `as_text` says them in words, `summary.json` keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.config.schema import Config, IslandConfig
from diloco.errors import ConfigError
from diloco.launch.traffic import Traffic, data_parallel_traffic, diloco_traffic
from diloco.outer.fragments import Plan
from diloco.outer.schedule import Schedule
from diloco.rounds.publication import PublicationRules
from diloco.rounds.store import FragmentStore, VersionRecord, recompute
from transport.link import LinkProfile
from transport.units import format_bandwidth, format_bytes, format_duration

#: An island is called slower than another when its undisturbed step takes this many times as long.
_SLOWER = 1.1
#: Share of wall time from which on it is worth saying why an island was blocked.
_WORTH_SAYING = 0.01


@dataclass(frozen=True, slots=True)
class IslandSummary:
    """One island's life; bytes are those of all its carriers, headers included."""

    island: str
    shape: str
    inner_steps: int
    tokens: int
    local_nats_per_byte: float
    published_nats_per_byte: float
    utilisation: float
    goodput: float
    overwritten_steps: float
    blocked_s: float
    wall_s: float
    undisturbed_step_s: float
    bytes_up: int
    bytes_down: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FragmentSummary:
    """A fragment's last version and whether it could be recomputed from its contributions."""

    fragment_id: int
    version: int
    digest: str
    contributors: tuple[str, ...]
    recomputed_versions: tuple[int, ...]
    is_bit_equal: bool


@dataclass(frozen=True, slots=True)
class Alternative:
    """What another way of training would have moved, and its time on the same link."""

    name: str
    bytes_up: int
    bytes_down: int
    transfer_s: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished run."""

    run: str
    link: str
    islands: tuple[IslandSummary, ...]
    fragments: tuple[FragmentSummary, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def are_digests_equal(self) -> bool:
        """Whether every island ended with the bytes that the syncer's last records hold."""
        published = tuple(fragment.digest for fragment in self.fragments)
        return all(island.digests == published for island in self.islands)

    @property
    def are_versions_recomputed(self) -> bool:
        """Whether every fragment's last version was recomputed to the bit."""
        return all(fragment.is_bit_equal for fragment in self.fragments)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            **asdict(self),
            "are_digests_equal": self.are_digests_equal,
            "are_versions_recomputed": self.are_versions_recomputed,
        }

    def as_text(self) -> str:
        """Say what happened, in a few sentences a line."""
        lines = [f"Run {self.run}: {len(self.islands)} islands, link {self.link}."]
        for i in self.islands:
            lines.append(
                f"  {i.island} ({i.shape}): {i.inner_steps} inner steps, {i.tokens:,} tokens in "
                f"{format_duration(i.wall_s)}, evaluations not counted; held-out loss of the "
                f"published parameters {i.published_nats_per_byte:.4f} nats a byte, of its own "
                f"before the flush {i.local_nats_per_byte:.4f}."
            )
            lines.append(
                f"    utilisation {i.utilisation:.1%} (undisturbed step "
                f"{format_duration(i.undisturbed_step_s)}), not blocked "
                f"{1 - i.blocked_s / i.wall_s:.1%}, goodput {i.goodput:.1%}, blocked "
                f"{i.blocked_s:.2f} s, overwritten steps {i.overwritten_steps:.1f}; moved "
                f"{format_bytes(i.bytes_up)} up, {format_bytes(i.bytes_down)} down."
            )
            if (waited := _wait_text(i, self.islands)) is not None:
                lines.append(f"    {waited}")
        versions = ", ".join(f"{f.fragment_id}: v{f.version}" for f in self.fragments)
        lines.append(
            f"  Published versions {versions}; digests "
            f"{'equal on every island' if self.are_digests_equal else 'DIFFER BETWEEN ISLANDS'}; "
            f"last versions recomputed from the retained contributions: "
            f"{'bit-equal' if self.are_versions_recomputed else 'NOT EQUAL'}."
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
        rules: How versions were published.
        stores: Store of each fragment, in plan order.
        events: Island id -> events of all its ranks.
        link: Profile of the shaped link, None for the real one.

    Raises:
        ConfigError: If the events of an island are not those of one start from beginning to end.
    """
    return Summary(
        run=config.run.name,
        link=_link_text(link),
        islands=tuple(
            _island_summary(island, config.islands[island], events[island])
            for island in sorted(events)
        ),
        fragments=tuple(
            _fragment_summary(store, rules, config.outer.retained_versions) for store in stores
        ),
        alternatives=(
            _alternative(
                "float32 fragments on the same schedule",
                diloco_traffic(plan, schedule, uplink_codec="float32", downlink_codec="float32"),
                link,
            ),
            _alternative(
                "data parallel at every inner step",
                data_parallel_traffic(plan, schedule.inner_steps),
                link,
            ),
        ),
    )


def read_events(directory: Path, islands: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Read the events of all ranks; a last line torn by a crash is left out."""
    events: dict[str, list[dict[str, Any]]] = {}
    for island in islands:
        events[island] = []
        for path in sorted(directory.glob("events-*.jsonl")):
            lines = path.read_text().split("\n")
            parsed = [json.loads(line) for line in lines[:-1] if line]
            events[island] += [event for event in parsed if event["island"] == island]
    return events


def _island_summary(
    island: str, config: IslandConfig, events: Sequence[Mapping[str, Any]]
) -> IslandSummary:
    _insist_on_one_start(island, config.ranks, events)
    ended = [event for event in events if event["kind"] == "island_ended"]
    leader = next(event for event in ended if event["island_rank"] == 0)
    evaluated = {e["parameters"]: e["nats_per_byte"] for e in events if e["kind"] == "evaluated"}
    return IslandSummary(
        island=island,
        shape=_shape_text(config),
        inner_steps=leader["inner_step"],
        tokens=leader["tokens"],
        local_nats_per_byte=evaluated["local"],
        published_nats_per_byte=evaluated["published"],
        utilisation=leader["utilisation"],
        goodput=leader["goodput"],
        overwritten_steps=leader["overwritten_steps"],
        blocked_s=leader["blocked_s"],
        wall_s=leader["wall_s"],
        undisturbed_step_s=leader["undisturbed_step_s"],
        bytes_up=sum(event["bytes_up"] for event in ended),
        bytes_down=sum(event["bytes_down"] for event in ended),
        digests=tuple(leader["digests"]),
    )


def _insist_on_one_start(island: str, num_ranks: int, events: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the events of several starts, whose figures would be mixed.

    One start ends once on every rank, and its leader makes every inner step once.
    """
    ended = sorted(event["island_rank"] for event in events if event["kind"] == "island_ended")
    steps = [event["inner_step"] for event in events if event["kind"] == "inner_step"]
    if ended == list(range(num_ranks)) and len(steps) == len(set(steps)):
        return
    raise ConfigError(
        f"the events of island {island} are not those of one start: island_ended was written by "
        f"ranks {ended} of {num_ranks}, inner steps {len(steps)} times of which {len(set(steps))} "
        f"differ. Give every run a telemetry.dir of its own"
    )


def _fragment_summary(
    store: FragmentStore, rules: PublicationRules, retained_versions: int
) -> FragmentSummary:
    recovered = store.recover()
    assert recovered is not None, "a finished run has a durable version of every fragment"
    last = record = recovered.record
    recomputed: list[int] = []
    is_equal = True
    while record.version > 0 and len(recomputed) < retained_versions:
        before: VersionRecord = store.load(record.version - 1)
        is_equal = is_equal and recompute(before, record, rules) == record.lane_digests
        recomputed.append(record.version)
        record = before
    return FragmentSummary(
        fragment_id=last.fragment_id,
        version=last.version,
        digest=last.digest.hex(),
        contributors=tuple(c.island for c in last.contributors),
        recomputed_versions=tuple(recomputed),
        is_bit_equal=is_equal,
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
    inner_steps * (slowest undisturbed step - its own); what goes beyond is the link's.
    """
    slowest = max(islands, key=lambda other: other.undisturbed_step_s)
    times = slowest.undisturbed_step_s / island.undisturbed_step_s
    ahead_s = island.inner_steps * (slowest.undisturbed_step_s - island.undisturbed_step_s)
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
