"""Timelines: a real run's events and a simulation become the same spans, trace and picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.simulations.engine.plots import timeline_figure
from diloco.simulations.engine.timeline import Span, SpanKind
from diloco.simulations.engine.trace import chrome_trace, run_spans, shown, sums_of, tracks_of
from diloco.simulations.runs.lanes import by_lane, spans_by_lane
from diloco.simulations.runs.run_model import run_plan, simulate_run
from diloco.telemetry.events import Event, FragmentMerged, InnerStepDone, PhaseDone
from diloco.telemetry.round_events import RoundClosed
from diloco.telemetry.sinks import JsonlSink
from tests.run_files import FFN_DIM_OF_LANES, run_to_end, write_run

RUN = Path(__file__).resolve().parents[2] / "configs" / "runs" / "two-islands.toml"


def write_events(path: Path, context: dict[str, object], told: list[tuple[float, Event]]) -> None:
    times = iter([at for at, _ in told])
    sink = JsonlSink(path, context, lambda: next(times))
    sink.open()
    for _, event in told:
        sink.write(event)
    sink.close()


@pytest.fixture
def telemetry(tmp_path: Path) -> Path:
    step = InnerStepDone(1, 2.0, 1.0, 1e-3, 64, 0.5)
    merged = FragmentMerged(1, 0, 1, "included", 0, 1.5, "", ("east",), False)
    leader = [
        (100.5, step),
        (100.6, PhaseDone("gather", 0, 0, -1, 0.1)),
        (100.8, PhaseDone("encode", 0, 0, 3, 0.125)),
        (101.5, PhaseDone("send", 0, 0, 3, 0.5)),
        (102.0, PhaseDone("fetch", 0, 0, -1, 0.25)),
        (102.1, PhaseDone("decode", 0, 0, -1, 0.05)),
        (102.1, PhaseDone("wait", 0, 0, -1, 1.5)),
        (102.2, PhaseDone("merge", 0, 0, -1, 0.1)),
        (102.2, merged),
    ]
    other = [(100.6, PhaseDone("gather", 0, 0, -1, 0.1)), (101.4, PhaseDone("send", 0, 0, 4, 0.5))]
    closed = RoundClosed(
        0, 0, 0, ("east",), ("east",), 1, 0.5, 0.0, 0.25, False, False, {}, {}, 64, ""
    )
    write_events(tmp_path / "events-east-0.jsonl", {"island": "east", "island_rank": 0}, leader)
    write_events(tmp_path / "events-east-1.jsonl", {"island": "east", "island_rank": 1}, other)
    write_events(tmp_path / "events-syncer.jsonl", {}, [(101.75, closed)])
    return tmp_path


def test_events_of_a_real_run_become_spans_from_its_first_instant(telemetry: Path) -> None:
    spans = run_spans(telemetry)

    assert [(s.island, s.kind, s.lane, s.fragment) for s in spans] == [
        ("east", "compute", None, None),
        ("east", "gather", None, 0),  # of the leader: ranks do it together
        ("east", "wait", None, 0),
        ("east", "encode", 3, 0),
        ("east", "send", 4, 0),  # lanes are those of all ranks
        ("east", "send", 3, 0),
        ("syncer", "merge", None, 0),
        ("east", "fetch", None, 0),
        ("east", "decode", None, 0),
        ("east", "merge", None, 0),
    ]
    assert spans[0].begin_s == 0.0
    assert spans[2].begin_s == pytest.approx(0.6)
    assert (spans[6].begin_s, spans[6].end_s) == pytest.approx((1.5, 1.75))


def test_a_directory_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"coordinator\.state_dir of a run that has trained"):
        run_spans(tmp_path)


def test_a_simulated_run_has_the_same_tracks_and_none_overlaps_itself() -> None:
    config = load_config(RUN, ["transport.link=thin-5M-60ms"])
    spans = simulate_run(config, step_s={"east": 0.005, "west": 0.007}).spans

    tracks = tracks_of(spans)

    assert list(tracks) == ["east", "west", "syncer"]
    assert list(tracks["west"]) == ["training", "fragment 0", "fragment 1"]
    for rows in tracks.values():
        for name, row in rows.items():
            for before, after in pairwise(sorted(row, key=lambda span: span.begin_s)):
                assert after.begin_s >= before.end_s - 1e-9, f"{name}: {before} {after}"


def test_a_trace_names_its_tracks_and_keeps_every_span(telemetry: Path) -> None:
    spans = run_spans(telemetry)

    trace = json.loads(json.dumps(chrome_trace(spans, run="demo")))

    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted(e["ts"] for e in drawn) == pytest.approx([s.begin_s * 1e6 for s in spans])
    assert sum(e["dur"] for e in drawn) == pytest.approx(
        sum(s.end_s - s.begin_s for s in spans) * 1e6
    )
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert list(names.values()) == [
        *("training", "fragment 0", "fragment 0 lane 3", "fragment 0 lane 4"),
        "fragment 0",  # of the syncer, which does not train
    ]
    (sent,) = (event for event in drawn if event["args"] == {"fragment": 0, "lane": 4})
    assert names[sent["pid"], sent["tid"]] == "fragment 0 lane 4"


def test_what_two_ranks_do_at_once_has_two_rows_and_no_row_overlaps_itself() -> None:
    spans = [
        Span("east", None, 0, "fetch", 0.0, 1.0),
        Span("east", None, 0, "fetch", 0.5, 1.25),
        Span("east", None, 0, "decode", 1.0 - 2e-7, 1.1),  # as wall clocks say it
    ]

    events = chrome_trace(spans, run="demo")["traceEvents"]

    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    drawn = [(e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert names == ["fragment 0", "fragment 0"]
    assert drawn == [(0, 0.0, 1e6), (0, 1e6, 1e5), (1, 5e5, 7.5e5)]


def test_lanes_of_a_simulation_are_carried_as_ranks_carry_them() -> None:
    plan = run_plan(load_config(RUN, [f"model.ffn_dim={FFN_DIM_OF_LANES}"]))
    kinds: tuple[SpanKind, ...] = ("encode", "send", "fetch")
    whole = [Span("west", None, 1, kind, 1.0, 2.0) for kind in kinds]

    parts = by_lane([*whole, Span("syncer", None, 1, "merge", 1.0, 2.0)], plan, {"west": 2})

    lanes = {kind: [s.lane for s in parts if s.kind == kind] for kind in (*kinds, "merge")}
    assert lanes == {
        "encode": [0, 2, 4, 1, 3],  # one rank's, then the other's
        "send": [0, 2, 4, 1, 3],
        "fetch": [None, None],  # a call of each rank, several lanes together
        "merge": [None],
    }
    encoded = {s.lane: (s.begin_s, s.end_s) for s in parts if s.kind == "encode"}
    assert encoded[0][0] == encoded[1][0] == 1.0
    assert encoded[0][1] == encoded[2][0]
    assert encoded[4][1] == encoded[3][1] == 2.0
    assert {(s.begin_s, s.end_s) for s in parts if s.kind != "encode"} == {(1.0, 2.0)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_run_and_its_simulation_have_the_same_rows_with_the_same_in_them(
    tmp_path: Path,
) -> None:
    islands = {"east": "", "west": "dp_shard = 2"}
    run_file = write_run(tmp_path, islands, overlap_steps=0, ffn_dim=FFN_DIM_OF_LANES)
    overrides = ["transport.link=thin-5M-60ms"]
    run_to_end(run_file, overrides)
    config = load_config(run_file, overrides)

    real = run_spans(config.telemetry_dir)
    simulation = simulate_run(config, step_s=dict.fromkeys(islands, 0.05))
    simulated = spans_by_lane(simulation, config)

    assert all(len(fragment.lanes) > 2 for fragment in run_plan(config).fragments)
    assert counts(real) == counts(simulated)
    pictures = [timeline_figure(spans, "") for spans in (real, simulated)]
    labels = [
        [
            (axes.get_ylabel(), [label.get_text() for label in axes.get_yticklabels()])
            for axes in picture.axes
        ]
        for picture in pictures
    ]
    assert labels[0] == labels[1]


def counts(spans: Sequence[Span]) -> dict[tuple[str, str], dict[tuple[str, str], int]]:
    """Count events of a trace by row, category and name.

    Inner steps are one where a simulation has nothing between them, and what is there at once it
    does not wait for.
    """
    events = chrome_trace(spans, run="")["traceEvents"]
    places = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        row = found.setdefault((places[event["pid"]], rows[event["pid"], event["tid"]]), {})
        what = event["cat"], event["name"]
        row[what] = 1 if event["cat"] in ("compute", "wait") else row.get(what, 0) + 1
    return found


def test_a_picture_has_a_panel_a_place_and_a_row_a_fragment(telemetry: Path) -> None:
    figure = timeline_figure(run_spans(telemetry), "demo")

    assert [axes.get_ylabel() for axes in figure.axes] == ["east", "syncer"]
    rows = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes]
    assert rows == [["training", "fragment 0"], ["fragment 0"]]


def test_a_window_keeps_what_it_touches_and_an_empty_one_is_refused() -> None:
    spans = [Span("east", None, None, "compute", begin, begin + 1.0) for begin in (0.0, 1.5, 3.0)]

    assert shown(spans, 1.2, 2.0) == spans[1:2]
    assert shown(spans, 0.0, None) == spans
    with pytest.raises(ConfigError, match="the run is from 0 to 4 s"):
        shown(spans, 9.0, None)


def test_sums_are_shares_of_the_whole_time() -> None:
    spans = [
        Span("east", None, None, "compute", 0.0, 1.0),
        Span("east", None, 0, "wait", 1.0, 4.0),
    ]

    assert sums_of(spans) == [
        {"island": "east", "kind": "compute", "times": 1, "seconds": 1.0, "share": 0.25},
        {"island": "east", "kind": "wait", "times": 1, "seconds": 3.0, "share": 0.75},
    ]


def test_the_command_writes_trace_picture_and_sums_of_a_run_file(tmp_path: Path) -> None:
    out, plot = tmp_path / "trace.json", tmp_path / "timeline.png"
    words = ["sim", "trace", str(RUN), "--step-time", "5ms", "--link", "thin-5M-60ms"]
    words += ["--out", str(out), "--plot", str(plot), "--rounds", "2", "--json", "-"]

    done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {row["island"] for row in told["sums"]} == {"east", "west", "syncer"}
    assert json.loads(out.read_text())["traceEvents"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_command_says_what_islands_that_fail_and_join_late_cost() -> None:
    words = ["sim", "trace", str(RUN), "--step-time", "100ms", "--link", "thin-5M-60ms"]
    words += ["--mean-time-between", "2s", "--mean-repair", "200ms", "--seed", "3"]
    words += ["--away", "west=500ms..900ms", "--json", "-"]

    done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["failures"]
    west, east = told["islands"]["west"], told["islands"]["east"]
    assert (west["absences"], west["away_s"]) == (1, pytest.approx(0.4))
    assert east["absences"] > 0  # drawn, as nothing was said of it
    assert told["stalled_s"] < told["wall_s"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([str(RUN)], "nothing would be written"),
        ([str(RUN), "--out", "t.json"], "--step-time is missing"),
        ([str(RUN), "--plot", "t.gif"], "ends with .png"),
        ([".", "--out", "t.json"], "is no run"),
        ([".", "--out", "t.json", "--rounds", "3"], "of runs to simulate"),
        ([str(RUN), "--out", "t.json", "--step-time", "5 apples"], "--step-time 5 apples"),
        ([".", "--out", "t.json", "--away", "west=1s..2s"], "of runs to simulate"),
        ([str(RUN), "--out", "t.json", "--away", "west=1s"], "give ISLAND=FROM..TO"),
        ([str(RUN), "--out", "t.json", "--shape", "2"], "shape: 2.0: needs mean_time_between"),
    ],
    ids=[
        "nothing",
        "no step time",
        "gif",
        "no run",
        "rounds of a real run",
        "no duration",
        "failures of a real run",
        "no time away",
        "shape of nothing",
    ],
)
def test_the_command_refuses_what_it_cannot_do(words: list[str], text: str) -> None:
    done = CliRunner().invoke(app, ["sim", "trace", *words])

    assert isinstance(done.exception, ConfigError)
    assert text in str(done.exception)
