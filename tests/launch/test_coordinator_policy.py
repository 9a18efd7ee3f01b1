"""Whether a coordinator may be started again with another policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.classes import policy_json
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.launch.run_claim import claim, timeline_of
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.run.membership import Membership
from diloco.state_dir import StateDir, hold
from tests.run_files import write_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path, {"east": "", "west": ""})


def begun(config: Config, *, joined: bool) -> tuple[StateDir, Membership]:
    state = StateDir(Path(config.coordinator.state_dir))
    state.create()
    membership = Membership("test", ("east", "west"), "{}", lambda a, b: [], 100, 2)
    if joined:
        plan = make_plan([TensorSpec("w", (8,))], num_fragments=1)
        join = membership.join(
            run="test", island="east", identity_json="{}", plan_json=plan.to_json(),
            corpus_sha256="", tokenizer_digest="", start_step=0, start_id="a",
        )  # fmt: skip
        membership.apply(join.entries)
    claim(config, policy_json(config), state, membership)
    timeline_of(membership).write(state.timeline)
    return state, membership


def test_a_run_with_syncers_elsewhere_keeps_the_policy_that_it_began_with(
    run_file: Path, tmp_path: Path
) -> None:
    elsewhere = [f"run.state=file://{tmp_path}/bucket", "syncers={eu={}}"]
    state, membership = begun(load_config(run_file, elsewhere), joined=True)
    other = load_config(run_file, [*elsewhere, "outer.optimizer.lr=0.1"])

    with pytest.raises(ConfigError, match=r"(?s)outer\.optimizer\.lr.*--resume"):
        claim(other, policy_json(other), state, membership)

    membership.apply(membership.resumed(0))
    claim(other, policy_json(other), state, membership)
    assert load_config(state.resolved) == other


def test_another_batch_changes_the_tokens_that_end_a_run_on_arrival(run_file: Path) -> None:
    config = load_config(run_file, ["outer.preset=decoupled"])
    larger = load_config(
        run_file, ["outer.preset=decoupled", "islands.west.tokens_per_inner_step=4096"]
    )
    state, membership = begun(config, joined=True)

    with hold(StateDir(state.root).syncers[0].store_lock):
        with pytest.raises(ConfigError, match=r"tokens of the run.* here, .* there"):
            claim(larger, policy_json(larger), state, membership)
        claim(config, policy_json(config), state, membership)
    # The syncer that starts next has it, too.
    claim(larger, policy_json(larger), state, membership)


def test_before_an_island_has_joined_the_policy_may_change(run_file: Path) -> None:
    state, membership = begun(load_config(run_file), joined=False)
    other = load_config(run_file, ["outer.optimizer.lr=0.1"])

    claim(other, policy_json(other), state, membership)

    assert load_config(state.resolved) == other
