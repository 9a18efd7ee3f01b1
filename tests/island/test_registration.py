"""The leader's word with the coordinator: refusals, patience, reports, departure."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from diloco.errors import (
    ConfigError,
    CoordinatorUnavailable,
    DilocoError,
    Fenced,
    FingerprintMismatch,
    IslandFailed,
    PlanMismatch,
    QuorumLost,
    RunStopped,
)
from diloco.island.graceful_stop import GracefulStop
from diloco.island.registration import IslandState, Registration
from diloco.outer.schedule import Schedule
from diloco.protocol.run.absences import ALL_BACK
from diloco.protocol.run.plan_bytes import packed
from diloco.protos import control_pb2 as control
from diloco.transport.calls.loopback import LoopbackNetwork, run_virtual
from diloco.transport.contracts import PROTOCOL_VERSION, IncomingCall, Reply
from diloco.transport.retry import RetryPolicy

BUDGET_S = 30.0
ISLAND = control.JoinRequest(
    protocol_version=PROTOCOL_VERSION,
    run="demo",
    island="east",
    identity_json='{"run.seed":1}',
    plan=packed("{}"),
    corpus_sha256="5a",
    num_ranks=2,
    start_id="a start",
    start_step=300,
    tokenizer_digest="9f/2",
)
ACCEPTED = control.JoinReply(
    status=control.JOIN_STATUS_ACCEPTED,
    grant=control.Grant(run="demo", island="east", incarnation=3),
    syncers=[control.SyncerAssignment(address="syncer:1")],
)
NOT_YET = control.JoinReply(status=control.JOIN_STATUS_ACCEPTED, grant=ACCEPTED.grant)


def graceful_stop() -> GracefulStop:
    """Due after 4, 8, 12, 16; the run has 20 inner steps."""
    return GracefulStop(
        Schedule.make(
            inner_steps_per_round=4, num_fragments=1, overlap_steps=1, inner_steps=20, flush=True
        )
    )


class FakeCoordinator:
    """Answers with what it is told to, in turn, the last answer for ever; keeps what it heard."""

    def __init__(
        self,
        joins: list[control.JoinReply] | None = None,
        reports: list[control.ReportReply] | None = None,
    ) -> None:
        self.network = LoopbackNetwork()
        self.heard: list[control.JoinRequest | control.ReportRequest | control.LeaveRequest] = []
        self._joins = joins or [ACCEPTED]
        self._reports = reports or [control.ReportReply()]
        handlers = {
            "control.join": self._join,
            "control.report": self._report,
            "control.leave": self._leave,
        }
        self.server = self.network.server("coordinator", handlers)

    def registration(self) -> Registration:
        return Registration(
            self.network.connect("coordinator"),
            ISLAND,
            rpc_deadline_s=5.0,
            policy=RetryPolicy(budget_s=BUDGET_S),
            rng=random.Random(0),
        )

    def of(self, kind: type) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    async def _join(self, call: IncomingCall) -> Reply:
        self.heard.append(control.JoinRequest.FromString(call.header))
        return Reply(_next(self._joins).SerializeToString())

    async def _report(self, call: IncomingCall) -> Reply:
        self.heard.append(control.ReportRequest.FromString(call.header))
        return Reply(_next(self._reports).SerializeToString())

    async def _leave(self, call: IncomingCall) -> Reply:
        self.heard.append(control.LeaveRequest.FromString(call.header))
        return Reply(control.LeaveReply().SerializeToString())


def _next(answers: list):
    return answers.pop(0) if len(answers) > 1 else answers[0]


def run(
    coordinator: FakeCoordinator, story: Callable[[Registration], Awaitable[None]], *, up: bool
) -> None:
    async def tell() -> None:
        if up:
            await coordinator.server.start()
        await story(coordinator.registration())

    run_virtual(tell())


def test_join_says_who_asks_and_asks_again_until_a_syncer_is_there() -> None:
    coordinator = FakeCoordinator(joins=[NOT_YET, NOT_YET, ACCEPTED])

    async def story(registration: Registration) -> None:
        reply = await registration.join()
        assert reply.syncers[0].address == "syncer:1"

    run(coordinator, story, up=True)
    joins = coordinator.of(control.JoinRequest)
    assert len(joins) == 3
    asked = {(j.run, j.island, j.num_ranks, j.start_id, j.start_step) for j in joins}
    assert asked == {("demo", "east", 2, "a start", 300)}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (control.JOIN_STATUS_FINGERPRINT_MISMATCH, FingerprintMismatch),
        (control.JOIN_STATUS_PLAN_MISMATCH, PlanMismatch),
        (control.JOIN_STATUS_KICKED, Fenced),
        (control.JOIN_STATUS_UNKNOWN_ISLAND, ConfigError),
        (control.JOIN_STATUS_WRONG_RUN, ConfigError),
        (control.JOIN_STATUS_VERSION_MISMATCH, ConfigError),
        (control.JOIN_STATUS_RUN_STOPPED, RunStopped),
    ],
    ids=["fingerprint", "plan", "kicked", "island", "run", "version", "stopped"],
)
def test_refusal_is_an_error_with_the_coordinators_words(
    status: control.JoinStatus, expected: type[DilocoError]
) -> None:
    refusal = control.JoinReply(status=status, message="outer.local_mix: 0.0 here, 0.5 there")

    async def story(registration: Registration) -> None:
        with pytest.raises(expected, match=r"'east'.*outer.local_mix: 0.0 here, 0.5 there") as info:
            await registration.join()
        assert info.value.exit_code == expected.exit_code

    run(FakeCoordinator(joins=[refusal]), story, up=True)


@pytest.mark.parametrize(
    ("up", "words"),
    [(False, "gave no answer to control.join"), (True, "syncers did not all register")],
)
def test_join_ends_when_nobody_came_in_time(up: bool, words: str) -> None:
    async def story(registration: Registration) -> None:
        with pytest.raises(CoordinatorUnavailable, match=words):
            await registration.join()
        assert asyncio.get_running_loop().time() < BUDGET_S + 2.0

    run(FakeCoordinator(joins=[NOT_YET]), story, up=up)


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (50, QuorumLost),
        (40, IslandFailed),
        (41, Fenced),
        (30, CoordinatorUnavailable),
        (7, DilocoError),
    ],
)
def test_stop_in_a_report_becomes_the_error_of_its_exit_code(
    exit_code: int, expected: type[DilocoError]
) -> None:
    stop = control.ReportReply(stop=True, reason="west is missing", exit_code=exit_code)
    coordinator = FakeCoordinator(reports=[control.ReportReply(), stop])
    stops: list[DilocoError] = []

    async def story(registration: Registration) -> None:
        await registration.join()
        progress = control.ReportRequest(state=IslandState.TRAINING, inner_step=5, loss_nats=2.5)
        registration.start_reporting(lambda: progress, stops.append, graceful_stop())
        await asyncio.sleep(10)

    run(coordinator, story, up=True)
    (error,) = stops
    assert (type(error), error.exit_code, str(error)) == (expected, exit_code, "west is missing")
    reports = coordinator.of(control.ReportRequest)
    assert len(reports) == 2
    assert {(r.grant.incarnation, r.state, r.inner_step, r.loss_nats) for r in reports} == {
        (3, "training", 5, 2.5)
    }


def test_a_defect_of_the_coordinator_is_not_called_unreachable() -> None:
    async def defect(call: IncomingCall) -> Reply:
        raise KeyError("plan")

    async def story(registration: Registration) -> None:
        with pytest.raises(DilocoError) as caught:
            await registration.join()
        assert type(caught.value) is DilocoError and caught.value.exit_code == 1
        assert "its program failed at control.join: KeyError: 'plan'" in str(caught.value)

    coordinator = FakeCoordinator()
    coordinator.server = coordinator.network.server("coordinator", {"control.join": defect})
    run(coordinator, story, up=True)


def test_reports_survive_a_coordinator_that_is_away() -> None:
    coordinator = FakeCoordinator()
    stops: list[DilocoError] = []

    async def story(registration: Registration) -> None:
        await registration.join()
        registration.start_reporting(control.ReportRequest, stops.append, graceful_stop())
        await asyncio.sleep(2.5)
        await coordinator.server.stop(0)
        await asyncio.sleep(20)
        before = len(coordinator.heard)
        await coordinator.server.start()
        await asyncio.sleep(2.5)
        assert len(coordinator.heard) >= before + 2

    run(coordinator, story, up=True)
    assert stops == []


def test_what_is_due_is_reported_at_once_and_not_in_a_stream() -> None:
    coordinator = FakeCoordinator()
    counts = []

    async def story(registration: Registration) -> None:
        await registration.join()
        registration.start_reporting(control.ReportRequest, lambda error: None, graceful_stop())
        for wait_s in (0.5, 0.2, 0.9):
            await asyncio.sleep(wait_s)
            counts.append(len(coordinator.of(control.ReportRequest)))
            for _ in range(100 if len(counts) == 1 else 0):
                registration.report_soon()

    run(coordinator, story, up=True)
    assert counts == [1, 2, 3]


def test_leave_stops_reports_and_says_the_last_word() -> None:
    coordinator = FakeCoordinator()

    async def story(registration: Registration) -> None:
        await registration.join()
        registration.start_reporting(control.ReportRequest, lambda error: None, graceful_stop())
        await asyncio.sleep(1.5)
        last = control.ReportRequest(state=IslandState.FINISHED, inner_step=9)
        await registration.leave(0, "finished", last=last, at_most_s=5.0)
        await asyncio.sleep(10)

    run(coordinator, story, up=True)
    *_, report, leave = coordinator.heard
    assert (report.state, report.inner_step) == ("finished", 9)
    assert (leave.grant.incarnation, leave.exit_code, leave.reason) == (3, 0, "finished")
    assert not leave.is_stopped


def test_a_part_that_is_being_written_is_said_until_it_is_written() -> None:
    coordinator = FakeCoordinator()
    written = control.CutPart(number=2, versions=[1, 1], inner_step=7)

    async def story(registration: Registration) -> None:
        await registration.join()
        registration.reports.cut = control.CutPart(number=2, is_being_written=True)
        await registration.report(control.ReportRequest())
        await registration.report(control.ReportRequest())
        registration.reports.cut = written
        await registration.report(control.ReportRequest())
        await registration.report(control.ReportRequest())

    run(coordinator, story, up=True)
    cuts = [report.cut for report in coordinator.of(control.ReportRequest)]
    assert [cut.is_being_written for cut in cuts] == [True, True, False, False]
    assert cuts[2:] == [written, control.CutPart()]


def test_an_island_that_is_asked_to_stop_promises_and_hears_where() -> None:
    hold = control.ReportReply(hold=True)
    coordinator = FakeCoordinator(
        reports=[
            control.ReportReply(),
            hold,
            hold,
            hold,
            control.ReportReply(hold=True, has_stop_step=True, stop_step=12),
            control.ReportReply(hold=True, has_stop_step=True, stop_step=16),
            control.ReportReply(
                hold=True, has_stop_step=True, stop_step=16, checkpoint_steps=[8, 16]
            ),
        ]
    )
    line = graceful_stop()

    async def story(registration: Registration) -> None:
        await registration.join()
        registration.start_reporting(control.ReportRequest, lambda error: None, line)
        await asyncio.sleep(2.5)
        line.begin(0)
        assert not line.passing(4)
        await asyncio.sleep(1.0)
        assert line.passing(8)
        await asyncio.sleep(0.8)
        assert line.stop_step == 12
        assert not line.passing(12)
        assert line.after_checkpoint(12) is None
        await asyncio.sleep(1.0)
        assert line.after_checkpoint(12) == 16
        assert line.after_checkpoint(16) is None
        await asyncio.sleep(1.0)
        assert line.after_checkpoint(16) == 16

    run(coordinator, story, up=True)
    promised = [(r.has_hold, r.hold_step) for r in coordinator.of(control.ReportRequest)]
    # Asked at the second report, before training had begun.
    assert promised == [(False, 0)] * 3 + [(True, 8)] * 4


def test_who_is_away_is_said_once_and_that_nobody_is_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    west, north = "island west is away: ...", "island north is away: ..."
    away = [[], [west], [west], [west, north], [north], [], []]
    coordinator = FakeCoordinator(reports=[control.ReportReply(away=texts) for texts in away])

    async def story(registration: Registration) -> None:
        await registration.join()
        registration.start_reporting(control.ReportRequest, lambda error: None, graceful_stop())
        await asyncio.sleep(len(away) + 1.5)

    run(coordinator, story, up=True)
    assert caplog.messages == [west, north, ALL_BACK]


def test_a_stop_that_is_taken_back_voids_the_promise_and_the_next_one_gets_another() -> None:
    hold, not_asked = control.ReportReply(hold=True), control.ReportReply()
    coordinator = FakeCoordinator(reports=[hold, hold, not_asked, hold, hold])
    line = graceful_stop()

    async def story(registration: Registration) -> None:
        await registration.join()
        line.begin(0)
        registration.start_reporting(control.ReportRequest, lambda error: None, line)
        await asyncio.sleep(1.5)
        assert line.passing(4)
        await asyncio.sleep(1.0)
        assert line.after_holding() == 0
        await asyncio.sleep(2.0)

    run(coordinator, story, up=True)
    promised = [(r.has_hold, r.hold_step) for r in coordinator.of(control.ReportRequest)]
    assert promised == [(False, 0), (True, 4), (True, 4), (False, 0), (True, 8)]


def test_who_holds_hears_of_the_end_of_the_run_and_does_not_go_on() -> None:
    hold = control.ReportReply(hold=True)
    end = control.ReportReply(stop=True, reason="the stop cannot end", exit_code=50)
    coordinator = FakeCoordinator(reports=[hold, hold, end])
    line, stops = graceful_stop(), list[DilocoError]()

    async def story(registration: Registration) -> None:
        await registration.join()
        line.begin(0)
        registration.start_reporting(control.ReportRequest, stops.append, line)
        await asyncio.sleep(3.5)

    run(coordinator, story, up=True)
    assert [type(stop) for stop in stops] == [QuorumLost]
    assert line.after_holding() is None


def test_reports_name_the_checkpoints_that_are_kept() -> None:
    coordinator = FakeCoordinator()

    async def story(registration: Registration) -> None:
        await registration.join()
        registration.start_reporting(control.ReportRequest, lambda error: None, graceful_stop())
        await asyncio.sleep(0.5)
        registration.reports.checkpoint_steps = (40, 80)
        await registration.leave(
            0, "stopped", last=control.ReportRequest(inner_step=80), at_most_s=5.0, is_stopped=True
        )

    run(coordinator, story, up=True)
    kept = [list(report.checkpoint_steps) for report in coordinator.of(control.ReportRequest)]
    assert kept == [[], [40, 80]]
    assert coordinator.of(control.LeaveRequest)[0].is_stopped


def test_leave_gives_up_in_time_and_says_nothing_when_it_never_joined() -> None:
    coordinator = FakeCoordinator()

    async def story(registration: Registration) -> None:
        last = control.ReportRequest()
        await coordinator.registration().leave(1, "never joined", last=last, at_most_s=5.0)
        await registration.join()
        await coordinator.server.stop(0)
        began = asyncio.get_running_loop().time()
        await registration.leave(20, "failed", last=control.ReportRequest(), at_most_s=5.0)
        assert asyncio.get_running_loop().time() - began <= 5.0

    run(coordinator, story, up=True)
    assert coordinator.of(control.LeaveRequest) == []


def test_a_join_says_which_tokenizer_the_island_has() -> None:
    async def scenario() -> FakeCoordinator:
        coordinator = FakeCoordinator()
        await coordinator.server.start()
        await coordinator.registration().join()
        return coordinator

    (request,) = run_virtual(scenario()).heard

    assert isinstance(request, control.JoinRequest)
    assert request.tokenizer_digest == "9f/2"
