"""A summary from hand-made events and the real records of a small run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.protocol.run.slots import Account
from diloco.report.island_starts import effective
from diloco.report.summary import Summary, read_events, summarise
from diloco.telemetry.events import (
    Evaluated,
    Event,
    InnerStepDone,
    IslandEnded,
    IslandRejoined,
    IslandResumed,
    SlotDrawn,
    TextUntold,
)
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.shaping.link import Link, LinkProfile
from diloco.versions.store import FragmentStore
from tests.run_files import write_run
from tests.virtual_run import Setting, VirtualRun, descend

ENDED = IslandEnded(
    inner_step=8,
    tokens=1024,
    wall_s=16.0,
    inner_s=8.0,
    blocked_s=4.0,
    undisturbed_step_s=1.0,
    utilisation=0.5,
    goodput=0.5,
    overwritten_steps=2.25,
    bytes_up=100,
    bytes_down=1000,
    digests=(),
)
#: 1000 bytes a second up, 2000 down, one second of round trip.
LINK = LinkProfile("path", up=Link(8000, 0.5), down=Link(16000, 0.5), source="test")


def island_events(
    island: str, island_rank: int, events: Sequence[Event], incarnation: int = 1
) -> list[dict[str, Any]]:
    """Give events as a sink writes them, one a second."""
    context = {
        "island": island, "island_rank": island_rank, "timeline": 0, "incarnation": incarnation
    }  # fmt: skip
    return [{"unix_s": float(n), **context, **e.as_dict()} for n, e in enumerate(events)]


class Run:
    """A finished run of two islands: east has two ranks, west one."""

    def __init__(self, directory: Path) -> None:
        self.setting = Setting(
            {"v": [8.0], "w": [16.0]},
            descend,
            directory / "store",
            inner_steps=8,
            islands=("east", "west"),
            tokens={"east": 1, "west": 3},
            num_fragments=2,
            flush=True,
        )
        run_virtual(VirtualRun(self.setting).run())
        self.plan = self.setting.plan()
        self.stores = [
            FragmentStore(self.setting.directory, fragment, 4) for fragment in self.plan.fragments
        ]
        run_file = write_run(directory, {"east": "dp_shard = 2", "west": ""})
        self.config: Config = load_config(run_file)
        digests = []
        for store in self.stores:
            recovered = store.recover()
            assert recovered is not None
            digests.append(recovered.record.digest.hex())
        self.ended = replace(ENDED, digests=tuple(digests))
        self.leader = [
            *(InnerStepDone(step, 2.0, 0.5, 1e-3, 128, 1.0) for step in range(1, 9)),
            Evaluated(4, "published", 9.0),
            Evaluated(8, "local", 1.5),
            Evaluated(8, "published", 1.25),
        ]
        self.events: dict[str, list[dict[str, Any]]] = {
            "east": self.of("east", 0)
            + island_events(
                "east", 1, [replace(self.ended, tokens=0, bytes_up=30, bytes_down=300)]
            ),
            "west": self.of("west", 0),
        }

    def of(self, island: str, island_rank: int, **changes: Any) -> list[dict[str, Any]]:
        return island_events(island, island_rank, [*self.leader, replace(self.ended, **changes)])

    def summary(
        self, link: LinkProfile | None = None, alarms: Sequence[Mapping[str, Any]] = ()
    ) -> Summary:
        return summarise(
            self.config,
            self.plan,
            self.setting.schedule(),
            stores=self.stores,
            events=self.events,
            link=link,
            alarms=alarms,
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_summary_of_a_run_that_can_be_trusted(run: Run) -> None:
    summary = run.summary()

    assert summary.are_digests_equal
    assert summary.are_versions_recomputed
    assert summary.as_dict()["are_digests_equal"] is True
    # Sent after inner steps 2, 6 and 4, then both with the flush.
    assert [(f.version, f.recomputed_versions) for f in summary.fragments] == [
        (3, (3, 2, 1)),
        (2, (2, 1)),
    ]
    assert {f.contributors for f in summary.fragments} == {("east", "west")}
    east, west = summary.islands
    assert (east.island, east.shape) == ("east", "2 ranks, dp_shard 2")
    assert (west.island, west.shape) == ("west", "1 rank")
    assert (east.bytes_up, east.bytes_down) == (130, 1300), "summed over ranks"
    assert (west.bytes_up, west.bytes_down) == (100, 1000)
    assert (east.inner_steps, east.tokens, east.wall_s) == (8, 1024, 16.0)
    assert (east.utilisation, east.goodput, east.blocked_s) == (0.5, 0.5, 4.0)
    assert (east.local_nats_per_byte, east.published_nats_per_byte) == (1.5, 1.25)
    text = summary.as_text()
    assert "digests equal on every island" in text
    assert "from the retained contributions: 5 bit-equal." in text
    assert summary.problems == ()
    assert "max_nats_per_byte" not in text
    assert "versions 0: v3, 1: v2" in text
    assert "1,024 tokens in 16 s, evaluations not counted" in text
    assert "utilisation 50.0% (undisturbed step 1 s), not blocked 75.0%, goodput 50.0%" in text
    assert "overwritten steps 2.2;" in text
    assert "link as it is" in text


def test_alternatives_are_counted_and_timed_on_the_link(run: Run) -> None:
    summary = run.summary(LINK)

    # A fragment of one value is one block, 512 bytes; 3 sends and 2 of the flush. A gradient has
    # two values; 8 inner steps. The slower direction is up.
    assert [(a.bytes_up, a.bytes_down, a.transfer_s) for a in summary.alternatives] == [
        (2560, 2560, pytest.approx(2.56 + 5.0)),
        (64, 64, pytest.approx(0.064 + 8.0)),
    ]
    text = summary.as_text()
    assert "link path (8 kbit/s up, 16 kbit/s down, 1 s round trip)" in text
    # East moved 1430 bytes.
    assert "2.5 KiB up and 2.5 KiB down an island, 3.6 times as much: 7.56 s of transfers" in text


def test_a_run_that_started_warm_is_compared_from_there(run: Run) -> None:
    run.leader = run.leader[4:]
    run.events = {"west": run.of("west", 0)}

    summary = run.summary(LINK)

    (west,) = summary.islands
    assert (west.inner_steps, west.num_steps, west.tokens) == (8, 4, 512)
    # Of the three sends one is left, after inner step 6; a gradient at inner steps 5 to 8.
    assert [a.bytes_up for a in summary.alternatives] == [1536, 32]


def test_an_island_that_was_away_when_a_run_ended_that_waited_for_nobody_is_named(
    run: Run,
) -> None:
    run.events["west"] = island_events("west", 0, run.leader[:3])
    with pytest.raises(ConfigError, match="island west are not those of one run to its end"):
        run.summary()
    outer = run.config.outer.model_copy(update={"merge": "on_arrival"})
    run.config = run.config.model_copy(update={"outer": outer})

    summary = run.summary()

    assert summary.away == ("west",)
    assert [island.island for island in summary.islands] == ["east"]
    assert summary.problems == ()
    assert "Away when the run ended, and not counted: west." in summary.as_text()
    planned, trained = run.config.total_tokens, sum(i.tokens for i in summary.islands)
    of_plan = f"{trained:,} were trained ({trained / planned - 1:+.1%} of the plan)"
    assert f"{planned:,} merged tokens end the run; {of_plan}" in summary.as_text()

    run.events["east"] = island_events("east", 0, run.leader[:3])
    with pytest.raises(ConfigError, match=r"no island of the run .* has come to its end"):
        run.summary()


def test_an_island_with_other_bytes_is_told(run: Run) -> None:
    run.events["west"] = run.of("west", 0, digests=(run.ended.digests[0], "00"))

    summary = run.summary()

    assert not summary.are_digests_equal
    assert summary.are_versions_recomputed
    assert "digests DIFFER BETWEEN ISLANDS" in summary.as_text()
    assert "do not hold the values that the syncer has recorded" in summary.problems[0]


@pytest.mark.parametrize(("bound", "is_low"), [(1.2501, True), (1.25, False)])
def test_the_loss_that_the_run_file_demands_is_checked(
    run: Run, bound: float, is_low: bool
) -> None:
    evaluation = run.config.evaluation.model_copy(update={"max_nats_per_byte": bound})
    run.config = run.config.model_copy(update={"evaluation": evaluation})

    summary = run.summary()

    assert summary.is_loss_low_enough is is_low
    expected = f"parameters {'is' if is_low else 'IS NOT'} below the {bound:g} nats a byte"
    assert expected in summary.as_text()
    assert len(summary.problems) == (not is_low)
    assert is_low or summary.problems[0].endswith(
        "parameters 1.2500 nats a byte, not below evaluation.max_nats_per_byte = 1.25"
    )


def test_a_retained_version_that_is_damaged_is_told(run: Run) -> None:
    path = run.setting.directory / "fragment-0000" / "v000000000001.record"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))

    summary = run.summary()

    assert [(f.is_bit_equal, f.recomputed_versions) for f in summary.fragments] == [
        (False, (3, 2)),
        (True, (2, 1)),
    ]
    assert f"NOT EQUAL, fragment 0 version 1: {path} is torn or damaged" in summary.as_text()
    assert str(path) in summary.problems[0]


def test_where_nothing_was_published_nothing_is_praised(tmp_path: Path) -> None:
    setting = Setting(
        {"v": [8.0], "w": [16.0]}, descend, tmp_path / "store", 1, islands=("east", "west")
    )
    run_virtual(VirtualRun(setting).run())
    run = Run(tmp_path / "other")
    run.setting, run.plan = setting, setting.plan()
    run.stores = [FragmentStore(setting.directory, f, 4) for f in run.plan.fragments]

    summary = run.summary()

    assert [(f.version, f.is_bit_equal) for f in summary.fragments] == [(0, None)]
    assert "from the retained contributions: there are none." in summary.as_text()


@pytest.mark.parametrize("version", [3, 1], ids=["last", "oldest_retained"])
def test_a_version_that_its_contributions_do_not_give_is_told(run: Run, version: int) -> None:
    store = run.stores[0]
    record = store.load(version)
    swapped = {
        "east": record.contributions["west"],
        "west": record.contributions["east"],
    }
    store.commit(replace(record, contributions=swapped))

    summary = run.summary()

    assert [f.is_bit_equal for f in summary.fragments] == [False, True]
    assert not summary.are_versions_recomputed
    assert summary.are_digests_equal
    assert "NOT EQUAL" in summary.as_text()


def two_ends(run: Run) -> list[dict[str, Any]]:
    return run.events["east"] + island_events("east", 0, [run.ended])


def two_starts(run: Run) -> list[dict[str, Any]]:
    return island_events("east", 0, run.leader[:3]) + run.events["east"]


def no_end(run: Run) -> list[dict[str, Any]]:
    return [e for e in run.events["east"] if e["kind"] != "island_ended"]


def no_end_of_rank_1(run: Run) -> list[dict[str, Any]]:
    return [e for e in run.events["east"] if e["island_rank"] != 1]


@pytest.mark.parametrize("events_of", [two_ends, two_starts, no_end, no_end_of_rank_1])
def test_events_of_anything_but_one_run_are_refused(
    run: Run, events_of: Callable[[Run], list[dict[str, Any]]]
) -> None:
    run.events["east"] = events_of(run)

    with pytest.raises(ConfigError, match=r"events of island east are not .* telemetry\.dir"):
        run.summary()


def test_a_return_and_a_resume_are_said(run: Run) -> None:
    leader = run.leader
    rest = [IslandRejoined(6, 3), *leader[6:], run.ended]
    run.events["west"] = island_events("west", 0, leader[:6]) + island_events("west", 0, rest, 2)
    rest = [IslandResumed(4, 1), *leader[4:], run.ended]
    run.events["east"] = island_events("east", 0, leader[:4]) + island_events("east", 0, rest, 2)
    run.events["east"] += island_events("east", 1, [run.ended], 2)

    summary = run.summary()

    east, west = summary.islands
    assert (east.num_starts, east.num_returns, west.num_returns, west.lost_steps) == (2, 0, 1, 3)
    assert (east.tokens, west.tokens) == (1024, 1024)
    # Six steps of the killed start, a second apart; the last start told 16 s.
    assert west.wall_s == 16.0 + 5.0 + 1.0
    assert west.utilisation == 8 * 1.0 / 22.0
    text = summary.as_text()
    assert "Resumed after inner step 4; figures are sums over the starts" in text
    assert text.count("Returned once: 3 inner steps were lost.") == 1


@pytest.mark.parametrize(
    ("east", "is_said"),
    [
        ({"blocked_s": 4.8}, True),
        ({"blocked_s": 9.6}, True),
        ({"blocked_s": 9.7}, False),
        ({"blocked_s": 0.1}, False),
        ({"blocked_s": 0.4, "undisturbed_step_s": 1.5}, False),
    ],
    ids=["slowest_is_the_cause", "half_the_cause", "link_is_the_cause", "not_blocked", "as_fast"],
)
def test_waiting_for_the_slowest_island_is_said(
    run: Run, east: Mapping[str, Any], is_said: bool
) -> None:
    # West's inner step takes 1.6 s, east's 1 s: over 8 inner steps east is 4.8 s ahead.
    run.events["east"] = run.of("east", 0, **east) + run.events["east"][-1:]
    run.events["west"] = run.of("west", 0, undisturbed_step_s=1.6)

    text = run.summary().as_text()

    assert ("waited for west, whose inner step takes 1.6 times as long" in text) is is_said
    assert "waited for east" not in text


def test_alarms_are_said_once_each_with_how_often_they_began(run: Run) -> None:
    returned = {"kind": "return", "island": "", "fragment_id": -1, "reporter": "coordinator"}
    refused = {**returned, "kind": "contribution_refused", "island": "west", "fragment_id": 1}
    told = [{**refused, "text": f"norm {n}", "reporter": "syncer 0"} for n in (7, 8, 9)]

    text = run.summary(alarms=[*told, {**returned, "text": "to cut 4"}]).as_text()

    assert text.splitlines()[-2:] == [
        "  Alarm: contribution_refused, island west, fragment 1: norm 9 (3 times, by syncer 0)",
        "  Alarm: return: to cut 4 (by coordinator)",
    ]
    assert "Alarm" not in run.summary().as_text()


def test_a_run_that_ended_before_it_published_has_nothing_to_sum_up(run: Run) -> None:
    shutil.rmtree(run.stores[0].store_dir)

    with pytest.raises(ConfigError, match="has no published version of fragment 0"):
        run.summary()


def test_events_are_read_by_island_and_a_torn_line_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = {name: island_events(name, 0, [ENDED]) for name in ("east", "west")}
    for name, lines in events.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        # Torn by a kill, in the midst of the file when another start went on with it.
        torn = '{"kind": "inner_'
        (tmp_path / f"events-{name}-0.jsonl").write_text(torn + '{"kind": 1}\n' + text + torn)

    (tmp_path / "events-far-0.jsonl").symlink_to(tmp_path / "events-far-0.jsonl")
    os.mkfifo(tmp_path / "events-pipe-0.jsonl")
    (tmp_path / "events-deep-0.jsonl").write_text("[" * 200_000)

    found = read_events(tmp_path, ["east"])

    assert found == {"east": [json.loads(json.dumps(line)) for line in events["east"]]}
    warnings = [line for line in caplog.messages if line.startswith("torn line skipped")]
    assert len(warnings) == 5
    assert f"path={tmp_path / 'events-east-0.jsonl'} line=1" in warnings[1]


def test_steps_that_were_no_slower_besides_exchanges_bound_utilisation(run: Run) -> None:
    run.events["west"] = run.of("west", 0, undisturbed_step_s=3.0)

    east, west = run.summary().islands

    # 8 steps of 3 s would be more than the wall time of 16 s; 8 s were spent in them.
    assert (east.utilisation, west.utilisation, west.goodput) == (0.5, 0.5, 0.5)
    assert (east.is_shared, west.is_shared) == (False, True)
    assert "Utilisation is at most that" in run.summary().as_text()


def test_text_that_changed_hands_is_added_up_over_starts_and_islands(run: Run) -> None:
    def drawn(slot: int, grant: int, begun: int, ended: int, untold: int = 0) -> SlotDrawn:
        return SlotDrawn(ended, slot, grant, {"web": begun}, {"web": ended}, untold)

    run.events["east"] += island_events("east", 0, [drawn(0, 0, 0, 7, 3), drawn(0, 0, 0, 12)])
    run.events["west"] += island_events("west", 0, [drawn(1, 0, 0, 5), drawn(0, 4, 10, 20)])
    run.events["west"] += island_events("west", 0, [TextUntold(8, 4, 4)])

    summary = run.summary()

    assert summary.text is not None
    assert summary.text.accounts == {"web": Account(trained=27, repeated=2, skipped=0)}
    text = summary.as_text()
    assert "Text in batches: web: 27 trained, 2 of them again, 0 skipped. Slots were taken" in text
    assert "taken up 3 times; an island was at most 4 ahead of what it had told" in text
    assert "(data.handover_samples = 8,192, passed once as the coordinator did not answer)" in text
    assert summary.as_dict()["text"]["accounts"]["web"]["repeated"] == 2


def test_text_of_a_start_whose_steps_were_lost_counts_as_drawn() -> None:
    context = {"island": "east", "island_rank": 0, "timeline": 0}
    events = [
        {**context, "incarnation": 1, "kind": "inner_step", "inner_step": 9},
        {**context, "incarnation": 1, "kind": "slot_drawn", "inner_step": 9},
        {**context, "incarnation": 2, "kind": "island_rejoined", "inner_step": 4},
    ]

    assert [event["kind"] for event in effective(events)] == ["slot_drawn", "island_rejoined"]
