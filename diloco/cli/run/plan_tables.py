"""What `diloco plan` prints of a run from its file alone, without its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands import what they need when they run
    from rich.console import Console

    from diloco.forecast.forecast import ArrivalForecast, Forecast

#: Headings, and rows of as many cells.
Rows = tuple[list[str], list[list[str]]]


def show_forecast(console: Console, planned: Forecast) -> None:
    """Print what follows from the file alone."""
    from diloco.transport.units import format_bytes

    flushed = ", then a flush of every fragment" if planned.is_flushed else ""
    length = f"{planned.inner_steps} inner steps, {planned.num_sends} sends"
    if planned.arrival is not None:
        length = f"until {planned.arrival.total_tokens:,} tokens are merged"
    console.print(
        f"Run [bold]{planned.run}[/]: {planned.parameters:,} parameters in "
        f"{len(planned.fragments)} fragments; {length}{flushed}."
    )
    tokens = ", ".join(f"{name} {number:,}" for name, number in planned.tokens.items())
    console.print(f"Tokens: {tokens}; together {sum(planned.tokens.values()):,}.\n")
    print_rows(console, _fragment_rows(planned))
    console.print(
        f"A round of {planned.inner_steps_per_round} inner steps moves "
        f"{format_bytes(planned.round_bytes_up)} up and {format_bytes(planned.round_bytes_down)} "
        f"down an island.\n"
    )
    if planned.arrival is None:
        print_rows(console, _send_rows(planned))
    else:
        console.print(_arrival_text(planned, planned.arrival))
    console.print(f"\nOne island's traffic over the run{_link_text(planned)}:\n")
    print_rows(console, _direction_rows(planned))
    console.print("\nA rank of each island takes, estimated from shapes, on its device:\n")
    print_rows(console, _rank_rows(planned))
    console.print("\nand next to it:\n")
    print_rows(console, _host_rows(planned))
    disk = planned.disk
    console.print(
        f"\nOn disk, at most: {format_bytes(disk.island_bytes)} an island ({disk.num_checkpoints} "
        f"checkpoints of {format_bytes(disk.checkpoint_bytes)}), "
        f"{format_bytes(disk.store_bytes)} "
        f"{'more at each' if planned.exchange == 'allreduce' else 'at the syncer'} "
        f"({disk.num_records} records of "
        f"{format_bytes(disk.record_bytes)})."
    )
    if planned.syncers:
        most = max(planned.syncers, key=lambda syncer: syncer.memory_bytes)
        console.print(
            f"In the memory of a syncer's host, at "
            f"most: {format_bytes(most.memory_bytes)}, and {format_bytes(most.merge_bytes)} for "
            f"each fragment that it merges next to another one, if there are cores and room."
        )
    _print_memory_needs(console, planned)
    if len(planned.syncers) > 1:
        console.print(f"\nThere are {len(planned.syncers)} of it, with fragments of their own:\n")
        print_rows(console, _syncer_rows(planned))
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
    from diloco.transport.units import format_bytes

    on_device = max(rank.outer_device_bytes for rank in planned.ranks.values())
    console.print(
        f"On its device, the outer loop takes at most {format_bytes(on_device)} of a rank, while a "
        f"fragment is sent, or staged and merged."
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


def _rank_rows(planned: Forecast) -> Rows:
    from diloco.transport.units import format_bytes

    columns = ["island", "peak", "parameters", "gradients", "optimizer", "gathered", "activations"]
    return columns, [
        [
            name,
            *(
                format_bytes(number)
                for number in (
                    rank.peak_bytes,
                    rank.parameter_bytes,
                    rank.gradient_bytes,
                    rank.optimizer_bytes,
                    rank.gathered_bytes,
                    rank.activation_bytes,
                )
            ),
        ]
        for name, rank in planned.ranks.items()
    ]


def _host_rows(planned: Forecast) -> Rows:
    from diloco.transport.units import format_bytes

    columns = ["island", "outer loop, in host memory", "operations an inner step"]
    return columns, [
        [name, format_bytes(rank.outer_host_bytes), f"{rank.flops_per_inner_step:.3g}"]
        for name, rank in planned.ranks.items()
    ]


def _syncer_rows(planned: Forecast) -> Rows:
    from diloco.transport.units import format_bytes

    columns = ["syncer", "parameters", "on disk", "fragments"]
    return columns, [
        [
            str(syncer.syncer_id),
            f"{syncer.parameters:,}",
            format_bytes(syncer.store_bytes),
            ", ".join(map(str, syncer.fragment_ids)),
        ]
        for syncer in planned.syncers
    ]


def _arrival_text(planned: Forecast, arrival: ArrivalForecast) -> str:
    """Say what stands in place of a schedule, and where its grace is 0."""
    from diloco.transport.units import format_bytes, format_duration

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


def _fragment_rows(planned: Forecast) -> Rows:
    from diloco.transport.units import format_bytes

    columns = ["fragment", "parameters", "lanes", "up", "down", "in float32", "tensors"]
    rows = [
        [
            str(fragment.fragment_id),
            f"{fragment.parameters:,}",
            str(fragment.lanes),
            format_bytes(fragment.bytes_up),
            format_bytes(fragment.bytes_down),
            format_bytes(fragment.float32_bytes),
            str(len(fragment.tensors)),
        ]
        for fragment in planned.fragments
    ]
    return columns, rows


def _send_rows(planned: Forecast) -> Rows:
    columns = ["inner step", "merged after", "sent fragments"]
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
    return columns, rows


def _direction_rows(planned: Forecast) -> Rows:
    from diloco.transport.units import format_bytes, format_duration

    columns = ["", "up", "down", "exchanges", "on this link", "times as much"]
    rows = [
        [
            direction.name,
            format_bytes(direction.bytes_up),
            format_bytes(direction.bytes_down),
            f"{direction.transfers:,}",
            "-" if direction.transfer_s is None else format_duration(direction.transfer_s),
            f"{direction.times:.1f}",
        ]
        for direction in planned.directions
    ]
    return columns, rows


def print_rows(console: Console, rows: Rows) -> None:
    """Print a table, figures to the right; a narrow terminal folds cells and loses nothing."""
    from rich.table import Table

    columns, cells = rows
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        is_text = index in (0, len(columns) - 1) and not _is_figure(cells, index)
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table, soft_wrap=False)


def _is_figure(cells: Sequence[Sequence[str]], index: int) -> bool:
    return index > 0 and all(row[index][:1].isdigit() or row[index] == "-" for row in cells)


def _link_text(planned: Forecast) -> str:
    if not planned.link:
        return " (no transport.link, so no times)"
    return f", and what it would take on {planned.link} with nothing overlapped"
