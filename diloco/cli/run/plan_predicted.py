"""What `diloco plan` prints of a run's time: prediction, what stands next to it, suggestion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.transport.units import format_bandwidth, format_bytes, format_duration

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.config.schema import Config
    from diloco.forecast.forecast import Forecast
    from diloco.simulations.planner.planned import Planned
    from diloco.simulations.planner.prediction import Prediction, SyncerPrediction
    from diloco.simulations.planner.suggestion import Candidate, Influence, Suggestion

_SHOWN_INFLUENCES = 3
#: From the object store, where it is not told.
_BUCKET_BPS = 10e9
#: Of what the stores of syncers have, in the bucket: a quarter as much waits to be removed.
_BUCKET_SHARE = 1.25


def show_planned(console: Console, planned: Planned, forecast: Forecast) -> None:
    """Print assumptions, and what follows from them."""
    console.print("\nTaken for granted", style="bold")
    for line in planned.assumed.origins:
        console.print(f"  {line}")
    if planned.prediction is None:
        console.print(f"\nNo time is predicted: {planned.why_not}.")
    else:
        _show_prediction(console, planned.prediction, is_scheduled=forecast.arrival is None)
    if planned.alternatives:
        console.print("\nThe same tokens on the same links\n", style="bold")
        console.print(_alternative_table(planned, forecast))


def show_suggestion(console: Console, suggestion: Suggestion, run: str) -> None:
    """Print the earliest settings, what to type, and what decides."""
    chosen, own = suggestion.chosen, suggestion.own
    console.print(
        f"\nSuggested, of {suggestion.num_tried} settings that were simulated; each row "
        f"ends earlier than all below it, which cost less loss:\n"
    )
    console.print(_candidate_table(suggestion))
    changes = chosen.setting.overrides(besides=own.setting)
    if changes:
        typed = " ".join(f"--set {change}" for change in changes)
        console.print(f"\ndiloco plan {run} {typed}")
        console.print(
            f"ends after {format_duration(chosen.wall_s)} at {chosen.penalty:.2%} of the loss, as "
            f"it is after {format_duration(own.wall_s)} at "
            f"{f'{own.penalty:.2%}' if suggestion.is_own_known else 'a loss that is not known'}."
        )
    else:
        console.print("\nThe run as it is ends as early as any, at no more loss.")
    console.print(_decides(suggestion))


def _show_prediction(console: Console, predicted: Prediction, *, is_scheduled: bool) -> None:
    console.print(
        f"\nPredicted: {format_duration(predicted.wall_s)} in all, utilisation "
        f"{predicted.utilisation:.1%}, {format_duration(predicted.round_s)} a round.\n"
    )
    console.print(_island_table(predicted))
    if predicted.enough_bps is not None:
        console.print(
            f"\nFrom {format_bandwidth(predicted.enough_bps)} each way of every island on, the "
            f"slowest one trains 99 % of the time."
        )
    elif is_scheduled:
        console.print(
            "\nNo bandwidth makes the slowest island train 99 % of the time: round trips and the "
            "work of hosts take longer than tau inner steps."
        )
    if predicted.syncers:
        console.print("\nSyncers carry, with headers and code not counted:\n")
        console.print(FittedTable.of(predicted.syncers, _SYNCERS))


def show_losses(console: Console, config: Config, planned: Planned, network_bps: float) -> None:
    """Say what the loss of a machine costs, where the run's state is in an object store."""
    from diloco.objects.lease import LEASE_S

    if planned.prediction is None:
        return
    rate_bps = network_bps or _BUCKET_BPS
    syncers = planned.prediction.syncers
    stores = [each.store_bytes for each in syncers]
    # Of a machine that is alone with its syncer; all of them are on the coordinator's else.
    fetched = max(stores) if config.syncers else sum(stores)
    stored = max(each.stored_bytes_per_s for each in syncers)
    console.print(
        f"\nIf a machine with a syncer is lost, another one serves in its place {LEASE_S:g} s "
        f"after the last sign of life and when it has fetched the store, "
        f"{format_bytes(fetched)}: at least {format_duration(8 * fetched / rate_bps)} at "
        f"{format_bandwidth(rate_bps)}"
        f"{'' if network_bps else ' (--syncer-network says another)'}. To run.state each writes "
        f"{format_bytes(round(stored))}/s on average, more in rounds of snapshots; there are at "
        f"most {format_bytes(round(_BUCKET_SHARE * sum(stores)))} of it. Nothing that was "
        f"published is lost."
    )


