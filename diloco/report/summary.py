"""Summarises a finished run, from its events and its durable records alone.

Every figure is read or recomputed; `as_text` says them in words, `summary.json` keeps them. An
island that returned, and all of them in a run that was resumed, had several starts: figures are
sums over starts, of what stands (`diloco.report.island_starts`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.traffic import Traffic, data_parallel_traffic, diloco_traffic
from diloco.outer.fragments import Plan
from diloco.outer.schedule import Schedule
from diloco.report.island_starts import effective, has_ended, island_summary, resumed_after
from diloco.report.summary_text import (
    ArrivalSummary,
    FragmentSummary,
    IslandSummary,
    TextSummary,
    TrafficAlternative,
    alternative_text,
    arrival_text,
    island_lines,
    link_text,
    recomputed_text,
    text_summary,
)
from diloco.transport.shaping.link import LinkProfile
from diloco.versions.replay import FragmentReplay, ReplayVerdict
from diloco.versions.store import FragmentStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished run; `resumed_after`: inner steps of the checkpoints it was resumed from.

    `away` are islands that did not come back before a run ended that waited for nobody; they are
    not among `islands`. `max_nats_per_byte` is what the run file says that the loss must stay
    below; 0: nothing. `alarms` are those that the audit log has, each in a sentence.
    """

    run: str
    link: str
    islands: tuple[IslandSummary, ...]
    fragments: tuple[FragmentSummary, ...]
    alternatives: tuple[TrafficAlternative, ...]
    resumed_after: tuple[int, ...]
    max_nats_per_byte: float
    arrival: ArrivalSummary | None = None
    text: TextSummary | None = None
    away: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What must not be in a finished run, each in a sentence; empty for a good one."""
        problems = []
        if not self.are_digests_equal:
            problems.append("islands do not hold the values that the syncer has recorded")
        if not self.are_versions_recomputed:
            problems.append(
                f"recomputing the last versions from their contributions: "
                f"{recomputed_text(self.fragments)}"
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
            lines += island_lines(island, self.islands)
        if self.away:
            lines.append(f"  Away when the run ended, and not counted: {', '.join(self.away)}.")
        if self.arrival is not None:
            lines.append(f"  {arrival_text(self.arrival, self.islands, self.fragments)}")
        if self.text is not None:
            lines.append(f"  {self.text.as_text()}")
        versions = ", ".join(f"{f.fragment_id}: v{f.version}" for f in self.fragments)
        lines.append(
            f"  Published versions {versions}; digests "
            f"{'equal on every island' if self.are_digests_equal else 'DIFFER BETWEEN ISLANDS'}; "
            f"last versions recomputed from the retained contributions: "
            f"{recomputed_text(self.fragments)}."
        )
        if self.max_nats_per_byte:
            lines.append(
                f"  Held-out loss of the published parameters "
                f"{'is' if self.is_loss_low_enough else 'IS NOT'} below the "
                f"{self.max_nats_per_byte:g} nats a byte of evaluation.max_nats_per_byte."
            )
        for alternative in self.alternatives:
            lines.append(f"  {alternative_text(alternative, self.islands)}")
        lines += [f"  Alarm: {alarm}" for alarm in self.alarms]
        return "\n".join(lines)


def summarise(
    config: Config,
    plan: Plan,
    schedule: Schedule,
    *,
    stores: Sequence[FragmentStore],
    events: Mapping[str, Sequence[Mapping[str, Any]]],
    link: LinkProfile | None,
    alarms: Sequence[Mapping[str, Any]] = (),
) -> Summary:
    """Build the summary.

    Args:
        config: The run's configuration.
        plan: Its plan.
        schedule: Its schedule.
        stores: Store of each fragment, in plan order.
        events: Island id -> effective events of all its ranks (`read_events`).
        link: Profile of the shaped link, None for the real one.
        alarms: Entries of the audit log.

    Raises:
        ConfigError: If the events of an island are not those of one run from beginning to end.
    """
    away = (
        [island for island in sorted(events) if not has_ended(events[island])]
        if config.outer.is_on_arrival
        else []
    )
    there = [island for island in sorted(events) if island not in away]
    if not there:
        raise ConfigError(
            f"no island of the run {config.run.name!r} has come to its end ({', '.join(away)} have "
            f"left before): it was stopped or has failed. Go on with it (diloco coordinator "
            f"RUN.toml --resume), then type this again"
        )
    islands = tuple(island_summary(name, config.islands[name], events[name]) for name in there)
    resumed = {step for name in there for step in resumed_after(events[name])}
    return Summary(
        run=config.run.name,
        link=link_text(link),
        islands=islands,
        fragments=tuple(
            _fragment_summary(store, plan, config.outer.retained_versions) for store in stores
        ),
        alternatives=()
        if config.outer.is_on_arrival  # of a schedule, and nobody had one
        else _alternatives(
            plan,
            schedule,
            link,
            start_step=min(island.inner_steps - island.num_steps for island in islands),
        ),
        resumed_after=tuple(sorted(resumed)),
        max_nats_per_byte=config.evaluation.max_nats_per_byte,
        arrival=_arrival_summary(config.total_tokens, events)
        if config.outer.is_on_arrival
        else None,
        text=text_summary(config, events),
        away=tuple(away),
        alarms=_alarm_texts(alarms),
    )


def _alarm_texts(alarms: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Say each alarm once, with its newest text and how often it began to hold."""
    about = [(a["reporter"], a["kind"], a["island"], a["fragment_id"]) for a in alarms]
    newest = dict(zip(about, alarms, strict=True))
    texts = []
    for key, alarm in newest.items():
        island = [f"island {alarm['island']}"] if alarm["island"] else []
        fragment = [f"fragment {alarm['fragment_id']}"] if alarm["fragment_id"] >= 0 else []
        times = f"{count} times, by {key[0]}" if (count := about.count(key)) > 1 else f"by {key[0]}"
        texts.append(f"{', '.join([alarm['kind'], *island, *fragment])}: {alarm['text']} ({times})")
    return tuple(texts)


