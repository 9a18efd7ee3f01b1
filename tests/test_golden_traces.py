"""Golden traces: whole runs whose local and published values are computed by hand.

One parameter `w` starts at 16; every inner step island a subtracts 1 and island b subtracts 3. All
numbers are exact in float32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.outer.optimizer import OuterOptimizer
from diloco.transport.calls.loopback import run_virtual
from tests.virtual_run import Setting, VirtualIsland, VirtualRun

DESCENT = {"a": 1.0, "b": 3.0}


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


def test_p1_tau0_alpha0_is_textbook_diloco(setting: Setting) -> None:
    # Means of 2 and 6 are 4. Nesterov 0.5/0.5: buf 4, 6, 7; step 0.5 (4 + buf / 2): 3, 3.5, 3.75.
    nesterov = OuterOptimizer("nesterov", 0.5, 0.5, 0)

    histories, _ = trace(
        replace(setting, inner_steps=6, inner_steps_per_round=2, optimizer=nesterov)
    )

    assert histories == {
        "a": [15, 13, 12, 9.5, 8.5, 5.75],
        "b": [13, 13, 10, 9.5, 6.5, 5.75],
        "published": [16, 13, 13, 9.5, 9.5, 5.75],
    }


def test_outer_sgd_lr1_equals_parameter_averaging(setting: Setting) -> None:
    histories, _ = trace(setting)

    assert histories == {
        "a": [15, 14, 13, 8, 7, 6, 5, 0],
        "b": [13, 10, 7, 8, 5, 2, -1, 0],
        "published": [16, 16, 16, 8, 8, 8, 8, 0],
    }


def test_one_island_with_outer_sgd_lr1_is_plain_training(setting: Setting) -> None:
    histories, _ = trace(replace(setting, islands=("a",)))

    assert histories["a"] == [15, 14, 13, 12, 11, 10, 9, 8]


def test_momentum_ramp_starts_plain(setting: Setting) -> None:
    # mu 0, 0.25, 0.5 over 2 rounds; means 4: buf 4, 5, 6.5; steps 4 + mu buf: 4, 5.25, 7.25.
    ramp = OuterOptimizer("nesterov", 1.0, 0.5, 2)

    histories, _ = trace(replace(setting, inner_steps=6, inner_steps_per_round=2, optimizer=ramp))

    assert histories["published"] == [16, 12, 12, 6.75, 6.75, -0.5]


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


# Sends at 4, 8 merge at 4 + tau, 8 + tau. Published follows from what was sent, so from alpha.
# alpha 0: 8 after the first merge; then a, b are both 8 at the merge.
OVERLAP = {
    (0, 0.0): (
        [15, 14, 13, 8, 7, 6, 5, 0, -1, -2],
        [13, 10, 7, 8, 5, 2, -1, 0, -3, -6],
        [16, 16, 16, 8, 8, 8, 8, 0, 0, 0],
    ),
    # a: (12 + 8) / 2 = 10; at 8 a is 6, b is 6 - 12 = -6: mean 0, published 8 - 8 = 0.
    (0, 0.5): (
        [15, 14, 13, 10, 9, 8, 7, 3, 2, 1],
        [13, 10, 7, 6, 3, 0, -3, -3, -6, -9],
        [16, 16, 16, 8, 8, 8, 8, 0, 0, 0],
    ),
    # Never mixed: a is 16 - t, b 16 - 3 t; published is their mean at the sends.
    (0, 1.0): (
        [15, 14, 13, 12, 11, 10, 9, 8, 7, 6],
        [13, 10, 7, 4, 1, -2, -5, -8, -11, -14],
        [16, 16, 16, 8, 8, 8, 8, 0, 0, 0],
    ),
    # a at 5 is 11, replaced by 8; at 8 a is 5, b is -1: mean 2, merged at 9.
    (1, 0.0): (
        [15, 14, 13, 12, 8, 7, 6, 5, 2, 1],
        [13, 10, 7, 4, 8, 5, 2, -1, 2, -1],
        [16, 16, 16, 16, 8, 8, 8, 8, 2, 2],
    ),
    # a at 5: (11 + 8) / 2 = 9.5, b: (1 + 8) / 2 = 4.5; at 8: 6.5 and -4.5, mean 1, merged at 9:
    # a (5.5 + 1) / 2 = 3.25, b (-7.5 + 1) / 2 = -3.25.
    (1, 0.5): (
        [15, 14, 13, 12, 9.5, 8.5, 7.5, 6.5, 3.25, 2.25],
        [13, 10, 7, 4, 4.5, 1.5, -1.5, -4.5, -3.25, -6.25],
        [16, 16, 16, 16, 8, 8, 8, 8, 1, 1],
    ),
    (1, 1.0): (
        [15, 14, 13, 12, 11, 10, 9, 8, 7, 6],
        [13, 10, 7, 4, 1, -2, -5, -8, -11, -14],
        [16, 16, 16, 16, 8, 8, 8, 8, 0, 0],
    ),
    # Replaced at 6; at 8 a is 6, b is 2: mean 4, merged at 10.
    (2, 0.0): (
        [15, 14, 13, 12, 11, 8, 7, 6, 5, 4],
        [13, 10, 7, 4, 1, 8, 5, 2, -1, 4],
        [16, 16, 16, 16, 16, 8, 8, 8, 8, 4],
    ),
    # a at 6: (10 + 8) / 2 = 9, b: (-2 + 8) / 2 = 3; at 8: 7 and -3, mean 2, merged at 10:
    # a (5 + 2) / 2 = 3.5, b (-9 + 2) / 2 = -3.5.
    (2, 0.5): (
        [15, 14, 13, 12, 11, 9, 8, 7, 6, 3.5],
        [13, 10, 7, 4, 1, 3, 0, -3, -6, -3.5],
        [16, 16, 16, 16, 16, 8, 8, 8, 8, 2],
    ),
    (2, 1.0): (
        [15, 14, 13, 12, 11, 10, 9, 8, 7, 6],
        [13, 10, 7, 4, 1, -2, -5, -8, -11, -14],
        [16, 16, 16, 16, 16, 8, 8, 8, 8, 0],
    ),
}


@pytest.mark.parametrize(("overlap_steps", "local_mix"), OVERLAP, ids=str)
def test_overlap_and_local_mix(setting: Setting, overlap_steps: int, local_mix: float) -> None:
    histories, _ = trace(
        replace(setting, inner_steps=10, overlap_steps=overlap_steps, local_mix=local_mix)
    )

    a, b, published = OVERLAP[overlap_steps, local_mix]
    assert histories == {"a": a, "b": b, "published": published}


def test_unequal_islands_are_weighted_by_tokens(setting: Setting) -> None:
    # a made 3 tokens a step, b 1: mean = (3 * 4 + 1 * 12) / 4 = 6.
    histories, _ = trace(replace(setting, inner_steps=4, tokens={"a": 3, "b": 1}))

    assert histories["published"][-1] == 10


def test_fragments_leave_at_their_phases(setting: Setting) -> None:
    # Fragment of u is due at 2, 6 (H 4, P 2), that of w at 4, 8. The first interval of u has 2
    # steps: its mean is 2 * 2 = 4 below 16.
    histories = run_virtual(
        VirtualRun(replace(setting, initial={"u": [16.0], "w": [16.0]}, num_fragments=2)).run()
    )

    assert [v["u"][0] for v in histories["a"].published] == [16, 12, 12, 12, 12, 4, 4, 4]
    assert [v["w"][0] for v in histories["a"].published] == [16, 16, 16, 8, 8, 8, 8, 0]


def test_explicit_phases(setting: Setting) -> None:
    histories, _ = trace(replace(setting, phases=(1,)))

    # Due at 1, 5: means of 2 and then 8.
    assert histories["published"] == [14, 14, 14, 14, 6, 6, 6, 6]


def test_flush_loses_nobodys_last_steps(setting: Setting) -> None:
    # Merged at 5 (8); two steps later the run ends: a has 7, b 5. Plain mean 6, momentum unread.
    _, islands = trace(replace(setting, inner_steps=6, overlap_steps=1, flush=True))

    assert islands["a"].values() == islands["b"].values() == {"w": [6.0]}
    last = islands["a"].kinds("fragment_merged")[-1]
    assert (last["is_flush"], last["version"]) == (True, 2)


def test_flush_is_a_plain_average_whatever_the_outer_optimizer(setting: Setting) -> None:
    # Round at 4: buf 8, step 0.5 (8 + 0.5 * 8) = 6, published 10. Flush at 6: a 8, b 4: mean 6.
    nesterov = OuterOptimizer("nesterov", 0.5, 0.5, 0)

    _, islands = trace(replace(setting, inner_steps=6, flush=True, optimizer=nesterov))

    assert islands["a"].values() == {"w": [6.0]}


def test_flush_carries_the_send_that_could_not_merge(setting: Setting) -> None:
    # With tau 2 the send at 8 would merge at 10, after the end: the flush carries its work.
    _, islands = trace(replace(setting, inner_steps=9, overlap_steps=2, flush=True))

    sent = [e["inner_step"] for e in islands["a"].kinds("fragment_sent")]
    assert sent == [4, 9]
    # Merged at 6 (8); a ends at 5, b at -1.
    assert islands["b"].values() == {"w": [2.0]}


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
