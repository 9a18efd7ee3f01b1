"""Golden traces: whole runs whose local and published values are computed by hand.

One parameter `w` starts at 16; every inner step island a subtracts 1 and island b subtracts 3. All
numbers are exact in float32. Most are in diloco/conformance/golden.toml, which `diloco conformance`
reads, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.conformance.golden import DESCENT, START, History, Trace, golden_traces
from diloco.outer.optimizer import OuterOptimizer
from diloco.transport.calls.loopback import run_virtual
from tests.virtual_run import Setting, VirtualIsland, VirtualRun


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.sub_(DESCENT[island])


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting({"w": [16.0]}, descend, tmp_path, inner_steps=8)


def trace(setting: Setting) -> tuple[dict[str, list[float]], dict[str, VirtualIsland]]:
    """Run; return 'a', 'b' (local) and 'published' histories of w, and the islands."""
    islands = run_virtual(VirtualRun(setting).run())
    histories = {name: [v["w"][0] for v in island.local] for name, island in islands.items()}
    published = [[v["w"][0] for v in island.published] for island in islands.values()]
    assert all(history == published[0] for history in published), "invariant 1: same bytes"
    return {**histories, "published": published[0]}, islands


def setting_of(golden: Trace, directory: Path) -> Setting:
    """Give the setting of a trace of the file; keys of [outer] are called as its fields are."""
    outer = dict(golden.outer)
    if (optimizer := outer.pop("optimizer", None)) is not None:
        ramp = optimizer["momentum_ramp_rounds"]
        outer["optimizer"] = OuterOptimizer(
            optimizer["name"], optimizer["lr"], optimizer["momentum"], ramp
        )
    phases = tuple(outer.pop("phases", ()))
    return Setting(
        {"w": [START]},
        descend,
        directory,
        golden.inner_steps,
        islands=golden.islands,
        tokens=golden.tokens,
        phases=phases,
        **outer,
    )


@pytest.mark.parametrize("golden", golden_traces(), ids=lambda golden: golden.name)
def test_a_run_is_as_computed_by_hand(golden: Trace, tmp_path: Path) -> None:
    histories, islands = trace(setting_of(golden, tmp_path))

    found = {
        name: History(histories[name], histories["published"], island.values()["w"][0])
        for name, island in islands.items()
    }
    assert not golden.difference(found)


def test_what_differs_from_a_trace_is_said() -> None:
    golden = golden_traces()[0]
    assert golden.a is not None and golden.b is not None and golden.published is not None
    found = {
        "a": History(golden.a, golden.published),
        "b": History(golden.b[:-1], golden.published),
    }

    assert golden.difference(found) == (
        f"{golden.name}: local values of island b are {golden.b[:-1]}, not {golden.b}"
    )


def test_nesterov_equals_pytorch_with_different_gradients(setting: Setting, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    moves = torch.randn(2, 12, 5, generator=generator)

    def move(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        parameters["w"].sub_(moves[int(island == "b"), inner_step - 1])

    reference = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for round_index in range(4):
        optimizer.zero_grad()
        reference.grad = moves[:, 3 * round_index : 3 * round_index + 3].sum(1).mean(0)
        optimizer.step()

    islands = run_virtual(
        VirtualRun(
            replace(
                setting,
                initial={"w": [0.0] * 5},
                inner_step=move,
                inner_steps=12,
                inner_steps_per_round=3,
                optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 0),
            )
        ).run()
    )

    # 12 additions of values below 10 and 4 outer steps: below 100 roundings of 10 * 2^-24 each.
    torch.testing.assert_close(
        torch.tensor(islands["a"].local[-1]["w"]), reference.detach(), rtol=0, atol=6e-5
    )
    assert islands["a"].local[-1] == islands["b"].local[-1]


def test_fragments_leave_at_their_phases(setting: Setting) -> None:
    # Fragment of u is due at 2, 6 (H 4, P 2), that of w at 4, 8. The first interval of u has 2
    # steps: its mean is 2 * 2 = 4 below 16.
    histories = run_virtual(
        VirtualRun(replace(setting, initial={"u": [16.0], "w": [16.0]}, num_fragments=2)).run()
    )

    assert [v["u"][0] for v in histories["a"].published] == [16, 12, 12, 12, 12, 4, 4, 4]
    assert [v["w"][0] for v in histories["a"].published] == [16, 16, 16, 8, 8, 8, 8, 0]


def test_the_version_of_a_flush_is_the_one_after_the_last_round(setting: Setting) -> None:
    _, islands = trace(replace(setting, inner_steps=6, overlap_steps=1, flush=True))

    last = islands["a"].kinds("fragment_merged")[-1]
    assert (last["is_flush"], last["version"]) == (True, 2)


def test_flush_carries_the_send_that_could_not_merge(setting: Setting) -> None:
    # With tau 2 the send at 8 would merge at 10, after the end: the flush carries its work.
    _, islands = trace(replace(setting, inner_steps=9, overlap_steps=2, flush=True))

    assert [e["inner_step"] for e in islands["a"].kinds("fragment_sent")] == [4, 9]


def test_int4_both_ways_keeps_islands_equal(setting: Setting) -> None:
    _, islands = trace(
        replace(
            setting,
            inner_steps=12,
            overlap_steps=1,
            flush=True,
            uplink_codec="int4",
            downlink_codec="int4",
            optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 2),
        )
    )

    assert islands["a"].values() == islands["b"].values()
    assert islands["a"].session.digests == islands["b"].session.digests


def test_a_scheduled_run_is_bit_reproducible(setting: Setting, tmp_path: Path) -> None:
    changed = replace(
        setting,
        inner_steps=12,
        overlap_steps=2,
        uplink_codec="int4",
        downlink_codec="int4",
        optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 0),
    )

    first, _ = trace(replace(changed, directory=tmp_path / "first"))
    second, _ = trace(replace(changed, directory=tmp_path / "second"))

    assert first == second
