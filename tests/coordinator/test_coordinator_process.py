"""Coordinator and syncer as real processes on this machine: joins, kills, restarts, refusals."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import blake3
import pytest

from diloco.checkpoint.run_checkpoints import open_journal, read_membership
from diloco.config.load import load_config
from diloco.protos import control_pb2 as control
from diloco.protos import fragment_pb2 as wire
from diloco.state_dir import holder, read_endpoint
from diloco.transport.contracts import PROTOCOL_VERSION
from tests.coordinator_site import (
    OTHER_PLAN,
    PLAN,
    Site,
    call,
    eventually,
    status,
)
from tests.run_files import indexed_headers
from tests.waiting import said_by

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.close()


def poll(address: str, grant: control.Grant, *outstanding: wire.RoundKey) -> wire.PollReply:
    request = wire.PollRequest(
        protocol_version=PROTOCOL_VERSION, grant=grant, outstanding=outstanding, wait_s=0
    )
    return wire.PollReply.FromString(call(address, "fragment.poll", request).header)


def values(fragment_id: int, lane_id: int, scale: float) -> bytes:
    lane = PLAN.fragments[fragment_id].lanes[lane_id]
    return array("f", [scale * (i % 7) for i in range(lane.end - lane.start)]).tobytes()


def upload(address: str, grant: control.Grant) -> None:
    for part in PLAN.fragments:
        for lane in part.lanes:
            payload = values(part.fragment_id, lane.lane_id, 1.0)
            header = wire.UploadHeader(
                protocol_version=PROTOCOL_VERSION,
                grant=grant,
                fragment_id=part.fragment_id,
                lane_id=lane.lane_id,
                digest=blake3.blake3(payload).digest(),
            )
            ack = wire.Ack.FromString(call(address, "fragment.upload", header, payload).header)
            assert ack.is_accepted, ack.message


def pin(address: str, grant: control.Grant, step: int, *versions: int) -> wire.Ack:
    request = wire.PinRequest(
        protocol_version=PROTOCOL_VERSION,
        grant=grant,
        checkpoint_step=step,
        versions=[wire.Pinned(fragment_id=p, version=v) for p, v in enumerate(versions)],
    )
    return wire.Ack.FromString(call(address, "fragment.pin", request).header)


def submit(
    address: str, grant: control.Grant, key: wire.RoundKey, scale: float
) -> list[wire.SubmitReply]:
    replies = []
    for lane in PLAN.fragments[key.fragment_id].lanes:
        payload = values(key.fragment_id, lane.lane_id, scale)
        header = wire.SubmitHeader(
            protocol_version=PROTOCOL_VERSION,
            grant=grant,
            key=key,
            lane_id=lane.lane_id,
            sent_at_inner_step=4,
            weight_tokens=128,
            weight_steps=4,
            codec="float32",
            digest=blake3.blake3(payload).digest(),
        )
        reply = call(address, "fragment.submit", header, payload)
        replies.append(wire.SubmitReply.FromString(reply.header))
    return replies


def publish(
    syncer: str, grants: Sequence[control.Grant], fragment_id: int, version: int, scale: float
) -> None:
    """Have every island contribute to one round, and wait for its end."""
    timeline = grants[0].timeline
    key = wire.RoundKey(timeline=timeline, fragment_id=fragment_id, version=version, attempt=0)
    for grant in grants:
        submit(syncer, grant, key, scale)
    eventually(lambda: poll(syncer, grants[0], key).outcomes, f"version {version + 1}")


def leave(
    address: str, grant: control.Grant, exit_code: int = 0, *, is_stopped: bool = False
) -> None:
    request = control.LeaveRequest(
        protocol_version=PROTOCOL_VERSION, grant=grant, exit_code=exit_code, is_stopped=is_stopped
    )
    call(address, "control.leave", request)


def report(address: str, grant: control.Grant, **fields) -> control.ReportReply:
    request = control.ReportRequest(protocol_version=PROTOCOL_VERSION, grant=grant, **fields)
    return control.ReportReply.FromString(call(address, "control.report", request).header)


def indexed(site: Site) -> list[tuple[int, int]]:
    """Fragment and version of every record that the journal knows, sorted."""
    return sorted((h["fragment_id"], h["version"]) for h in indexed_headers(site.state))


def founded(site: Site, coordinator: str) -> tuple[str, control.Grant, control.Grant]:
    """Join both islands and found version 0; returns the syncer's address and both grants."""
    east = site.join(coordinator, "east", "east-1").grant
    west = site.join(coordinator, "west", "west-1").grant
    syncer = site.syncer_address(coordinator, "east", "east-1")
    poll(syncer, west)
    assert all(state.wants_initial for state in poll(syncer, east).fragments)
    upload(syncer, east)
    assert all(state.is_founded for state in poll(syncer, west).fragments)
    return syncer, east, west