def _island_table(predicted: Prediction) -> FittedTable:
    headings = ["island", "step", "utilised", "waits a round", "up, mean/peak", "down, mean/peak"]
    rows = [
        (
            name,
            format_duration(island.step_s),
            f"{island.utilisation:.1%}",
            format_duration(island.blocked_s),
            _rates(island.mean_up_bps, island.peak_up_bps),
            _rates(island.mean_down_bps, island.peak_down_bps),
        )
        for name, island in predicted.islands.items()
    ]
    return FittedTable.with_rows(headings, rows)


#: Heading -> what gives the cell.
_SYNCERS: Mapping[str, Callable[[SyncerPrediction], object]] = {
    "syncer": lambda syncer: syncer.name,
    "merges": lambda syncer: f"{syncer.busy:.1%}",
    "memory": lambda syncer: format_bytes(syncer.memory_bytes),
    "disk": lambda syncer: format_bytes(syncer.store_bytes),
    "written/s": lambda syncer: format_bytes(round(syncer.written_bytes_per_s)),
    "in, mean/peak": lambda syncer: _rates(syncer.mean_in_bps, syncer.peak_in_bps),
    "out, mean/peak": lambda syncer: _rates(syncer.mean_out_bps, syncer.peak_out_bps),
}


def _alternative_table(planned: Planned, forecast: Forecast) -> FittedTable:
    own, ways = planned.prediction, []
    if own is not None:
        ways = [("this run", own.wall_s, own.utilisation, forecast.directions[0].bytes_up)]
    ways += [(o.name, o.wall_s, o.utilisation, round(o.bytes_up)) for o in planned.alternatives]
    rows = [
        (
            name,
            format_duration(wall_s),
            "-" if own is None else f"{wall_s / own.wall_s:.3g}",
            f"{utilisation:.1%}",
            format_bytes(bytes_up),
        )
        for name, wall_s, utilisation, bytes_up in ways
    ]
    headings = ["", "takes", "times as long", "utilised", "an island sends"]
    return FittedTable.with_rows(headings, rows)


def _candidate_table(suggestion: Suggestion) -> FittedTable:
    rows = [_candidate_row(each) for each in suggestion.front]
    if suggestion.own.setting not in [each.setting for each in suggestion.front]:
        rows.append(_candidate_row(suggestion.own))
        if not suggestion.is_own_known:
            rows[-1][-1] = "not known"
        rows[-1][-1] += " (as it is)"
    headings = ["H", "P", "tau", "up", "down", "lanes", "takes", "utilised", "loss"]
    return FittedTable.with_rows(headings, rows)


def _candidate_row(candidate: Candidate) -> list[str]:
    setting = candidate.setting
    return [
        str(setting.inner_steps_per_round),
        str(setting.num_fragments),
        str(setting.overlap_steps),
        setting.uplink_codec,
        setting.downlink_codec,
        str(setting.num_lanes),
        format_duration(candidate.wall_s),
        f"{candidate.utilisation:.1%}",
        f"+{candidate.penalty:.2%}",
    ]


def _decides(suggestion: Suggestion) -> str:
    """Say which inputs change the suggestion if they are 20 % off, or else the time most."""
    changing = [each for each in suggestion.influences if each.is_other]
    timed = [each for each in suggestion.influences if each.wall_s is not None]
    most = max(timed, key=lambda each: abs((each.wall_s or 0.0) / suggestion.chosen.wall_s - 1))
    if not changing:
        return (
            "No input that is 20 % off changes the suggestion; the time depends most on this one:"
            f"\n  {_influence_text(most, suggestion)}"
        )
    shown = [*changing[:_SHOWN_INFLUENCES], *([] if most in changing else [most])]
    lines = "\n  ".join(_influence_text(each, suggestion) for each in shown)
    return f"{changing[0].name.capitalize()} decides:\n  {lines}"


def _influence_text(influence: Influence, suggestion: Suggestion) -> str:
    chosen = suggestion.chosen
    text = f"20 % {'more' if influence.is_more else 'less'}: {influence.name}: "
    if influence.wall_s is not None:
        text += f"{format_duration(influence.wall_s)} ({influence.wall_s / chosen.wall_s - 1:+.1%})"
    else:
        text += "the suggestion loses the run"
    if influence.is_other:
        others = influence.chosen.setting.overrides(besides=chosen.setting)
        text += f"; then better {', '.join(others)}: {format_duration(influence.chosen.wall_s)}"
    return text


def _rates(mean_bps: float, peak_bps: float) -> str:
    """Write two bandwidths with the unit of the larger one."""
    number, unit = format_bandwidth(peak_bps).split()
    scale = peak_bps / float(number)
    mean = f"{mean_bps / scale:.2g}" if mean_bps > 1e-3 * peak_bps else "<0.001"
    return f"{mean}/{number} {unit}"