def _arrival_summary(
    total_tokens: int, events: Mapping[str, Sequence[Mapping[str, Any]]]
) -> ArrivalSummary:
    merges = [e for of in events.values() for e in of if e["kind"] == "fragment_merged"]
    merges.sort(key=lambda e: len(e["contributors"]))  # not every rank knows them
    rounds = {
        (e["fragment_id"], e["version"]): len(e["contributors"])
        for e in merges
        if not e["is_flush"]
    }
    return ArrivalSummary(len(rounds), sum(count == 1 for count in rounds.values()), total_tokens)


def read_events(directory: Path, islands: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Read the effective events of all ranks: what later starts made again or gave up is left out.

    A line that a killed writer tore is left out too, with a warning.
    """
    paths = sorted(directory.glob("events-*.jsonl"))
    read: dict[str, list[dict[str, Any]]] = {name: [] for name in islands}
    for path in paths:
        for event in event_lines(path):
            if (island := str(event.get("island"))) in read:
                read[island].append(event)
    return {name: effective(events) for name, events in read.items()}


def event_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of one file, as they are; a torn line is left out, with a warning."""
    if not path.is_file():
        logger.warning("no regular file, skipped, path=%s", path)
        return
    with path.open(errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                if line != "\n":
                    logger.warning("torn line skipped, path=%s line=%d", path, number)
                continue
            if isinstance(event, dict):
                yield event


def _fragment_summary(store: FragmentStore, plan: Plan, retained_versions: int) -> FragmentSummary:
    """Make the last versions again (`diloco.versions.replay`)."""
    if (recovered := store.recover()) is None:
        raise ConfigError(
            f"{store.store_dir} has no published version of fragment {store.fragment.fragment_id}: "
            f"there is nothing to sum up. The logs in coordinator.state_dir say how the run ended"
        )
    last = recovered.record
    replay = FragmentReplay(store.store_dir, plan, last.fragment_id)
    replayed = list(replay.run(max(1, last.version - retained_versions + 1)))
    made = [
        each
        for each in replayed
        if each.verdict in (ReplayVerdict.RECOMPUTED, ReplayVerdict.DIFFERENT)
    ]
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


def _alternatives(
    plan: Plan, schedule: Schedule, link: LinkProfile | None, start_step: int
) -> tuple[TrafficAlternative, ...]:
    fragments = diloco_traffic(
        plan, schedule, uplink_codec="float32", downlink_codec="float32", start_step=start_step
    )
    data_parallel = data_parallel_traffic(plan, schedule.inner_steps - start_step)
    return (
        _alternative("float32 fragments on the same schedule", fragments, link),
        _alternative("data parallel at every inner step", data_parallel, link),
    )


def _alternative(name: str, traffic: Traffic, link: LinkProfile | None) -> TrafficAlternative:
    return TrafficAlternative(
        name,
        traffic.bytes_up,
        traffic.bytes_down,
        None if link is None else traffic.transfer_s(link),
    )
