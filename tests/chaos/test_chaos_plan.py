"""A plan's faults: a pure function of the file, the seed and the run's islands."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from diloco.chaos.plan import Kind, PlanConfig, expand, load_plan
from diloco.chaos.runner import configured, faults_of
from diloco.errors import ConfigError

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "configs" / "chaos").glob("*.toml"))
ISLANDS = {"east": 1, "west": 2}


def plan(**values: object) -> PlanConfig:
    return PlanConfig.model_validate(
        {"run": "run.toml", "duration": "600s", "limit": "1200s", **values}
    )


def mixed(**values: object) -> PlanConfig:
    kinds = {"kill": 3.0, "freeze": 1.0, "cut": 1.0, "delay": 1.0, "flip": 1.0}
    return plan(mix={"kinds": kinds, "mean_gap": "5s", **values})


def test_the_same_file_gives_the_same_faults() -> None:
    assert expand(mixed(), ISLANDS) == expand(mixed(), ISLANDS)


def test_another_seed_gives_others() -> None:
    faults = expand(mixed(), ISLANDS)
    others = expand(mixed().model_copy(update={"seed": 2}), ISLANDS)

    assert [fault.text for fault in faults] != [fault.text for fault in others]


def test_gaps_and_kinds_are_as_often_as_asked() -> None:
    faults = expand(mixed(), ISLANDS)
    kills = sum(fault.kind is Kind.KILL for fault in faults)

    # 120 faults are expected: three standard deviations of a Poisson number are 33.
    assert 87 <= len(faults) <= 153
    assert 0.25 < kills / len(faults) < 0.6, "3 of 7 in weight"
    assert {fault.target for fault in faults} == {"coordinator", "syncer", "east", "west"}
    assert [fault.number for fault in faults] == [*range(len(faults))]
    assert all(1.0 <= f.lasts_s <= 5.0 for f in faults if f.kind is Kind.FREEZE)


def test_a_count_ends_the_mix() -> None:
    assert len(expand(mixed(count=7), ISLANDS)) == 7


def test_link_faults_of_one_island_follow_each_other() -> None:
    cut = {"kind": "cut", "target": "east", "at": "1s", "lasts": "5s"}
    delay = {"kind": "delay", "target": "east", "at": "2s", "lasts": "5s"}
    other = {"kind": "delay", "target": "west", "at": "2s", "lasts": "5s"}

    faults = expand(plan(fault=[cut, delay, other]), ISLANDS)

    assert [(f.kind, f.target, f.at_s) for f in faults] == [
        ("cut", "east", 1.0), ("delay", "west", 2.0), ("delay", "east", 8.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        ("kill", "north", "must be coordinator, syncer, an island"),
        ("kill", "west/2", "must be coordinator, syncer, an island"),
        ("restart", "coordinator", "restart cannot happen to coordinator"),
        ("cut", "syncer", "cut cannot happen to syncer"),
        ("flip", "east", "flip cannot happen to east"),
        ("cut", "east/0", "cut cannot happen to east/0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(kind: str, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        expand(plan(fault=[{"kind": kind, "target": target, "at": "1s"}]), ISLANDS)


def test_several_syncers_are_named_one_by_one() -> None:
    names = ["syncer-0", "syncer-1"]
    kills = plan(fault=[{"kind": "kill", "target": "syncer-1", "at": "1s"}])
    drawn = expand(plan(mix={"kinds": {"kill": 1.0}, "mean_gap": "5s"}), ISLANDS, names)

    (fault,) = expand(kills, ISLANDS, names)

    assert (fault.target, fault.role, fault.island) == ("syncer-1", "syncer", "")
    assert {f.target for f in drawn} == {"coordinator", *names, *ISLANDS}
    with pytest.raises(ConfigError, match="kind kill: must be coordinator, syncer, an island"):
        expand(kills, ISLANDS)
    with pytest.raises(ConfigError, match="must be coordinator, syncer-0, syncer-1, an island"):
        expand(plan(fault=[{"kind": "flip", "target": "syncer", "at": "1s"}]), ISLANDS, names)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValidationError, match="kind"):
        plan(fault=[{"kind": "meteor", "target": "east", "at": "1s"}])


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.stem)
def test_shipped_plans_load_and_their_runs_do(shipped: Path, tmp_path: Path) -> None:
    loaded = load_plan(shipped)
    config = configured(loaded, tmp_path / "run")

    faults = faults_of(loaded, config)

    assert faults
    assert config.coordinator.state_dir == str(tmp_path / "run")


def test_the_quick_plan_and_that_of_a_bucket_have_every_kind() -> None:
    plans = [load_plan(path).config for path in SHIPPED if path.stem in ("quick", "bucket")]

    faults = [fault for plan in plans for fault in plan.fault]
    assert {fault.kind for fault in faults} == {*Kind}
    met = {fault.kind for fault in faults if fault.target == "bucket"}
    assert met >= {Kind.CUT, Kind.ERRORS, Kind.READ_ONLY, Kind.LOSE_OBJECT, Kind.CLOCK}


def test_a_bucket_is_met_where_there_is_one() -> None:
    cut = {"kind": "cut", "target": "bucket", "at": "1s", "lasts": "20s"}
    slow = {"kind": "delay", "target": "bucket", "at": "2s", "lasts": "20s"}
    late = {**slow, "delay": "60s", "at": "50s"}
    some = {"kind": "errors", "target": "bucket", "at": "80s", "lasts": "20s"}
    all_ = {**some, "at": "110s", "share": 1.0}

    faults = expand(plan(fault=[cut, slow, late, some, all_]), ISLANDS, has_bucket=True)

    assert [f.takes_nothing for f in faults] == [True, False, True, False, True]
    assert {(f.role, f.island) for f in faults} == {("bucket", "")}
    with pytest.raises(ConfigError, match=r"and run.state is no s3:// URL"):
        expand(plan(fault=[cut]), ISLANDS)
    with pytest.raises(ConfigError, match="kill cannot happen to bucket"):
        expand(plan(fault=[{**cut, "kind": "kill"}]), ISLANDS, has_bucket=True)


@pytest.mark.parametrize(
    ("stem", "snapshot_rounds"), [("control-plane-50", 1), ("decoupled-control-plane-50", 4)]
)
def test_fifty_kills_are_fifty(stem: str, snapshot_rounds: int, tmp_path: Path) -> None:
    loaded = load_plan(next(path for path in SHIPPED if path.stem == stem))
    config = configured(loaded, tmp_path)

    faults = faults_of(loaded, config)

    assert config.outer.snapshot_rounds == snapshot_rounds
    assert config.outer.is_on_arrival == (snapshot_rounds > 1)
    assert loaded.config.judge.syncer_back == "2s" == loaded.config.judge.coordinator_back

    assert len(faults) == 50
    assert {fault.kind for fault in faults} == {Kind.KILL}
    assert {fault.target for fault in faults} == {"coordinator", "syncer"}
