"""What the page shows: of the answers of a coordinator, and of events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from diloco.page.charts import WIDTH, loss_chart, timeline_chart
from diloco.page.live_run import LiveRun, sentence
from diloco.page.network import network_chart
from diloco.page.recorded_run import RecordedRun
from diloco.page.rendering import VIEWS, Frame, Query, page_of
from diloco.page.run_view import (
    MOST_BARS,
    Bar,
    Curve,
    CurveView,
    EventRow,
    command_in,
    differing,
    filtered,
)
from diloco.protos.control_pb2 import (
    Alarm,
    AlarmStatus,
    FragmentStatus,
    IslandStatus,
    LinkUse,
    ReportRequest,
    StatusReply,
    SyncerLinkUse,
    SyncerStatus,
)
from diloco.telemetry.events import AlarmCleared, AlarmRaised, Event, IslandRejoined
from diloco.telemetry.round_events import RoundExpired
from tests.page.recorded_page_run import closed, ended, merged, of_island, opened, sent, step


def island(
    name: str, state: str = "training", slot: int = 0, lease: str = "active", **report: Any
) -> IslandStatus:
    told = ReportRequest(state=state, inner_step=12, tokens=1536, tokens_per_s=1000.0, **report)
    return IslandStatus(
        island=name, incarnation=1, island_slot=slot, lease=lease, lease_left_s=8.0,
        report_age_s=0.5, last_report=told,
    )  # fmt: skip


def reply(**values: Any) -> StatusReply:
    base = {"run": "demo", "state": "running", "inner_steps": 40}
    return StatusReply(**(base | values))


TWO = [island("east", loss_nats=2.5, left_s=60.0), island("west", slot=1, left_s=90.0)]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (reply(islands=TWO), "2 of 2 islands train."),
        (
            reply(islands=[TWO[0], island("west", "waiting", 1)]),
            "1 of 2 islands train; west does not.",
        ),
        (
            reply(islands=[TWO[0], island("west", lease="lapsed")]),
            "1 of 2 islands train; west does not.",
        ),
        (
            reply(
                islands=TWO,
                fragments=[
                    FragmentStatus(fragment_id=7, phase="grace", waits_for=["west"], left_s=3.1)
                ],
            ),
            "2 of 2 islands train; fragment 7 waits for west, 3.1 s of grace left.",
        ),
        (
            reply(islands=TWO, state="paused", is_paused=True),
            "2 of 2 islands train; no round opens until diloco unpause.",
        ),
        (
            reply(state="waiting for islands", islands=[TWO[0], IslandStatus(island="west")]),
            "1 of 2 islands have joined; west has not.",
        ),
        (reply(state="failed", message="quorum lost"), "The run has failed: quorum lost"),
        (
            reply(state="finished", islands=TWO, fragments=[FragmentStatus(version=9)]),
            "The run has finished: 2 islands, published versions 9.",
        ),
        (
            reply(state="stopped", checkpoint_steps=[4, 8]),
            "The run is stopped; its newest checkpoint is 8.",
        ),
    ],
    ids=[
        "all",
        "one-waits",
        "one-away",
        "grace",
        "paused",
        "joining",
        "failed",
        "finished",
        "stopped",
    ],
)
def test_one_sentence_says_what_goes_on(status: StatusReply, said: str) -> None:
    assert sentence(status) == said


def test_a_live_run_shows_what_was_reported_and_nothing_else() -> None:
    run = LiveRun("host:1")
    alarm = Alarm(kind="island_late", fragment_id=-1, text="give time: diloco set HOST:PORT a.b=1s")
    run.observe(
        reply(
            islands=[island("east", loss_nats=2.5, step_s=0.25), IslandStatus(island="west")],
            alarms=[AlarmStatus(alarm=alarm, reporter="syncer 0", holds=True)],
            away=["island west is away: no report"],
        ),
        100.0,
    )

    view = run.view()

    east, west = {i.island: i for i in view.islands}.values()
    if east.island != "east":
        east, west = west, east
    assert (east.inner_step, east.step_time, east.loss) == ("12 of 40", "0.25 s", "2.5000")
    assert (west.state, west.loss, west.last_error) == (
        "not joined", "-", "island west is away: no report",
    )  # fmt: skip
    assert view.alarms[0].command == "diloco set host:1 a.b=1s"
    assert {f.label: f.value for f in view.figures}["time left"] == "-"
    assert view.settings == {} and not view.bars


def test_what_changes_between_answers_becomes_events_and_a_timeline() -> None:
    run = LiveRun("host:1")
    for second, (phase, version) in enumerate(
        [("open", 3), ("open", 3), ("grace", 3), ("closing", 3), ("open", 4)]
    ):
        fragment = FragmentStatus(fragment_id=0, phase=phase, version=version, digest="aa")
        run.observe(reply(islands=TWO, fragments=[fragment]), 100.0 + second)
    run.observe(reply(islands=TWO[:1], state="stopping"), 200.0)  # after nobody looked for long

    view = run.view()

    bars = [(bar.phase, bar.start_s, bar.end_s) for bar in view.bars]
    assert bars == [("open", 100, 102), ("grace", 102, 103), ("merge", 103, 104)]
    assert [(mark.kind, mark.at) for mark in view.marks] == [("published", 104.0)]
    assert [event.kind for event in view.events] == ["version", "state"]


def test_the_timeline_of_many_fragments_has_one_bar_of_each_phase() -> None:
    run = LiveRun("host:1")
    fragments = [FragmentStatus(fragment_id=p, phase="open", version=1) for p in range(200)]
    for second in range(5):
        run.observe(reply(islands=TWO, fragments=fragments), 100.0 + second)

    assert [(bar.start_s, bar.end_s) for bar in run.view().bars] == [(100.0, 104.0)] * 200


def linked(name: str, up_bps: float, bucket: bool = False, **report: Any) -> IslandStatus:
    uses = [SyncerLinkUse(up_bps=up_bps, round_trip_s=0.06), SyncerLinkUse(down_bps=4e5)]
    link = LinkUse(syncers=uses, up_capacity_bps=1e6, has_bucket=bucket)
    return island(name, link=link, resident_bytes=1 << 20, **report)


def test_the_network_shows_the_busiest_of_many_islands_and_the_others_together() -> None:
    run = LiveRun("host:1")
    islands = [linked(f"island-{n:04d}", 1e3 * n) for n in range(1000)]
    islands[7].last_report.link.syncers[0].recent_failed_calls = 2
    islands += [linked("stale", 1e6, lease="lapsed"), IslandStatus(island="silent")]
    run.observe(reply(islands=islands, syncers=[SyncerStatus(name="eu")]), 100.0)

    view = run.view()
    chart = network_chart(view.links)
    page = page_of("network", [view], 0, Query(), Frame())

    assert chart is not None
    assert [place.lines[0] for place in chart.places if place.x == 0] == [
        *(f"island-{n:04d}" for n in range(992, 1000)), "992 other islands",
    ]  # fmt: skip
    assert [place.lines[0] for place in chart.places if place.x] == ["eu", "syncer 1"]
    assert {edge.text for edge in chart.edges} >= {
        "island-0999 to eu: 999 kbit/s, round trip 60 ms",
        "syncer 1 to island-0999: 400 kbit/s",
    }
    rows = {link.island: link for link in view.links}
    assert (rows["island-0999"].state, rows["island-0999"].full) == ("full", "100%")
    assert (rows["island-0007"].state, rows["island-0007"].failed) == ("calls break", "2 of 0")
    assert (rows["stale"].up, rows["silent"].up) == ("-", "-")
    assert page.index("island-0999</th>") < page.index("island-0998</th>")
    assert "The fullest 100 of 1002." in page and len(page) < 100_000


def test_payloads_by_an_object_store_go_through_it_in_the_picture() -> None:
    run = LiveRun("host:1")
    run.observe(reply(islands=[linked("east", 8e5, bucket=True), linked("west", 0.0)]), 100.0)

    chart = network_chart(run.view().links)

    assert chart is not None
    texts = [edge.text for edge in chart.edges]
    assert "east to object store: 800 kbit/s, round trip 60 ms" in texts
    assert "object store to syncer 0: 800 kbit/s, round trip 60 ms" in texts
    assert "west to syncer 0: 0 bit/s, round trip 60 ms" in texts
    assert network_chart([]) is None


def read(events: Sequence[tuple[str, Event]]) -> RecordedRun:
    run = RecordedRun("/state", {"run.inner_steps": "8"})
    for second, (name, event) in enumerate(events):
        who = {"island": name, "island_rank": 0, "incarnation": 1} if name else {}
        run.add({"unix_s": 100.0 + second, "run": "r", **who, **event.as_dict()})
    return run


def test_a_recorded_run_is_summed_up_from_its_events() -> None:
    events = [(name, event) for name in ("east", "west") for event in of_island()]
    run = read([*events, ("", opened(0)), ("", closed(0))])

    view = run.view(1e9, is_under_way=False)

    assert view.sentence == (
        "The run has finished: 2 islands, 4 inner steps, published versions 1 to 1."
    )
    figures = {figure.label: figure.value for figure in view.figures}
    assert (figures["goodput"], figures["held-out loss"]) == ("62.5%", "1.5000")
    assert {i.island: (i.up, i.blocked, i.share) for i in view.islands} == dict.fromkeys(
        ("east", "west"), ("1 KiB", "1.0 s", "1 of 1 round")
    )
    assert [link.up for link in view.links] == ["1.26 kbit/s"] * 2
    assert [bar.phase for bar in view.bars] == ["open", "grace", "merge"]
    assert sum(bar.end_s - bar.start_s for bar in view.bars) == pytest.approx(2.25)
    assert {fact.label: fact.value for fact in view.facts}["checkpoints written"] == "4"


def test_a_run_under_way_says_whom_a_fragment_waits_for_and_how_long_it_takes() -> None:
    events: list[tuple[str, Event]] = [
        ("east", step(1)), ("west", step(1)), ("", opened(0)), ("east", step(2)),
        ("west", step(2)), ("east", sent(0)),
    ]  # fmt: skip

    view = read(events).view(106.0, is_under_way=True)

    assert view.sentence == "2 of 2 islands train; fragment 0 waits for west."
    assert view.islands[0].waits_for == "fragment 0, version 1, for 1.0 s"
    assert {f.label: f.value for f in view.figures}["time left"] == "18 s"


def test_steps_that_a_later_start_makes_again_count_once() -> None:
    events = [("east", step(n, float(n))) for n in (1, 2, 3, 4)]
    events += [("east", IslandRejoined(2, 2)), ("east", step(3, 9.0))]

    (curve,) = read(events).view(106.0, is_under_way=True).curves

    assert curve.points == ((128.0, 1.0), (256.0, 2.0), (384.0, 9.0))


def test_an_expired_attempt_says_who_was_missing() -> None:
    expired = RoundExpired(0, 1, 0, ("east", "west"), ("west",), "deadline")

    view = read([("", opened(1)), ("", expired)]).view(0.0, is_under_way=False)

    assert view.versions[0].left_out == "west"
    assert [mark.kind for mark in view.marks] == ["expired"]


def test_an_alarm_holds_until_it_is_cleared() -> None:
    raised = AlarmRaised("island_late", "kick it: diloco kick HOST:PORT west. Then wait", "west")

    held = read([("", raised)])
    over = read([("", raised), ("", AlarmCleared("island_late", "west"))])

    (alarm,) = held.view(101.0, is_under_way=True).alarms
    assert (alarm.holds, alarm.command) == (True, "diloco kick HOST:PORT west")
    assert not over.view(101.0, is_under_way=True).alarms[0].holds


def test_events_with_any_value_that_is_none_of_theirs_never_end_the_page() -> None:
    """Files are other machines'; each value of each kind is tried as each of these."""
    wrong = [None, True, -1, 1e308, 10**400, math.inf, math.nan, "<b>", "\ud800", [], {}, [[2]]]
    kinds = [*of_island(), opened(0), closed(0), AlarmRaised("kind", "text", "east")]
    context = {"unix_s": 1e9, "island": "east", "island_rank": 0, "incarnation": 1}
    run = RecordedRun("/state", {})

    for event in kinds:
        whole = context | event.as_dict()
        for key in whole:
            for value in wrong:
                run.add(whole | {key: value})
                run.add({name: v for name, v in whole.items() if name not in (key, "island")})
    view = run.view(2e9, is_under_way=True)
    pages = [page_of(each, [view], 0, Query(), Frame(can_sign_out=False)) for each in VIEWS]

    assert run.num_malformed and "were left out" in view.notices[0]
    assert not any(b"<b>" in page.encode() for page in pages)


