"""What a configuration, and what an operator has set since, make of a syncer's rules."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import cast

import pytest

from diloco.config.classes import policy_json
from diloco.config.load import load_config, with_settings
from diloco.errors import ConfigError
from diloco.forecast.build import build_syncer_rules
from diloco.launch.syncer import _keep_plan
from diloco.launch.syncer_files import KeptOrders
from diloco.objects.moved_fragment import let_go
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Roster
from diloco.protocol.run.plan_bytes import packed
from diloco.protos.control_pb2 import FragmentSource, SyncerHelloReply
from diloco.state_dir import StateDir
from diloco.syncer.reporter import Reporter
from tests.run_files import write_run

ISLANDS = {"east": "", "west": ""}
DECOUPLED = (
    "outer.preset=decoupled",
    "outer.num_fragments=2",
    "outer.inner_steps_per_round=6",
    "outer.overlap_steps=2",
    "outer.round_deadline=40s",
)


def test_a_scheduled_run_waits_for_all_its_islands(tmp_path: Path) -> None:
    rules = build_syncer_rules(load_config(write_run(tmp_path, ISLANDS)), timeline=3)

    assert (rules.timeline, rules.islands) == (3, ("east", "west"))
    assert (rules.min_members, rules.quorum, rules.timing) == (None, None, None)
    assert (rules.total_tokens, rules.on_member_lost) == (0, "stop")


def test_where_nobody_waits_times_are_measured_and_tokens_end_the_run(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, ISLANDS), DECOUPLED)
    rules = build_syncer_rules(config, timeline=0)

    assert (rules.min_members, rules.quorum, rules.lease_s) == (1, 1, 10.0)
    assert rules.total_tokens == config.total_tokens > 0
    assert rules.publication.merge.name == "radial_directional"
    assert rules.timing is not None
    assert (rules.timing.inner_steps_per_round, rules.timing.overlap_steps) == (6, 2)
    assert (rules.timing.deadline_floor_s, rules.timing.deadline_cap_s) == (5.0, 40.0)
    assert rules.timing.grace_s is None
    fixed = load_config(write_run(tmp_path, ISLANDS), [*DECOUPLED, "outer.grace=2s"])
    timing = build_syncer_rules(fixed, timeline=0).timing
    assert timing is not None
    assert timing.grace_s == 2.0


def test_orders_are_kept_over_a_restart_and_change_the_rules(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()
    config = load_config(write_run(tmp_path, ISLANDS), DECOUPLED)
    kept = KeptOrders(state.orders, config, build_syncer_rules(config, timeline=2))
    settings = json.dumps({"outer.optimizer.lr": 0.25, "outer.min_contributions": 2})
    orders = Orders(Roster(("east",), {"west": 3}, True, 1, 7), settings, 4)
    assert kept.load() == Orders()

    kept.store(orders)
    rules = kept.rules(orders)

    assert kept.load() == orders
    assert (rules.timeline, rules.quorum, rules.policy_revision) == (2, 2, 4)
    assert rules.publication.optimizer.lr == 0.25
    assert math.isclose(rules.lease_s, 10.0)
    whole = {**json.loads(policy_json(config)), **json.loads(settings)}
    assert kept.rules(Orders(None, json.dumps(whole), 4)) == rules


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, ISLANDS), DECOUPLED)

    with pytest.raises(ConfigError, match=r"outer\.seed"):
        with_settings(config, '{"outer.seed": 1}')
    with pytest.raises(ConfigError, match="min_contributions = 3"):
        with_settings(config, '{"outer.min_contributions": 3}')


def test_one_of_several_syncers_learns_its_fragments_with_the_plan_and_again_without_them(
    tmp_path: Path,
) -> None:
    specs = [TensorSpec(name, (3,)) for name in "uvwxy"]
    plan_json = make_plan(specs, num_fragments=5).to_json()
    asked = 0

    class Told:
        async def learn_plan(self) -> SyncerHelloReply:
            nonlocal asked
            asked += 1
            return SyncerHelloReply(  # 1 and 4 are to move from here, 2 to here
                plan=packed(plan_json),
                fragment_ids=[2, 3],
                takes=[FragmentSource(fragment_id=2, syncer="syncer-0")],
                elsewhere=[0],
            )

    state = StateDir(tmp_path, "syncer-1")
    state.create(["syncer-0", "syncer-1"])
    let_go(state, [4])
    for rotten in ("", "[0,", "[7]", '["x"]', "{}", "[1, 3]"):
        state.fragments.write_text(rotten)
        asyncio.run(_keep_plan(state, cast(Reporter, Told()), asyncio.Event()))

        assert state.plan.read_text() == plan_json
        assert json.loads(state.fragments.read_text()) == [1, 3]
    assert asked == 5, "not where nothing is wrong"
