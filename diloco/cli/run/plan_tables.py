"""What `diloco plan` prints of a run from its file alone, without its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.transport.units import format_bytes, format_duration

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.forecast.forecast import (
        ArrivalForecast,
        DirectionForecast,
        Forecast,
        FragmentForecast,
        SyncerForecast,
    )

_T = TypeVar("_T")
#: Of a table by fragments or by sends; --json has all.
_MOST_ROWS = 32


def show_forecast(console: Console, planned: Forecast) -> None:
    """Print what follows from the file alone."""
    flushed = ", then a flush of every fragment" if planned.is_flushed else ""
    length = f"{planned.inner_steps} inner steps, {planned.num_sends} sends"
    if planned.arrival is not None:
        length = f"until {planned.arrival.total_tokens:,} tokens are merged"
    console.print(
        f"Run {planned.run}: {planned.parameters:,} parameters in "
        f"{len(planned.fragments)} fragments; {length}{flushed}."
    )
    tokens = ", ".join(f"{name} {number:,}" for name, number in planned.tokens.items())
    console.print(f"Tokens: {tokens}; together {sum(planned.tokens.values()):,}.\n")
    console.print(FittedTable.of(_ends_of(planned.fragments), _FRAGMENTS))
    if hidden := len(planned.fragments) - len(_ends_of(planned.fragments)):
        console.print(f"{hidden} fragments between them are in --json alone.")
    console.print(
        f"A round of {planned.inner_steps_per_round} inner steps moves "
        f"{format_bytes(planned.round_bytes_up)} up and {format_bytes(planned.round_bytes_down)} "
        f"down an island.\n"
    )
    if planned.arrival is None:
        console.print(_send_table(planned))
    else:
        console.print(_arrival_text(planned, planned.arrival))
    console.print(f"\nOne island's traffic over the run{_link_text(planned)}:\n")
    console.print(FittedTable.of(planned.directions, _DIRECTIONS))
    console.print("\nA rank of each island takes, estimated from shapes, on its device:\n")
    console.print(_rank_table(planned))
    console.print("\nand next to it:\n")
    console.print(_host_table(planned))
    disk = planned.disk
    console.print(
        f"\nOn disk, at most: {format_bytes(disk.island_bytes)} an island ({disk.num_checkpoints} "
        f"checkpoints of {format_bytes(disk.checkpoint_bytes)}), "
        f"{format_bytes(disk.store_bytes)} at the syncer ({disk.num_records} records of "
        f"{format_bytes(disk.record_bytes)})."
    )
    most = max(planned.syncers, key=lambda syncer: syncer.memory_bytes)
    console.print(
        f"In the memory of a syncer's host, at "
        f"most: {format_bytes(most.memory_bytes)}, and {format_bytes(most.merge_bytes)} for "
        f"each fragment that it merges next to another one, if there are cores and room."
    )
    _print_memory_needs(console, planned)
    if len(planned.syncers) > 1:
        console.print(f"\nThere are {len(planned.syncers)} of it, with fragments of their own:\n")
        console.print(FittedTable.of(planned.syncers, _SYNCERS))
    for island, num_bytes in planned.kept_bytes.items():
        console.print(
            f"In the memory of island {island}'s hosts: {format_bytes(num_bytes)} for each of the "
            f"hosts that keep a copy of its inner state (islands.{island}.memory_copies, at most "
            f"its hosts)."
        )
    console.print(
        f"\nFingerprints: configuration {planned.config_fingerprint[:16]}, plan "
        f"{planned.plan_fingerprint[:16]}."
    )


def _print_memory_needs(console: Console, planned: Forecast) -> None:
    """Say what comes besides the table for a moment: on devices, and for copies of checkpoints."""
    from diloco.checkpoint.host_memory import available_bytes

    on_device = max(rank.outer_device_bytes for rank in planned.ranks.values())
    computed = max(rank.computed_device_bytes for rank in planned.ranks.values())
    kept = max(rank.outer_host_bytes for rank in planned.ranks.values())
    console.print(
        f"On its device, the outer loop takes at most {format_bytes(computed)} of a rank, while a "
        f"fragment is sent or merged, and training does not wait; {format_bytes(on_device)} where "
        f"there is no room for that, and training waits. Where there is room for what it keeps, "
        f"too, that lies there, and not in host memory: {format_bytes(kept)}."
    )
    available = available_bytes()
    for island, num_bytes in planned.copied_bytes.items():
        if not num_bytes:
            continue
        console.print(
            f"Checkpoints behind the training copy {format_bytes(num_bytes)} to the memory of "
            f"island {island}'s hosts (checkpoint.asynchronous)."
        )
        if available is not None and num_bytes > available:
            console.print(
                f"This host has {format_bytes(available)} available: on it alone, island {island} "
                f"would be refused; set checkpoint.asynchronous = false, or use more hosts.",
                style="yellow",
            )


def _rank_table(planned: Forecast) -> FittedTable:
    sizes = ("peak", "parameter", "gradient", "optimizer", "gathered", "activation")
    rows = [
        [name, *(format_bytes(getattr(rank, f"{size}_bytes")) for size in sizes)]
        for name, rank in planned.ranks.items()
    ]
    headings = ["parameters", "gradients", "optimizer", "gathered", "activations"]
    return FittedTable.with_rows(["island", "peak", *headings], rows)


def _host_table(planned: Forecast) -> FittedTable:
    moved = planned.round_bytes_up + planned.round_bytes_down
    rows = []
    for name, rank in planned.ranks.items():
        rows.append(
            [
                name,
                rank.carrier_hosts,
                format_bytes(rank.outer_host_bytes),
                format_bytes(-(-rank.carriers // rank.carrier_hosts) * rank.outer_host_bytes),
                format_bytes(moved // rank.carrier_hosts),
                f"{rank.flops_per_inner_step:.3g}",
            ]
        )
    headings = ["island", "hosts that carry", "memory for it, a rank", "a host"]
    return FittedTable.with_rows([*headings, "moves a round", "operations a step"], rows)


#: Heading -> what gives the cell.
_SYNCERS: Mapping[str, Callable[[SyncerForecast], object]] = {
    "syncer": lambda syncer: syncer.name,
    "parameters": lambda syncer: f"{syncer.parameters:,}",
    "on disk": lambda syncer: format_bytes(syncer.store_bytes),
    "fragments": lambda syncer: ", ".join(map(str, syncer.fragment_ids)),
}
_FRAGMENTS: Mapping[str, Callable[[FragmentForecast], object]] = {
    "fragment": lambda fragment: fragment.fragment_id,
    "parameters": lambda fragment: f"{fragment.parameters:,}",
    "lanes": lambda fragment: fragment.lanes,
    "up": lambda fragment: format_bytes(fragment.bytes_up),
    "down": lambda fragment: format_bytes(fragment.bytes_down),
    "in float32": lambda fragment: format_bytes(fragment.float32_bytes),
    "tensors": lambda fragment: len(fragment.tensors),
}
_DIRECTIONS: Mapping[str, Callable[[DirectionForecast], object]] = {
    "": lambda way: way.name,
    "up": lambda way: format_bytes(way.bytes_up),
    "down": lambda way: format_bytes(way.bytes_down),
    "exchanges": lambda way: f"{way.transfers:,}",
    "on this link": lambda way: "-" if way.transfer_s is None else format_duration(way.transfer_s),
    "times as much": lambda way: f"{way.times:.1f}",
}


def _arrival_text(planned: Forecast, arrival: ArrivalForecast) -> str:
    """Say what stands in place of a schedule, and where its grace is 0."""
    text = (
        f"There is no schedule: nobody waits for anybody. A fragment opens at most once in "
        f"{planned.inner_steps_per_round} inner steps of the fastest island, for about "
        f"{arrival.rounds:,} rounds if each counts all islands."
    )
    if arrival.grace != "auto":
        return text
    largest = max(planned.fragments, key=lambda part: part.bytes_up + part.bytes_down)
    up, down = format_bytes(largest.bytes_up), format_bytes(largest.bytes_down)
    here = ""
    if arrival.exchange_s is not None:
        here = f", {format_duration(arrival.exchange_s)} on this link"
    if arrival.least_step_s is not None:
        here += f" (inner steps under {format_duration(arrival.least_step_s)})"
    return (
        f"{text}\nWarning: outer.grace = auto is 0 where tau = {arrival.overlap_steps} inner steps "
        f"of the slowest island take less time than {up} up and {down} down{here}: most rounds "
        f"then count one island. Set outer.grace to a time there."
    )


def _ends_of(rows: Sequence[_T]) -> Sequence[_T]:
    """Leave out what is between the first and the last ones of a long table."""
    return rows if len(rows) <= _MOST_ROWS else [*rows[: _MOST_ROWS - 8], *rows[-8:]]


def _send_table(planned: Forecast) -> FittedTable:
    rows: list[list[str]] = []
    previous = 0
    for send in planned.sends:
        if send.inner_step - previous > planned.inner_steps_per_round:
            rows.append(["...", "...", "..."])
        fragments = ", ".join(map(str, send.fragment_ids))
        rows.append([str(send.inner_step), str(send.merge_step), fragments])
        previous = send.inner_step
    if planned.is_flushed:
        last = str(planned.inner_steps)
        rows.append([last, last, "all (flush, published in float32)"])
    shown = list(_ends_of(rows))
    if len(shown) < len(rows):
        shown.insert(-8, ["...", "...", "..."])
    return FittedTable.with_rows(["inner step", "merged after", "sent fragments"], shown)


def _link_text(planned: Forecast) -> str:
    if not planned.link:
        return " (no transport.link, so no times)"
    return f", and what it would take on {planned.link} with nothing overlapped"