def test_first_join_fixes_the_plan_and_every_start_gets_one_incarnation(site: Site) -> None:
    _, address = site.coordinate_until_up()

    first = site.join(address, "east", "a")
    repeated = site.join(address, "east", "a")
    second = site.join(address, "east", "b")
    fenced = site.join(address, "east", "a")
    other_plan = site.join(address, "west", "a", OTHER_PLAN)
    other_identity = site.join(address, "west", "a", overrides=("outer.overlap_steps=2",))
    unknown = site.join(address, "north", "a")
    west = site.join(address, "west", "a")

    incarnations = [r.grant.incarnation for r in (first, repeated, second, fenced, west)]
    assert incarnations == [1, 1, 2, 1, 1]
    assert other_plan.status == control.JOIN_STATUS_PLAN_MISMATCH
    assert "fragments: 2 entries here, 1 entries there" in other_plan.message
    assert other_identity.status == control.JOIN_STATUS_FINGERPRINT_MISMATCH
    assert "outer.overlap_steps: 1 here, 2 there" in other_identity.message
    assert unknown.status == control.JOIN_STATUS_UNKNOWN_ISLAND
    assert "east, west" in unknown.message
    assert (first.island_slot, west.island_slot) == (0, 1)
    assert json.loads(west.policy_json)["run.inner_steps"] == 16


def test_run_survives_kills_of_coordinator_and_syncer_and_ends_when_all_islands_left(
    site: Site,
) -> None:
    process, coordinator = site.coordinate_until_up()
    syncer, east, west = founded(site, coordinator)
    before = poll(syncer, east)
    syncer_pid = holder(site.state.store_lock)

    process.kill()
    process.wait()
    key = wire.RoundKey(timeline=0, fragment_id=1, version=0, attempt=0)
    submit(syncer, east, key, 0.5)
    submit(syncer, west, key, 0.25)
    published = eventually(
        lambda: (state := poll(syncer, east, key)).outcomes and state, "version 1 of fragment 1"
    )
    process, restarted = site.coordinate_until_up()
    again = site.join(restarted, "east", "east-1").grant
    adopted_pid = holder(site.state.store_lock)

    assert restarted == coordinator
    assert (again.incarnation, again.mac) == (1, east.mac)
    assert adopted_pid == syncer_pid
    assert published.outcomes[0].kind == wire.OUTCOME_KIND_INCLUDED
    assert site.syncer_address(coordinator, "east", "east-1") == syncer

    expected_headers = [(0, 0), (1, 0), (1, 1)]
    eventually(lambda: indexed(site) == expected_headers, "the report of every record")
    assert syncer_pid is not None
    os.kill(syncer_pid, signal.SIGKILL)
    after = eventually(
        lambda: (reply := poll(syncer, east)).syncer_epoch > before.syncer_epoch and reply,
        "the syncer's next epoch",
    )

    assert [state.version for state in after.fragments] == [0, 1]
    assert after.fragments[0].digest == before.fragments[0].digest
    assert after.fragments[1].digest == published.fragments[1].digest
    assert list(after.fragments[1].contributors) == ["east", "west"]
    assert holder(site.state.store_lock) != syncer_pid
    reported = eventually(
        lambda: (
            (reply := status(coordinator)).syncer_epoch == after.syncer_epoch
            and len(reply.fragments) == 2
            and reply
        ),
        "the restarted syncer's report",
    )
    assert reported.state == "running"
    assert [(f.version, f.digest) for f in reported.fragments] == [
        (state.version, state.digest.hex()) for state in after.fragments
    ]

    leave(coordinator, east)
    leave(coordinator, west)
    output, _ = said_by(process, 30)

    assert process.returncode == 0
    assert output.splitlines()[-1] == "the run 'two-islands' has finished"
    assert holder(site.state.store_lock) is None
    assert read_endpoint(site.state.syncer) is None
    assert indexed(site) == expected_headers
    rerun = site.coordinate()
    assert "has finished" in said_by(rerun, 30)[0]
    assert rerun.returncode == 0


