"""Coordinator and syncer as real processes: the run returns to its last good checkpoint by itself.

The islands are calls of this test, so that a return takes seconds; `faults/test_run_returns.py` has
real ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.checkpoint.run_checkpoints import open_journal
from diloco.protos.control_pb2 import Grant, HeldOut
from tests.coordinator.test_coordinator_process import founded, leave, pin, poll, publish, report
from tests.coordinator_site import Site, eventually, status

pytestmark = pytest.mark.timeout(120)

CHECKPOINTS = "checkpoint.every_inner_steps=2"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.close()


def judged_bad(coordinator: str, syncer: str, grants: list[Grant]) -> None:
    """Let a run have a good checkpoint after inner step 6, then one that is not finite."""
    publish(syncer, grants, 0, 0, 0.5)
    for grant in grants:
        assert pin(syncer, grant, 6, 1, 0).is_accepted
        good = [HeldOut(checkpoint=6, nats_per_byte=2.0)]
        report(coordinator, grant, inner_step=6, checkpoint_steps=[6], held_out=good)
    publish(syncer, grants, 1, 0, 0.5)
    for grant in grants:
        bad = [HeldOut(checkpoint=8, nats_per_byte=math.inf)]
        report(coordinator, grant, inner_step=8, checkpoint_steps=[6, 8], held_out=bad)


def check_return(site: Site, coordinator: str, islands: list[str]) -> None:
    """Check that both islands go on from the good checkpoint in the next timeline."""

    def joined() -> list[Grant]:
        replies = [site.join(coordinator, name, f"{name}-2") for name in islands]
        is_made = all(r.grant.timeline == 1 and r.is_resumed and r.syncers for r in replies)
        assert not is_made or {r.resume_step for r in replies} == {6}
        return [r.grant for r in replies] if is_made else []

    grants = eventually(joined, "the next timeline")
    syncer = site.syncer_address(coordinator, "east", "east-2")
    versions = [state.version for state in poll(syncer, grants[0]).fragments]
    assert versions == [1, 0], "what was published after the checkpoint is abandoned"
    seen = status(coordinator)
    assert (seen.timeline, list(seen.checkpoint_steps)) == (1, [6])
    (alarm,) = [a.alarm for a in seen.alarms if a.alarm.kind == "return"]
    assert alarm.text.startswith("the run returned to checkpoint 6 by itself: held-out loss of")


@pytest.mark.slow
def test_a_run_returns_within_the_process_of_its_coordinator(site: Site) -> None:
    process, coordinator = site.coordinate_until_up(CHECKPOINTS)
    syncer, *grants = founded(site, coordinator)
    judged_bad(coordinator, syncer, grants)

    replies = [report(coordinator, grant, inner_step=9) for grant in grants]
    assert [(reply.stop, reply.exit_code) for reply in replies] == [(True, 42)] * 2
    for grant in grants:
        leave(coordinator, grant, 42)

    check_return(site, coordinator, ["east", "west"])
    old = report(coordinator, grants[0], inner_step=9)
    assert (old.stop, old.exit_code) == (True, 42), "anyone who was away hears of it, too"
    assert process.poll() is None
    with open_journal(site.state.journal) as journal:
        kinds = [entry.kind for entry in journal.audit_rows()]
    assert kinds.count("timeline") == 1


@pytest.mark.slow
def test_a_coordinator_that_dies_once_a_return_is_decided_makes_it_when_it_starts(
    site: Site,
) -> None:
    process, coordinator = site.coordinate_until_up(CHECKPOINTS)
    syncer, *grants = founded(site, coordinator)
    judged_bad(coordinator, syncer, grants)
    process.kill()
    process.wait()

    _, again = site.coordinate_until_up(CHECKPOINTS)

    assert again == coordinator
    check_return(site, again, ["east", "west"])