def test_a_status_with_figures_that_are_none_never_ends_the_page() -> None:
    run = LiveRun("host:1")
    for figure in (math.nan, math.inf, -math.inf):
        odd = dict.fromkeys(("loss_nats", "blocked_s", "utilisation", "left_s", "step_s"), figure)
        run.observe(reply(islands=[island("east", **odd)]), 100.0)

    page = page_of("islands", [run.view()], 0, Query(), Frame(can_sign_out=False))

    assert "<td" in page


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("give time: diloco set HOST:PORT outer.grace=10s, or less", "set A outer.grace=10s"),
        ("take it out: diloco kick HOST:PORT west. If not, stop", "kick A west"),
        ("back: diloco kick HOST:PORT west --undo, then start it", "kick A west --undo"),
        ("diloco repair HOST:PORT --fragment 3 --from-island b)", "repair A --fragment 3 "
         "--from-island b"),
        ("go back: diloco coordinator RUN.toml --resume", "coordinator RUN.toml --resume"),
        ("end the run: diloco stop HOST:PORT and wait", "stop A"),
        ("diloco kick HOST:PORT west;rm -rf /", "kick A west"),
        ("diloco kick HOST:PORT $(reboot)", ""),
        ("diloco local RUN.toml", ""),
        ("look at its data", ""),
    ],
)  # fmt: skip
def test_an_alarm_names_a_command_and_no_other_program(text: str, command: str) -> None:
    assert command_in(text, "A") == (command and f"diloco {command}")


