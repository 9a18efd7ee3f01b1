"""Pictures of a run, drawn from its events: loss by tokens, and when fragments travelled.

Figures are drawn off screen and belong to nobody else: no state of pyplot is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a second of imports, only for those who draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: An event as a line of JSON holds it, hence any JSON values.
EventLine = Mapping[str, Any]

_SMALL, _TITLE = 7.5, 10.0
_DPI = 150
_WIDTH_IN = 10.0
_ISLAND_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_IN_FLIGHT, _FLUSH, _OTHER, _BLOCKED, _INCIDENT = "#9ecae1", "#a1d99b", "#cccccc", "#de2d26", "#000"
#: A smoothed loss is the mean over this share of the inner steps.
_SMOOTHED_SHARE = 1 / 30
_MIN_ROW_IN, _MAX_ROWS_IN = 0.16, 14.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses of one island by tokens; tokens are those before the inner step is counted too."""

    tokens: tuple[int, ...]
    loss: tuple[float, ...]
    #: Which parameters -> (tokens, nats a byte) of each evaluation.
    evaluations: Mapping[str, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Flight:
    """A contribution from its send to its end, in seconds since the run's first event.

    `how` is "flush", an outcome ("included", "not_included", "refused", "declined", "expired"), or
    "lost" when the island stopped before it knew.
    """

    fragment_id: int
    began_s: float
    ended_s: float
    blocked_s: float
    how: str


def write_plots(events: Mapping[str, list[dict[str, Any]]], directory: Path) -> list[Path]:
    """Write `loss.png` and `timeline.png`.

    Args:
        events: Island -> effective events of its ranks; the leaders' are read. An island without
            events is left out.
        directory: Made when it is missing.

    Returns:
        Paths of the files, in that order; empty when no island has made an inner step.
    """
    led = {
        island: [event for event in lines if event["island_rank"] == 0]
        for island, lines in sorted(events.items())
    }
    led = {
        island: sorted(lines, key=lambda event: event["unix_s"])
        for island, lines in led.items()
        if any(event["kind"] == "inner_step" for event in lines)
    }
    if not led:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in (("loss", loss_figure(led)), ("timeline", timeline_figure(led))):
        path = directory / f"{name}.png"
        figure.savefig(path)
        written.append(path)
    return written


# -- loss --------------------------------------------------------------------------------------


def curve_of(events: Sequence[EventLine]) -> Curve:
    """Read the losses of an island; steps before the first recorded one are taken to be like it."""
    steps = sorted((e for e in events if e["kind"] == "inner_step"), key=lambda e: e["inner_step"])
    first = steps[0]
    total = (first["inner_step"] - 1) * first["num_tokens"]
    after = {first["inner_step"] - 1: total}
    for step in steps:
        total += step["num_tokens"]
        after[step["inner_step"]] = total
    evaluations: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        if event["kind"] == "evaluated" and event["inner_step"] in after:
            point = (after[event["inner_step"]], _number(event["nats_per_byte"]))
            evaluations.setdefault(event["parameters"], []).append(point)
    return Curve(
        tokens=tuple(after[step["inner_step"]] for step in steps),
        loss=tuple(_number(step["loss"]) for step in steps),
        evaluations={name: tuple(points) for name, points in evaluations.items()},
    )


def loss_figure(events: Mapping[str, Sequence[EventLine]]) -> Figure:
    """Draw training losses over held-out losses, both by an island's own tokens."""
    from matplotlib.figure import Figure

    height_in = max(5.4, 1.0 + 0.85 * len(events))  # two lines of a legend an island
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    training, held_out = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for index, (island, lines) in enumerate(events.items()):
        curve, colour = curve_of(lines), _colour(index)
        training.plot(curve.tokens, curve.loss, color=colour, alpha=0.22, linewidth=0.6)
        training.plot(
            *_smoothed(curve.tokens, curve.loss), color=colour, linewidth=1.3, label=island
        )
        for parameters, points in sorted(curve.evaluations.items(), reverse=True):
            is_published = parameters == "published"
            held_out.plot(
                *zip(*points, strict=True),
                color=colour,
                linestyle="-" if is_published else "none",
                linewidth=0.8,
                marker="o" if is_published else "x",
                # Published values are equal on all islands: rings in rings leave all visible.
                markersize=max(3.0, 9.0 - 2.5 * index) if is_published else 5.0,
                markerfacecolor="none",
                label=f"{island}, {parameters}: last {points[-1][1]:.4f}",
            )
    for axes, title in (
        (training, "training loss\n[nats a token]"),
        (held_out, "held-out loss\n[nats a byte]"),
    ):
        _dress(axes, title)
        _legend(axes)
    _thousands(held_out)
    held_out.set_xlabel("tokens of the island", fontsize=_SMALL)
    figure.suptitle(f"{_run_of(events)}: loss by tokens", fontsize=_TITLE)
    return figure


def _smoothed(
    tokens: Sequence[int], loss: Sequence[float]
) -> tuple[Sequence[int], Sequence[float]]:
    """Average each loss with its neighbours on both sides."""
    reach = round(len(loss) * _SMOOTHED_SHARE / 2)
    windows = [loss[max(0, i - reach) : i + reach + 1] for i in range(len(loss))]
    return tokens, [sum(window) / len(window) for window in windows]


# -- timeline ----------------------------------------------------------------------------------


def flights_of(events: Sequence[EventLine], *, origin_s: float) -> list[Flight]:
    """Pair each send with its end: a fragment has one contribution under way at most."""
    under_way: dict[int, EventLine] = {}
    flights: list[Flight] = []

    def end(sent: EventLine, at_s: float, blocked_s: float, how: str) -> None:
        began = sent["unix_s"] - origin_s
        flights.append(Flight(sent["fragment_id"], began, at_s - origin_s, blocked_s, how))

    for event in events:
        if event["kind"] == "fragment_sent":
            under_way[event["fragment_id"]] = event
        elif event["kind"] in ("fragment_merged", "round_expired"):
            sent = under_way.pop(event["fragment_id"], None)
            if sent is not None:
                how = "flush" if sent["is_flush"] else event.get("outcome", "expired")
                how = "expired" if event["kind"] == "round_expired" else how
                end(sent, event["unix_s"], event["blocked_s"], how)
        elif event["kind"] == "island_rejoined":  # a resumed island sends the same bytes again
            for sent in under_way.values():
                end(sent, sent["unix_s"], 0.0, "lost")
            under_way.clear()
    for sent in under_way.values():
        end(sent, sent["unix_s"], 0.0, "lost")
    return flights


def timeline_figure(events: Mapping[str, Sequence[EventLine]]) -> Figure:
    """Draw when each fragment of each island was under way, and what went wrong."""
    from matplotlib.figure import Figure

    origin_s = min(lines[0]["unix_s"] for lines in events.values())
    span_s = max(lines[-1]["unix_s"] for lines in events.values()) - origin_s
    unit, unit_s = _time_unit(span_s)
    flights = {island: flights_of(lines, origin_s=origin_s) for island, lines in events.items()}
    num_fragments = 1 + max((f.fragment_id for fs in flights.values() for f in fs), default=0)
    rows_in = min(_MAX_ROWS_IN, max(_MIN_ROW_IN * num_fragments, 0.8) * len(events))
    figure = Figure(figsize=(_WIDTH_IN, 1.3 + rows_in), dpi=_DPI, layout="constrained")
    panels = figure.subplots(len(events), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (island, lines) in zip(panels, events.items(), strict=True):
        _draw_flights(axes, flights[island], unit_s)
        for kind, at_s in _returns(lines, origin_s):
            axes.axvline(at_s / unit_s, color=_INCIDENT, linestyle=":", linewidth=1.0)
            axes.annotate(
                kind, (at_s / unit_s, 1.0), xycoords=("data", "axes fraction"),
                fontsize=_SMALL, ha="left", va="bottom",
            )  # fmt: skip
        _dress(axes, f"{island}\nfragment")
        axes.set_ylim(num_fragments - 0.4, -0.6)
        axes.set_yticks(range(0, num_fragments, max(1, num_fragments // 12)))
        axes.grid(visible=False, axis="y")
    panels[-1].set_xlim(0, 1.01 * max(span_s, 1e-3) / unit_s)
    panels[-1].set_xlabel(f"time since the first event [{unit}]", fontsize=_SMALL)
    _timeline_legend(figure)
    figure.suptitle(f"{_run_of(events)}: fragments from send to merge", fontsize=_TITLE)
    return figure


def _draw_flights(axes: Axes, flights: Sequence[Flight], unit_s: float) -> None:
    """Draw one collection a fragment: thousands of bars take seconds, not minutes."""
    colours = {"included": _IN_FLIGHT, "flush": _FLUSH}
    for fragment_id in {flight.fragment_id for flight in flights}:
        bars: list[tuple[float, float]] = []
        faces: list[str] = []
        for flight in flights:
            if flight.fragment_id == fragment_id:
                taken_s = flight.ended_s - flight.began_s
                blocked_s = min(flight.blocked_s, taken_s)
                bars.append((flight.began_s / unit_s, (taken_s - blocked_s) / unit_s))
                bars.append(((flight.ended_s - blocked_s) / unit_s, blocked_s / unit_s))
                faces += [colours.get(flight.how, _OTHER), _BLOCKED]
        axes.broken_barh(bars, (fragment_id - 0.38, 0.76), facecolors=faces, linewidth=0)
    gone = [flight for flight in flights if flight.how in ("expired", "lost")]
    axes.plot(
        [flight.ended_s / unit_s for flight in gone],
        [flight.fragment_id for flight in gone],
        marker="x",
        linestyle="none",
        color=_INCIDENT,
        markersize=4,
    )


def _returns(events: Sequence[EventLine], origin_s: float) -> Iterator[tuple[str, float]]:
    for event in events:
        if event["kind"] == "island_rejoined":
            yield f"returned, {event['lost_steps']} steps lost", event["unix_s"] - origin_s
        elif event["kind"] == "island_resumed":
            yield f"resumed at {event['inner_step']}", event["unix_s"] - origin_s


def _timeline_legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(color=_IN_FLIGHT, label="under way, then merged"),
            Patch(color=_FLUSH, label="flush"),
            Patch(color=_OTHER, label="not included"),
            Patch(color=_BLOCKED, label="training waited"),
            Line2D([], [], color=_INCIDENT, marker="x", linestyle="none", label="expired or lost"),
            Line2D([], [], color=_INCIDENT, linestyle=":", label="returned or resumed"),
        ],
        loc="outside lower center",
        ncols=6,
        fontsize=_SMALL,
        frameon=False,
    )


# -- both --------------------------------------------------------------------------------------


def _run_of(events: Mapping[str, Sequence[EventLine]]) -> str:
    return str(next(iter(events.values()))[0]["run"])


def _colour(index: int) -> str:
    return _ISLAND_COLOURS[index % len(_ISLAND_COLOURS)]


def _number(value: float | None) -> float:
    """Read a number; null stands for one that is not finite."""
    return float("nan") if value is None else value


def _time_unit(span_s: float) -> tuple[str, float]:
    return ("s", 1.0) if span_s < 300 else ("min", 60.0) if span_s < 3 * 3600 else ("h", 3600.0)


def _dress(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, fontsize=_SMALL)
    axes.tick_params(labelsize=_SMALL, length=2)
    axes.grid(visible=True, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes) -> None:
    if not axes.lines:
        return
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0,
        fontsize=_SMALL,
        frameon=False,
    )


def _thousands(axes: Axes) -> None:
    """Write token counts as 250k or 1.5M."""
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
