"""Turns what a page shows into HTML; every text is escaped.

A view is made of sections. The same sections are sent again, one by one, where they changed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from diloco.page.acts import ACTS
from diloco.page.charts import loss_chart, timeline_chart
from diloco.page.network import fullest, network_chart
from diloco.page.run_view import HOUR_S, CurveView, RunView, differing, filtered

#: Views of one run -> their sections, in order.
VIEWS = {
    "overview": ("state", "figures", "alarms", "loss"),
    "islands": ("state", "islands"),
    "network": ("state", "network", "links"),
    "fragments": ("state", "timeline", "fragments", "versions"),
    "events": ("state", "filters", "events"),
    "run": ("state", "facts", "settings"),
}
#: The view of several runs.
COMPARE = "compare"
#: The view of what may be done to a live run.
_ACTS = "acts"
_COMPARED = ("compared", "compared_loss", "differing")
#: Rows of one page of events; of versions; of links; minutes that the timeline may show.
_EVENTS, _VERSIONS, _LINKS, _MINUTES = 200, 100, 100, (1, 5, 15, 60)


@dataclass(frozen=True, slots=True)
class Frame:
    """What is around every view.

    Args:
        can_sign_out: Whether who looks has signed in.
        may_act: Whether acts are offered for live runs.
    """

    can_sign_out: bool = False
    may_act: bool = False


@dataclass(frozen=True, slots=True)
class Query:
    """What a page's address asks for besides the view; what it cannot be is left out."""

    kind: str = ""
    island: str = ""
    page: int = 1
    minutes: int = 60

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Query:
        """Read the query of an address."""
        page, minutes = values.get("page", "1"), values.get("minutes", "60")
        is_page = page.isascii() and page.isdecimal() and 0 < len(page) < 6
        is_minutes = minutes.isascii() and minutes.isdecimal() and len(minutes) < 4
        return cls(
            values.get("kind", "")[:100],
            values.get("island", "")[:200],
            max(1, int(page)) if is_page else 1,
            int(minutes) if is_minutes and int(minutes) in _MINUTES else 60,
        )


def sections_of(view: str, runs: Sequence[RunView], number: int, query: Query) -> dict[str, str]:
    """Render the sections of a view, by their ids.

    Args:
        view: One of `VIEWS`, of the run of a `number`; or `COMPARE`, of all runs.
        runs: All runs.
        number: Of the run that is shown.
        query: What is asked for.
    """
    macros = _templates().get_template("sections.html").module
    if view == COMPARE:
        values = _compared(runs)
        return {name: str(getattr(macros, name)(values)) for name in _COMPARED}
    run = runs[number]
    values = {"run": run, "query": query, "number": number, **_extra(view, run, query)}
    return {name: str(getattr(macros, name)(values)) for name in VIEWS[view]}


def page_of(view: str, runs: Sequence[RunView], number: int, query: Query, frame: Frame) -> str:
    """Render a whole page."""
    title = "runs compared" if view == COMPARE else runs[number].name
    return _framed(title, view, runs, number, sections_of(view, runs, number, query), frame)


def acts_page(
    shown: str, runs: Sequence[RunView], number: int, values: Mapping[str, Any], frame: Frame
) -> str:
    """Render the acts of a run, the preview of one, or what was answered.

    Args:
        shown: "acts", "preview" or "answered".
        runs: All runs.
        number: Of the run.
        values: What that shows, of several types, hence `Any`.
        frame: Of the page.
    """
    run = runs[number]
    names = {"island": [row.island for row in run.islands]}
    page = {"run": run, "number": number, "acts": ACTS, "names": names, **values}
    state = _templates().get_template("sections.html").module.state(page)  # type: ignore[attr-defined]
    own = getattr(_templates().get_template("acts.html").module, shown)(page)
    return _framed(run.name, _ACTS, runs, number, {"state": str(state), shown: str(own)}, frame)


def _framed(
    title: str,
    view: str,
    runs: Sequence[RunView],
    number: int,
    sections: Mapping[str, str],
    frame: Frame,
) -> str:
    can_act = frame.may_act and view != COMPARE and runs[number].is_live
    return (
        _templates()
        .get_template("frame.html")
        .render(
            title=title,
            view=view,
            views=[*VIEWS, *([_ACTS] if can_act else [])],
            runs=runs,
            number=number,
            sections=sections,
            is_live=view != _ACTS,
            can_sign_out=frame.can_sign_out,
        )
    )


def login_page(problem: str, to: str) -> str:
    """Render the form that asks for the token; `to` is where it leads."""
    return _templates().get_template("login.html").render(problem=problem, to=to)


def problem_page(title: str, text: str) -> str:
    """Render what went wrong with a call."""
    return _templates().get_template("problem.html").render(title=title, text=text)


@functools.cache
def asset(name: str) -> bytes:
    """Read a file of the page."""
    return files("diloco.page").joinpath(name).read_bytes()


def _extra(view: str, run: RunView, query: Query) -> dict[str, Any]:
    """Make what only some sections show; values of several types, hence `Any`."""
    match view:
        case "overview":
            return {"chart": loss_chart(run.curves), "held_out": loss_chart(run.held_out)}
        case "network":
            return {
                "chart": network_chart(run.links),
                "links": fullest(run.links, _LINKS),
            }
        case "fragments":
            span_s = min(60.0 * query.minutes, _span_s(run))
            chart = timeline_chart(run.bars, run.marks, end_s=run.now, span_s=span_s)
            return {
                "chart": chart,
                "minutes": _MINUTES,
                "versions": run.versions[: -_VERSIONS - 1 : -1],
            }
        case "events":
            found = filtered(sorted(run.events, key=lambda e: e.at), query.kind, query.island)
            first = (query.page - 1) * _EVENTS
            return {
                "events": found[first : first + _EVENTS],
                "num_found": len(found),
                "num_pages": max(1, -(-len(found) // _EVENTS)),
                "kinds": sorted({event.kind for event in run.events}),
                "islands": sorted({event.island for event in run.events if event.island}),
            }
        case _:
            return {}


def _span_s(run: RunView) -> float:
    """Give how long ago the first round began that is known, with some room."""
    first = min((bar.start_s for bar in run.bars), default=run.now - HOUR_S)
    return max(1.0, 1.02 * (run.now - first))


def _compared(runs: Sequence[RunView]) -> dict[str, Any]:
    labels = list(dict.fromkeys(figure.label for run in runs for figure in run.figures))

    def all_of(curves_of: Callable[[RunView], Sequence[CurveView]]) -> list[CurveView]:
        return [
            CurveView(f"{number}: {run.name}, {curve.name}", curve.points)
            for number, run in enumerate(runs)
            for curve in curves_of(run)
        ]

    return {
        "runs": runs,
        "labels": labels,
        "headings": ["run", "state", *(f"#{label}" for label in labels), "what is going on"],
        "names": ["key", *(f"{number}: {run.name}" for number, run in enumerate(runs))],
        "chart": loss_chart(all_of(lambda run: run.curves)),
        "held_out": loss_chart(all_of(lambda run: run.held_out)),
        "differing": differing([run.settings for run in runs]),
    }


@functools.cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(str(files("diloco.page"))),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"utc": utc}
    return environment


def utc(unix_s: float) -> str:
    """Write a moment to the millisecond, in UTC."""
    try:
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
    except (OverflowError, OSError, ValueError):
        return f"{unix_s:.6g} s"
    return f"{text}.{int(unix_s % 1 * 1000):03d}"