def test_curves_and_pictures_have_bounded_many_points() -> None:
    curve = Curve()
    for number in range(1, 10_001):
        curve.add(number, float(number), 1.0)
    many = [CurveView(f"island {n}", curve.points) for n in range(200)]
    bars = [Bar(0, second, second + 0.5, "open", "") for second in range(5000)]

    losses = loss_chart(many)
    timeline = timeline_chart(bars, [], end_s=5000.0, span_s=5000.0)

    assert len(curve.points) <= 1024 and curve.points[-1][0] == 10_000
    assert losses is not None and timeline is not None
    assert sum(len(line.points.split()) for line in losses.lines) <= 200 * 22
    assert [each.style for each in timeline.outlines] == ["phase open"]
    assert timeline.outlines[0].path.count("M") <= WIDTH / 0.6
    assert loss_chart([]) is None
    assert timeline_chart([], [], end_s=1.0, span_s=1.0) is None


def test_a_live_curve_grows_however_often_a_step_is_seen() -> None:
    run = LiveRun("host:1")
    for step_number in range(1, 1301):
        told = island("east", loss_nats=2.5)
        told.last_report.inner_step = told.last_report.tokens = step_number
        for _ in range(1 + 2 * (step_number > 1024)):
            run.observe(reply(islands=[told]), float(step_number))

    points = run.view().curves[0].points

    assert [x for x, _ in points[-3:]] == [1296.0, 1298.0, 1300.0]


