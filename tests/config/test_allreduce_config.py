"""What an all-reduce refuses by name, and what it moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.bounded_text import MOST_ENDING, MOST_REASON, MOST_TEXT
from diloco.config.island import announced_bytes
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.forecast.forecast import forecast
from diloco.protocol.rounds.allreduce import Assignment, Prepared, commit_record
from diloco.protocol.rounds.allreduce_messages import assignment_message
from diloco.protocol.rounds.messages import outcome_message
from diloco.protocol.rounds.terms import Contributor, Outcome, OutcomeKind, RoundKey
from diloco.protos import allreduce_pb2
from diloco.protos.fragment_pb2 import Fatal
from tests.run_files import write_run

ALLREDUCE = "outer.exchange=allreduce"
BEYOND = "islands.a.peer_listen=10.0.0.5:7000"


def run_file(directory: Path, num_islands: int = 2) -> Path:
    return write_run(directory, dict.fromkeys("abcdefghijklmnopq"[:num_islands], ""))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([ALLREDUCE, "coordinator.syncer_listen=127.0.0.1:7001"], "coordinator.syncer_listen"),
        ([ALLREDUCE, "coordinator.syncer_address=host:7001"], "coordinator.syncer_address"),
        ([ALLREDUCE, "coordinator.spool_memory=2GiB"], "coordinator.spool_memory"),
        ([ALLREDUCE, "coordinator.num_syncers=2"], "coordinator.num_syncers"),
        ([ALLREDUCE, "telemetry.syncer_metrics=127.0.0.1:7001"], "telemetry.syncer_metrics"),
        (["islands.a.peer_address=host:7001"], "islands.a.peer_address"),
        ([ALLREDUCE, BEYOND], "islands.a.peer_listen"),
        ([ALLREDUCE, "islands.a.heal_optimizer=true"], "islands.a.heal_optimizer"),
        ([ALLREDUCE, "islands.a.peer_listen=nowhere"], "islands.a.peer_listen"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    tmp_path: Path, overrides: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(run_file(tmp_path), overrides)


def test_peers_beyond_loopback_need_a_word_on_security(tmp_path: Path) -> None:
    beyond = [BEYOND, "coordinator.listen=10.0.0.5:7001", "transport.insecure=true"]
    config = load_config(run_file(tmp_path), [ALLREDUCE, *beyond])

    assert config.islands["a"].peer_listen == "10.0.0.5:7000"


def test_more_islands_than_can_talk_with_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="17 islands"):
        load_config(run_file(tmp_path, 17), [ALLREDUCE])


def test_more_lanes_than_can_be_announced_are_refused(tmp_path: Path) -> None:
    streams = ["outer.num_fragments=3", "outer.preset=streaming"]

    with pytest.raises(ConfigError, match=r"16 islands with 3 fragments.*lower outer\.num_lanes"):
        load_config(run_file(tmp_path, 16), [ALLREDUCE, *streams, "outer.num_lanes=1024"])

    assert load_config(run_file(tmp_path, 16), [ALLREDUCE, *streams, "outer.num_lanes=512"])


@pytest.mark.parametrize(
    ("num_fragments", "num_lanes", "num_refused"),
    [(24, 70, 0), (24, 70, 8), (1, 900, 0), (100, 1, 0), (100, 1, 15)],
)
def test_what_a_coordinator_announces_is_bounded(
    num_fragments: int, num_lanes: int, num_refused: int
) -> None:
    islands = [f"island-{i:02d}" for i in range(16)]
    key = RoundKey(9, 99, 10**6, 9)
    contributors = tuple(
        Contributor(name, 10**4, 10**12, 10**6, 10**9, (bytes(32),) * num_lanes)
        for name in islands[num_refused:]
    )
    refused = dict.fromkeys(islands[:num_refused], '"' * MOST_REASON)
    assignment = Assignment(key, tuple(islands), contributors, False, refused, 10**6)
    announcement = allreduce_pb2.Announcement(
        fragment_id=99, version=10**6, attempt=9, state_digest=bytes(32),
        assignment=assignment_message(assignment),
    )  # fmt: skip
    peer = allreduce_pb2.Peer(
        island=islands[0], incarnation=10**4, address="p" * MOST_TEXT,
        mac_digest=bytes(32),
    )  # fmt: skip
    outcome = outcome_message(Outcome(key, OutcomeKind.REFUSED, "r" * MOST_REASON))
    reply = allreduce_pb2.PollReply(
        fragments=[announcement] * num_fragments, peers=[peer] * 16,
        outcomes=[outcome] * num_fragments, fatal=Fatal(reason="f" * MOST_ENDING),
    )  # fmt: skip
    record = commit_record(assignment, Prepared((bytes(32),) * num_lanes, bytes(32)), "float32")

    bound = announced_bytes(num_fragments, num_lanes, islands)

    said = max(reply.ByteSize(), len(json.dumps(record)))
    assert said < bound
    if num_refused == (0 if num_lanes > 1 else 15):  # the larger of the two
        assert said > bound / 2


@pytest.mark.parametrize(
    ("codec", "num_islands", "bytes_a_value"),
    [
        # (N - 1) / N (u + d + e); float32: d = 0, e = 4; int4 (0.5156): e = (N - 1) u up to 8.
        ("float32", 2, 4.0),
        ("float32", 4, 6.0),
        ("int4", 2, 0.7734),
        ("int4", 4, 1.9336),
        ("int4", 16, 4.7168),
    ],
)
def test_a_plan_counts_what_an_all_reduce_moves(
    tmp_path: Path, codec: str, num_islands: int, bytes_a_value: float
) -> None:
    overrides = [ALLREDUCE, f"outer.uplink_codec={codec}", f"outer.downlink_codec={codec}"]

    planned = forecast(load_config(run_file(tmp_path, num_islands), overrides))

    assert planned.round_bytes_up == planned.round_bytes_down
    # Padding to whole blocks counts as values: below 3 % of this small model.
    assert planned.round_bytes_up / planned.parameters == pytest.approx(bytes_a_value, rel=0.03)