def test_lost_quorum_ends_everybody_with_its_exit_code_and_names_the_missing(site: Site) -> None:
    process, coordinator = site.coordinate_until_up("outer.round_deadline=100ms")
    syncer, east, west = founded(site, coordinator)

    def contribute_alone() -> bool:
        reply = poll(syncer, east)
        state = reply.fragments[0]
        if state.is_open:
            key = wire.RoundKey(timeline=0, fragment_id=0, version=0, attempt=state.attempt)
            submit(syncer, east, key, 0.5)
        return reply.HasField("fatal")

    eventually(contribute_alone, "the loss of the quorum")
    reply = eventually(
        lambda: (r := report(coordinator, west)).stop and r,
        "the order to stop",
    )
    leave(coordinator, east, 50)
    leave(coordinator, west, 50)
    output, _ = said_by(process, 30)

    assert reply.exit_code == 50
    assert "missing: west" in reply.reason
    assert process.returncode == 50
    assert "diloco island RUN.toml --island west" in output
    assert holder(site.state.store_lock) is None


def test_state_dir_admits_one_coordinator_of_one_run(site: Site) -> None:
    process, _ = site.coordinate_until_up()
    second = site.coordinate()
    second_output, _ = said_by(second, 30)

    assert second.returncode == 2
    assert "another coordinator runs in" in second_output
    assert str(process.pid) in second_output
    assert stat.S_IMODE(site.state.secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(site.state.root.stat().st_mode) == 0o700

    process.send_signal(signal.SIGTERM)
    output, _ = said_by(process, 30)

    assert process.returncode == 128 + signal.SIGTERM, "not every island had joined: at once"
    assert "start it again with the same command" in output
    assert holder(site.state.store_lock) is None

    other = site.coordinate("run.seed=99", "run.name=other")
    other_output, _ = said_by(other, 30)

    assert other.returncode == 2
    assert 'run.name: "other" here, "two-islands" there' in other_output
    assert "run.seed: 99 here, 1234 there" in other_output
    assert site.config() == load_config(site.state.resolved)


def test_policy_cannot_change_under_a_living_syncer(site: Site) -> None:
    process, coordinator = site.coordinate_until_up()
    site.join(coordinator, "east", "a")
    site.syncer_address(coordinator, "east", "a")
    process.kill()
    process.wait()
    with open_journal(site.state.journal) as journal:
        journal.write((("stop", '{"east": 12}'),))

    changed = site.coordinate("outer.round_deadline=5s", resume=True)
    output, _ = said_by(changed, 30)

    assert changed.returncode == 2
    with open_journal(site.state.journal) as journal:
        assert dict(journal.entries())["stop"] == '{"east": 12}', "it is not taken back"
    assert 'outer.round_deadline: "5s" here, "30s" there' in output
    assert str(holder(site.state.store_lock)) in output


# -- stop and resume -------------------------------------------------------------------------------


def stopped(site: Site) -> tuple[str, str]:
    """Stop a run after inner step 6, version 1 of fragment 1 in flight; returns the last words."""
    process, coordinator = site.coordinate_until_up()
    syncer, east, west = founded(site, coordinator)
    publish(syncer, [east, west], 0, 0, 0.5)

    process.send_signal(signal.SIGTERM)
    eventually(lambda: report(coordinator, east, inner_step=5).hold, "the request to stop")
    report(coordinator, east, has_hold=True, hold_step=6)
    reply = report(coordinator, west, has_hold=True, hold_step=4)
    assert (reply.has_stop_step, reply.stop_step) == (True, 6)
    for grant in (east, west):
        assert pin(syncer, grant, 6, 1, 0).is_accepted
    publish(syncer, [east, west], 1, 0, 0.5)
    for grant in (east, west):
        report(coordinator, grant, inner_step=6, checkpoint_steps=[6])
        leave(coordinator, grant, is_stopped=True)
    output, _ = said_by(process, 30)
    assert process.returncode == 128 + signal.SIGTERM
    return coordinator, output


def test_a_stopped_run_says_what_to_type_and_goes_on_where_it_was(site: Site) -> None:
    coordinator, output = stopped(site)

    assert "is stopped after inner step 6" in output
    assert str(site.state.store / "pins" / "step-000000000006") in output
    assert "resume it from inner step 6: diloco coordinator RUN.toml --resume" in output
    assert holder(site.state.store_lock) is None
    again = site.coordinate()
    refusal, _ = said_by(again, 30)
    assert again.returncode == 2
    assert "is stopped after inner step 6" in refusal
    assert "diloco coordinator RUN.toml --resume" in refusal
    assert "diloco island RUN.toml --island east" in refusal

    process, resumed_at = site.coordinate_until_up(resume=True)

    assert resumed_at == coordinator
    east, west = [site.join(coordinator, name, f"{name}-2") for name in ("east", "west")]
    for reply in (east, west):
        assert (reply.is_resumed, reply.resume_step) == (True, 6)
        assert (reply.grant.timeline, reply.grant.incarnation) == (1, 2)
    syncer = site.syncer_address(coordinator, "east", "east-2")
    versions = [state.version for state in poll(syncer, west.grant).fragments]
    assert versions == [1, 0], "what was published after the checkpoint is abandoned"
    assert not any(state.is_open for state in poll(syncer, west.grant).fragments)
    poll(syncer, east.grant)
    publish(syncer, [east.grant, west.grant], 1, 0, 0.25)
    eventually(
        lambda: not site.join(coordinator, "east", "east-2").is_resumed,
        "word that the new timeline has published",
    )
    seen = status(coordinator)
    assert (seen.timeline, list(seen.checkpoint_steps)) == (1, [6])

    for reply in (east, west):
        leave(coordinator, reply.grant)
    assert "has finished" in said_by(process, 30)[0]
    assert process.returncode == 0
    assert indexed(site) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 1)]
    finished = site.coordinate(resume=True)
    assert "there is nothing to resume" in said_by(finished, 30)[0]
    assert finished.returncode == 2


