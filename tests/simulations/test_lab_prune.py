"""Pruned pseudo-gradients: which values of a row are left out, and what else stays as it was."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.outer.fragments import TensorSpec, make_plan
from diloco.simulations.lab.config import PruneConfig
from diloco.simulations.lab.prune import prune_, pruned_places
from diloco.simulations.lab.run import run_point
from tests.simulations.test_lab import tiny

By = Literal["sign", "size"]


@pytest.mark.parametrize(
    ("by", "share", "kept"),
    [
        ("sign", 0.25, [4.0, -3.0, 2.0, 0.0]),  # of the minority the smallest
        ("sign", 0.5, [4.0, 0.0, 2.0, 0.0]),  # the minority, however large
        ("sign", 0.75, [4.0, 0.0, 0.0, 0.0]),  # and then the smallest of the elected sign
        ("sign", 0.9, [4.0, 0.0, 0.0, 0.0]),  # 3.6 of 4: rounded down
        ("size", 0.5, [4.0, -3.0, 0.0, 0.0]),
    ],
)
def test_a_row_loses_values_in_order(by: By, share: float, kept: list[float]) -> None:
    rows = torch.tensor([[4.0, -3.0, 2.0, -1.0], [-4.0, 3.0, -2.0, 1.0]])

    left = rows.masked_fill(pruned_places(PruneConfig(share=share, by=by), rows), 0.0)

    assert left.tolist() == [kept, [-value for value in kept]]


@settings(max_examples=40)
@given(
    share=st.floats(0.01, 0.99),
    by=st.sampled_from(["sign", "size"]),
    num_lanes=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_every_row_loses_its_share_and_the_rest_is_sent_to_the_bit(
    share: float, by: By, num_lanes: int, seed: int
) -> None:
    specs = [
        TensorSpec("matrix", (300, 7, 10)),
        TensorSpec("mean", (16,), is_buffer=True),
        TensorSpec("vector", (30,)),
    ]
    (fragment,) = make_plan(specs, num_fragments=1, num_lanes=num_lanes).fragments
    generator = torch.Generator().manual_seed(seed)
    anchor, delta = (torch.randn(fragment.padded_numel, generator=generator) for _ in range(2))
    own = anchor + delta + 0.1 * delta.sign()  # nowhere the anchor's: pruned places show
    cut = [lane.numel for lane in fragment.lanes]
    local = dict(enumerate(part.clone() for part in own.split(cut)))
    shapes = {spec.name: torch.Size(spec.shape) for spec in specs}
    config = PruneConfig(share=share, by=by)

    prune_(config, shapes, fragment, dict(enumerate(anchor.split(cut))), local)

    sent = torch.cat([local[lane_id] for lane_id in range(len(cut))])
    is_kept = sent == own
    assert torch.equal(sent, torch.where(is_kept, own, anchor))
    for entry in fragment.entries:
        num_columns = {"matrix": 70, "vector": 30, "mean": 16}[entry.name]
        num_pruned = 0 if entry.is_buffer else math.floor(share * num_columns)
        place = slice(entry.offset, entry.offset + entry.end)
        assert ((~is_kept[place]).view(-1, num_columns).sum(dim=1) == num_pruned).all()


def test_what_is_not_finite_is_still_there_to_be_declined() -> None:
    rows = torch.tensor([[1.0, math.nan, 2.0, 3.0], [1.0, -math.inf, 2.0, 3.0]])

    for by in ("sign", "size"):
        pruned = pruned_places(PruneConfig(share=0.75, by=by), rows)
        assert not rows.masked_fill(pruned, 0.0).isfinite().all(dim=1).any()


def test_pruned_runs_learn_something_else_in_as_many_bytes() -> None:
    whole, pruned = run_point(tiny(), None), run_point(tiny(prune__share=0.5), None)

    assert pruned["digests"] != whole["digests"]
    assert pruned["bytes_up"] == whole["bytes_up"]
    assert pruned["loss"] < 5.55  # nats of a byte that nothing is known of
