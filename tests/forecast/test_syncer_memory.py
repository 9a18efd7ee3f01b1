"""A syncer's memory: foreseen from the plan, bounds merges at once, refused where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.forecast.syncer_memory import SyncerMemory, check_syncer_memory, syncer_memory
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.outer.guard import samples_bytes

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.toml"
GIB = 1 << 30
MEMORY = SyncerMemory(lasting_bytes=100 * GIB, merge_bytes=10 * GIB)


@pytest.mark.parametrize(
    ("num_threads", "available", "expected"),
    [
        (96, None, 24),
        (96, 1000 * GIB, 24),
        (96, 145 * GIB, 4),
        (2, 1000 * GIB, 1),
        (96, 105 * GIB, 1),
        (96, 50 * GIB, 1),
    ],
    ids=["not known", "cores", "memory", "few cores", "one", "less than it takes"],
)
def test_merges_at_once_are_bounded_by_cores_and_by_memory(
    num_threads: int, available: int | None, expected: int
) -> None:
    assert MEMORY.merges_at_once(num_threads, available) == expected


def test_a_syncer_takes_its_state_what_arrives_and_one_merge() -> None:
    codecs = ["outer.uplink_codec=int4", "outer.downlink_codec=float32"]
    config = load_config(DEMO, [*codecs, "coordinator.spool_memory=1GiB"])
    plan = make_plan([TensorSpec("u", (1 << 28,)), TensorSpec("w", (1 << 26,))], num_fragments=2)
    small, large = sorted(plan.fragments, key=lambda fragment: fragment.numel)

    own = syncer_memory(config, plan.fragments)

    samples = samples_bytes(large.numel, 2)
    merge_bytes = 8 * large.numel + samples
    assert own.merge_bytes == merge_bytes == syncer_memory(config, [large]).merge_bytes
    assert 0.9 * 2 * 4 * 2**16 < samples <= 2 * 4 * 2**16
    # State, payloads, lanes; what two islands send is less than the spool holds.
    coded = 2 * (0.5 + 2 / 64) * (large.numel + small.numel)
    assert own.lasting_bytes == pytest.approx(
        (12 + 4) * (large.numel + small.numel) + 12 * large.numel + 2 * coded, rel=0.02
    )
    spooled = load_config(DEMO, [*codecs, "coordinator.spool_memory=64MiB"])
    assert own.lasting_bytes - syncer_memory(spooled, plan.fragments).lasting_bytes > GIB // 8


@pytest.mark.parametrize(
    ("num_islands", "extra_mib"),
    [(2, 0), (64, 16 + 8 - 12), (1000, 1000 * (4 + 8) / 64 - 12)],
    ids=["less than the merge", "16 MiB and a tile of each", "tiles of each"],
)
def test_where_angles_decide_lanes_take_parts_of_all_contributions(
    num_islands: int, extra_mib: float
) -> None:
    plan = make_plan([TensorSpec("w", (1 << 24,))], num_fragments=1)
    radial, mean = (
        syncer_memory(
            load_config(
                DEMO,
                [
                    "outer.merge=on_arrival",
                    f"outer.merge_rule={rule}",
                    f"run.max_islands={num_islands}",
                ],
            ),
            plan.fragments,
        ).lasting_bytes
        for rule in ("radial_directional", "mean")
    )

    assert radial - mean == 16 * extra_mib * (1 << 20), "of 16 lanes, a million values each"


def test_a_run_whose_syncer_does_not_fit_is_refused_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(DEMO, [])
    plan = make_plan([TensorSpec("w", (1 << 28,))], num_fragments=2)
    monkeypatch.setattr("diloco.checkpoint.host_memory.available_bytes", lambda: 8 * GIB)

    check_syncer_memory(config, plan, 0)
    monkeypatch.setattr("diloco.checkpoint.host_memory.available_bytes", lambda: 4 * GIB)
    with pytest.raises(ConfigError, match=r"spool_memory = .* 4 GiB are available; .*host"):
        check_syncer_memory(config, plan, 0)
