"""What a fragment may be founded with: wholly checked, before it is durable."""

from __future__ import annotations

import json
from typing import Any

import blake3
import pytest

from diloco.coordinator.journal import Journal
from diloco.coordinator.round_journal import RoundJournal, check_initial, read_record
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.transport.errors import FrameError
from diloco.versions.version import founding_record

DIGEST = "0" * 64


def initial() -> dict[str, Any]:
    (fragment,) = make_plan([TensorSpec("w", (40_000,))], num_fragments=1).fragments
    lanes = {lane.lane_id: bytearray(4 * lane.numel) for lane in fragment.lanes}
    return founding_record(fragment, lanes, 0).header()


def test_version_0_founds_a_run() -> None:
    record = read_record(json.dumps(initial()), 0)

    check_initial(record, num_lanes=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "7",
        "null",
        json.dumps({"fragment_id": 0, "version": 0}),
        json.dumps({**initial(), "version": "0"}),
        json.dumps({**initial(), "version": True}),
        json.dumps({**initial(), "version": 2**63}),
        json.dumps({**initial(), "timeline": -1}),
        json.dumps({**initial(), "fragment_id": 1}),
    ],
)
def test_what_is_no_header_is_refused(text: str) -> None:
    with pytest.raises(FrameError):
        read_record(text, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": 1},
        {"timeline": 1},
        {"is_flush": True},
        {"digest": DIGEST},
        {"digest": None},
        {"lane_digests": None},
        {"lane_digests": [1]},
        {"lane_digests": ["x"]},
        {"lane_digests": [DIGEST], "digest": blake3.blake3(bytes(32)).hexdigest()},
        {"lane_digests": ["00", "00"], "digest": blake3.blake3(bytes(2)).hexdigest()},
        {"contributors": [{"island": "a"}]},
        {"refused": {"a": "why"}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_that_initial_parameters_do_not_make_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        check_initial({**initial(), **change}, num_lanes=2)


def test_a_start_reads_the_newest_rounds_of_its_fragment_and_timeline(tmp_path: Any) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.open()
    for timeline, p, version in [(0, 0, 9), *((1, p, v) for v in range(8) for p in (0, 1))]:
        contributors = [{"island": "a", "incarnation": version}]
        header = {"version": version, "attempt": p, "contributors": contributors, "refused": {}}
        journal.write([], [(timeline, p, version, json.dumps(header))])

    past = RoundJournal(journal, 1).past(1, num_rounds=3)

    assert sorted(past) == [4, 5, 6]
    assert past[6].contributors == {("a", 7)}
    assert past[6].attempt == 1
    assert sorted(RoundJournal(journal, 1).past(0, num_rounds=100)) == list(range(7))
    journal.close()