def test_merges_of_many_islands_leave_room_for_what_was_published() -> None:
    run = read([("", opened(0)), ("", closed(0))])
    for number in range(MOST_BARS):
        context = {"unix_s": 200.0, "island": f"island-{number}", "incarnation": 1}
        run.add(context | dict(merged(1).as_dict()))

    marks = run.view(300.0, is_under_way=True).marks

    assert (marks[0].kind, len(marks)) == ("published", 1 + MOST_BARS)


def test_events_are_found_by_kind_and_island_and_runs_by_what_differs() -> None:
    events = [EventRow(n, kind, who, "") for n, (kind, who) in enumerate(
        [("alarm", "east"), ("alarm", "west"), ("state", "")]
    )]  # fmt: skip

    assert [event.at for event in filtered(events, "alarm", "")] == [1, 0]
    assert [event.at for event in filtered(events, "alarm", "west")] == [1]
    assert differing([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]) == [
        ("b", ["2", "3"]),
        ("c", ["-", "4"]),
    ]


def test_a_run_whose_islands_left_early_was_stopped() -> None:
    view = read([("east", step(1)), ("east", ended(1, ()))]).view(200.0, is_under_way=False)

    assert view.state == "stopped"
    assert view.sentence.startswith("The run was stopped: 1 island, 1 inner step")


def test_an_island_that_has_ended_waits_for_nothing() -> None:
    view = read([("east", step(1)), ("east", sent(0)), ("east", merged(1)), ("east", ended(1))])

    (row,) = view.view(200.0, is_under_way=False).islands

    assert (row.state, row.waits_for, row.utilisation) == ("ended", "-", "50.0%")