@pytest.mark.slow
def test_a_syncer_killed_while_it_takes_the_store_back_is_followed_by_one_that_does(
    site: Site,
) -> None:
    stopped(site)

    process, _ = site.coordinate_until_up(resume_stopped=True)
    killed: set[int] = set()
    for delay_s in (0.0, 0.3, 0.8):
        pid = eventually(
            lambda: (pid := holder(site.state.store_lock)) not in (None, *killed) and pid,
            "a syncer",
        )
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    process.kill()
    process.wait()
    # The same timeline: no second resume of a run that is not stopped any more.
    _, again = site.coordinate_until_up(resume_stopped=True)

    east = site.join(again, "east", "east-2")
    syncer = site.syncer_address(again, "east", "east-2")
    reply = eventually(lambda: poll(syncer, east.grant), "the restored syncer")

    assert (east.is_resumed, east.resume_step, east.grant.timeline) == (True, 6, 1)
    assert [state.version for state in reply.fragments] == [1, 0]


def test_a_second_signal_does_not_wait_for_the_islands(site: Site) -> None:
    process, coordinator = site.coordinate_until_up()
    _, east, _ = founded(site, coordinator)

    process.send_signal(signal.SIGINT)
    eventually(lambda: report(coordinator, east).hold, "the request to stop")
    process.send_signal(signal.SIGTERM)
    output, _ = said_by(process, 30)

    assert process.returncode == 128 + signal.SIGINT, "the first signal counts"
    assert "start it again with the same command, it goes on stopping" in output
    assert holder(site.state.store_lock) is None
    _, again = site.coordinate_until_up()
    assert report(again, east).hold


@pytest.mark.slow
def test_a_stop_that_an_island_stays_away_from_is_taken_back(site: Site) -> None:
    process, coordinator = site.coordinate_until_up("transport.unreachable=2s")
    _, east, _ = founded(site, coordinator)
    process.send_signal(signal.SIGTERM)

    told = list[control.ReportReply]()

    def is_over() -> bool:
        told[:] = [report(coordinator, east, inner_step=6, has_hold=True, hold_step=6)]
        return told[0].stop

    eventually(is_over, "the end of the stop")
    leave(coordinator, east, told[0].exit_code)
    output, _ = said_by(process, 30)

    assert (process.returncode, told[0].exit_code) == (50, 50)
    assert "island 'west' owes word of the inner step after which it can stop" in output
    assert "run goes on where it was: diloco coordinator RUN.toml; then every island" in output
    assert "diloco island RUN.toml --island west" in output
    _, again = site.coordinate_until_up()
    assert status(again).state == "running"
    assert site.join(again, "east", "east-2").grant.incarnation == 2


def test_what_cannot_be_resumed_is_refused_and_touches_nothing(site: Site) -> None:
    nothing = site.coordinate(resume=True)
    assert "there is no run in" in said_by(nothing, 30)[0]
    assert nothing.returncode == 2
    assert not site.state.root.exists()

    process, coordinator = site.coordinate_until_up()
    _, east, _ = founded(site, coordinator)
    living = site.coordinate(resume=True)
    output, _ = said_by(living, 30)
    assert living.returncode == 2
    assert "stop it" in output and str(process.pid) in output
    process.kill()
    process.wait()
    syncer_pid = holder(site.state.store_lock)

    without = site.coordinate(resume=True, at_step=4)
    output, _ = said_by(without, 30)
    assert without.returncode == 2
    assert "no complete checkpoint to resume" in output
    assert holder(site.state.store_lock) == syncer_pid
    _, again = site.coordinate_until_up(resume=True)
    assert holder(site.state.store_lock) == syncer_pid, "it goes on where it was"
    with open_journal(site.state.journal) as journal:
        done = [row.content for row in journal.audit_rows() if row.kind == "operation"]
    assert [each["command"] for each in done] == ["resume"]
    assert not report(again, east).stop


