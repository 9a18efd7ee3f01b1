"""The figures of a summary and their words: islands, fragments, other ways of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.config.island import IslandConfig
from diloco.config.schema import Config
from diloco.protocol.run.slots import Account, Holding, account
from diloco.transport.shaping.link import LinkProfile
from diloco.transport.units import format_bandwidth, format_bytes, format_duration

#: Share of wall time from which on it is worth saying why an island was blocked.
WORTH_SAYING = 0.01
#: An island is called slower than another when its undisturbed step takes this many times as long.
_SLOWER = 1.1


@dataclass(frozen=True, slots=True)
class IslandSummary:
    """One island's life; bytes are those of all its carriers, headers included.

    `inner_steps` is where it ended, `num_steps` what it made: fewer after a warm start. Times are
    of its `num_starts` starts together, those of inner steps made in vain left out;
    `undisturbed_step_s` and `overwritten_steps` are of the last start alone; `lost_steps` are those
    that its `num_returns` returns cost. Losses are None where the loop told none;
    `published_nats_per_byte` is of one that left early, too.
    """

    island: str
    shape: str
    inner_steps: int
    num_steps: int
    tokens: int
    local_nats_per_byte: float | None
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
        return self.num_steps * self.undisturbed_step_s > (1 + WORTH_SAYING) * inner_s


@dataclass(frozen=True, slots=True)
class FragmentSummary:
    """A fragment's last version and whether it could be recomputed from its contributions.

    `is_bit_equal` is None where there was nothing to recompute. `problem` says what is not as it
    was published.
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
class TrafficAlternative:
    """The traffic of another way of training, and its time on the same link."""

    name: str
    bytes_up: int
    bytes_down: int
    transfer_s: float | None


def island_lines(i: IslandSummary, islands: Sequence[IslandSummary]) -> list[str]:
    """Say what one island did."""
    last = " of the last start" if i.num_starts > 1 else ""
    lines = [
        f"  {i.island} ({i.shape}): {i.num_steps} inner steps, {i.tokens:,} tokens in "
        f"{format_duration(i.wall_s)}, evaluations not counted; {_losses_text(i)}.",
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
            "    Utilisation is at most that: its steps during exchanges were as fast as those "
            "without, so something else ran on its cores."
        )
    if i.num_returns:
        times = "once" if i.num_returns == 1 else f"{i.num_returns} times"
        lines.append(f"    Returned {times}: {i.lost_steps} inner steps were lost.")
    if (waited := _wait_text(i, islands)) is not None:
        lines.append(f"    {waited}")
    return lines


def _losses_text(i: IslandSummary) -> str:
    """Say the held-out losses that are known."""
    local, published = i.local_nats_per_byte, i.published_nats_per_byte
    if i.has_left_early:
        return "it left before the end" + ("" if local is None else f" with {local:.4f}")
    if published is None:
        return "its loop told no held-out loss at the end"
    own = "" if local is None else f", of its own before the flush {local:.4f}"
    return f"held-out loss of the published parameters {published:.4f} nats a byte{own}"


def arrival_text(
    arrival: ArrivalSummary, islands: Sequence[IslandSummary], fragments: Sequence[FragmentSummary]
) -> str:
    """Say what a run came to in which nobody waited."""
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


def recomputed_text(fragments: Sequence[FragmentSummary]) -> str:
    """Say what recomputing came to, without praise for what was not done."""
    if problems := [f"fragment {f.fragment_id} {f.problem}" for f in fragments if f.problem]:
        return f"NOT EQUAL, {'; '.join(problems)}"
    num_done = sum(len(fragment.recomputed_versions) for fragment in fragments)
    if not num_done:
        return "there are none"
    untouched = [str(f.fragment_id) for f in fragments if f.is_bit_equal is None]
    none_of = f" (none of fragment {', '.join(untouched)})" if untouched else ""
    return f"{num_done} bit-equal{none_of}"


def alternative_text(alternative: TrafficAlternative, islands: Sequence[IslandSummary]) -> str:
    """Say what another way of training would have moved."""
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
    is_blocked = island.blocked_s >= WORTH_SAYING * island.wall_s
    if times < _SLOWER or ahead_s < island.blocked_s / 2 or not is_blocked:
        return None
    return (
        f"Utilisation is lost by waiting: it mostly waited for {slowest.island}, whose inner step "
        f"takes {times:.1f} times as long."
    )


def shape_text(config: IslandConfig) -> str:
    """Say of what ranks an island is."""
    ranks = f"{config.ranks} rank{'s' if config.ranks > 1 else ''}"
    return ", ".join(filter(None, [ranks, config.mesh.shape_text]))


def link_text(link: LinkProfile | None) -> str:
    """Say what the link between the islands is."""
    if link is None:
        return "as it is"
    return (
        f"{link.name} ({format_bandwidth(link.up.bandwidth_bps)} up, "
        f"{format_bandwidth(link.down.bandwidth_bps)} down, "
        f"{format_duration(link.up.delay_s + link.down.delay_s)} round trip)"
    )


Events = Sequence[Mapping[str, Any]]  # JSON values, as a sink wrote them


@dataclass(frozen=True, slots=True)
class TextSummary:
    """Accounts by source; `unit` is what is counted, a draw.

    `num_holdings` counts how often some start of an island took a slot, its first ones included;
    `most_untold` are the most draws that an island had ahead of what the coordinator knew;
    `num_beyond` counts how often one went beyond the bound, as the coordinator did not answer.
    """

    accounts: dict[str, Account]
    unit: str
    num_holdings: int
    most_untold: int
    handover_samples: int
    num_beyond: int = 0

    def as_text(self) -> str:
        """Say it in a line."""
        sources = "; ".join(
            f"{source}: {found.trained:,} trained, {found.repeated:,} of them again, "
            f"{found.skipped:,} skipped"
            + (f", {found.abandoned:,} given up by resumes in addition" if found.abandoned else "")
            for source, found in self.accounts.items()
        )
        elsewhere = (
            " (or drawn by islands whose events are elsewhere)"
            if any(found.skipped for found in self.accounts.values())
            else ""
        )
        times = "once" if self.num_beyond == 1 else f"{self.num_beyond} times"
        beyond = f", passed {times} as the coordinator did not answer" if self.num_beyond else ""
        return (
            f"Text in {self.unit}: {sources}{elsewhere}. Slots were taken up {self.num_holdings} "
            f"times; an island was at most {self.most_untold:,} ahead of what it had told "
            f"(data.handover_samples = {self.handover_samples:,}{beyond})."
        )


def text_summary(config: Config, events: Mapping[str, Events]) -> TextSummary | None:
    """Add up what was drawn; None where nothing was noted: every island had one slot for ever.

    Args:
        config: The run's configuration.
        events: Island id -> its events, of all its starts.
    """
    found = [event for of in events.values() for event in of]
    drawn = [event for event in found if event["kind"] == "slot_drawn"]
    beyond = [event for event in found if event["kind"] == "text_untold"]
    if not drawn:
        return None
    last = {(e["island"], e["incarnation"], e["slot"], e["grant"]): e for e in drawn}
    holdings = [Holding(e["timeline"], e["slot"], e["begun"], e["drawn"]) for e in last.values()]
    return TextSummary(
        accounts=account(holdings),
        unit="batches" if config.data.source == "stdlib" else "samples",
        num_holdings=len(holdings),
        most_untold=max(event["untold"] for event in (*drawn, *beyond)),
        handover_samples=config.data.handover_samples,
        num_beyond=len(beyond),
    )