def test_records_reach_the_journal_of_a_coordinator_that_was_away_when_the_run_ended(
    site: Site,
) -> None:
    process, coordinator = site.coordinate_until_up()
    syncer, east, west = founded(site, coordinator)
    eventually(lambda: indexed(site) == [(0, 0), (1, 0)], "the report of version 0")
    process.kill()
    process.wait()
    for version in range(8):  # more than the syncer keeps records of
        publish(syncer, [east, west], 1, version, 0.5)
    with open_journal(site.state.journal) as journal:
        membership = read_membership(site.config(), journal)
        for island in ("east", "west"):  # their leave was the coordinator's last deed
            journal.write(membership.left(island, 0, is_stopped=False))

    again = site.coordinate()

    assert "has finished" in said_by(again, 30)[0]
    assert again.returncode == 0
    assert holder(site.state.store_lock) is None
    assert indexed(site) == [(0, 0), *((1, version) for version in range(9))]


@pytest.mark.slow
def test_records_are_not_lost_when_coordinator_and_syncer_die_one_after_the_other(
    site: Site,
) -> None:
    process, coordinator = site.coordinate_until_up()
    syncer, east, west = founded(site, coordinator)
    process.kill()
    process.wait()
    for version in range(8):
        publish(syncer, [east, west], 1, version, 0.5)
    pid = holder(site.state.store_lock)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    site.coordinate_until_up()

    expected = [(0, 0), *((1, version) for version in range(9))]
    eventually(lambda: indexed(site) == expected, "the report of every record")


@pytest.mark.slow
def test_a_run_that_failed_stays_failed_over_a_restart(site: Site) -> None:
    process, coordinator = site.coordinate_until_up("outer.round_deadline=100ms")
    syncer, east, _ = founded(site, coordinator)

    def contribute_alone() -> bool:
        reply = poll(syncer, east)
        if (state := reply.fragments[0]).is_open:
            key = wire.RoundKey(timeline=0, fragment_id=0, version=0, attempt=state.attempt)
            submit(syncer, east, key, 0.5)
        return reply.HasField("fatal")

    eventually(contribute_alone, "the loss of the quorum")
    eventually(lambda: report(coordinator, east).stop, "the order to stop")
    process.kill()
    process.wait()
    again = site.coordinate("outer.round_deadline=100ms")
    output, _ = said_by(again, 30)

    assert again.returncode == 50
    assert "failed: fragment 0" in output and "missing: west" in output
    assert "no checkpoint is complete" in output
    assert holder(site.state.store_lock) is None


@pytest.mark.slow
def test_a_syncer_whose_coordinator_has_come_back_lives_though_no_island_calls(site: Site) -> None:
    short = "transport.unreachable=12s"
    process, coordinator = site.coordinate_until_up(short)
    syncer, east, _ = founded(site, coordinator)
    pid = holder(site.state.store_lock)
    process.kill()
    process.wait()
    site.coordinate_until_up(short)
    poll(syncer, east)

    time.sleep(25)  # more than twice the key

    assert holder(site.state.store_lock) == pid


@pytest.mark.slow
def test_a_syncer_without_coordinator_and_islands_ends_by_itself_and_goes_on_later(
    site: Site,
) -> None:
    short = "transport.unreachable=6s"
    process, coordinator = site.coordinate_until_up(short)
    syncer, east, _ = founded(site, coordinator)
    before = poll(syncer, east)

    process.kill()
    process.wait()
    eventually(lambda: holder(site.state.store_lock) is None, "the end of the syncer")

    log = site.state.syncer_log.read_text(encoding="utf-8")
    assert "6 s (transport.unreachable) neither the coordinator has answered nor any island" in log
    assert "Traceback" not in log
    _, coordinator = site.coordinate_until_up(short)
    again = eventually(
        lambda: poll(site.syncer_address(coordinator, "east", "east-1"), east), "its next start"
    )
    assert again.syncer_epoch > before.syncer_epoch
    assert [state.digest for state in again.fragments] == [s.digest for s in before.fragments]
