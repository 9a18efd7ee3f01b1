"""One flipped bit on one island, in whole runs that train a small model: what becomes of learning.

Why some flips of a parameter left no trace before islands looked at themselves, and others ended
learning everywhere, with the defaults of a decoupled run:

    from the merge of a fragment to its next send    the flipped value is in the next contribution:
        4.8e35 is finite, its block's scale is, and the mean of the round, so it was merged; every
        island took 1e35, whose logits are constant: ln 256 = 5.545 nats from then on
    from a send to the merge of its outcome          the merge writes the published values over the
        local ones (alpha = 0): nothing is left. How long that is, is a matter of the round: its
        grace, the link and the others' steps, a large part of H where these are slow
    a value of 1 to 2 (norms)                        becomes inf or NaN: so do the loss, gradients
        and all parameters; what is not finite was declined, and the island ended after three
    an exponent bit that falls                       the value is nearly 0: what one parameter is
        worth, and the next merge brings it back

So it was the moment, and nobody's guard. Now the first is declined by the island, which returns to
what is published, and a loss or gradient that is not finite makes no update at all.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.bench.outer_loop.byte_model import SLOT, ByteTask, ByteTraining, byte_config, open_bytes
from diloco.island.outer_loop import OuterLoop
from diloco.launch.loopback_run import World, run_islands
from diloco.telemetry.events import Event
from diloco.trainer.launched_step import InnerMetrics

TASK = ByteTask(
    inner_steps=160,
    warm_start_step=0,
    sequences=12,
    sequence_length=16,
    evaluation_sequences=64,
    lr=5e-3,
    warmup_steps=10,
    model={"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64},
)
OUTER: dict[str, dict[str, Any]] = {
    "decoupled": {"preset": "decoupled", "inner_steps_per_round": 12, "num_fragments": 2},
    "scheduled": {
        "preset": "streaming",
        "inner_steps_per_round": 12,
        "num_fragments": 2,
        "overlap_steps": 2,
    },
}
#: Of the island that is met, and where: a matrix that all tokens use.
ISLAND, WHERE, INDEX = SLOT.format(1), "layers.0.attention.o.weight", 123
#: Between a merge of that matrix's fragment and its next send.
STEP = 102
PLACES = ("parameter", "gradient", "exp_avg", "exp_avg_sq", "anchor")
BAR = 1.01


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def flip_(values: Tensor, index: int, bit: int) -> None:
    """Flip a bit of one float32 value in place."""
    values.detach().view(-1).view(torch.int32)[index] ^= 1 << bit


@dataclass(frozen=True)
class Flip:
    """Which bit of what flips after how many inner steps."""

    place: str
    bit: int = 30
    step: int = STEP


class FlippingTraining:
    """An island's training to which the flip happens; without one, only training."""

    def __init__(self, training: ByteTraining, flip: Flip | None) -> None:
        self._training, self._flip = training, flip
        self.parameters = training.parameters
        self.losses: list[float] = []
        if flip is not None and flip.place == "gradient":
            training._trainer._gradient_hook = self
        self._inner_step = 0

    def inner_step(self, inner_step: int, schedule_step: float) -> InnerMetrics:
        self._inner_step = inner_step + 1
        metrics = self._training.inner_step(inner_step, schedule_step)
        self.losses.append(metrics.loss)
        if self._flip is not None and self._inner_step == self._flip.step:
            parameter = self.parameters[WHERE]
            if self._flip.place == "parameter":
                flip_(parameter, INDEX, self._flip.bit)
            elif self._flip.place in ("exp_avg", "exp_avg_sq"):
                state = self._training._trainer.optimizer.state[parameter]
                flip_(state[self._flip.place], INDEX, self._flip.bit)
        return metrics

    def begin(self) -> None:
        """See `GradientHook`."""

    def finish(self) -> None:
        """See `GradientHook`: gradients are there, and not clipped yet."""
        if self._flip is not None and self._inner_step == self._flip.step:
            gradient = self.parameters[WHERE].grad
            assert gradient is not None
            flip_(gradient, INDEX, self._flip.bit)

    def mend(self, *, is_new: bool) -> int:
        return self._training.mend(is_new=is_new)

    def evaluate(self) -> float:
        return self._training.evaluate()


@dataclass
class Ended:
    """What a run came to."""

    loss: float = 0.0
    losses: dict[str, list[float]] = field(default_factory=dict)
    events: list[tuple[str, Event]] = field(default_factory=list)

    def of(self, kind: str) -> list[tuple[str, Any]]:
        return [(island, event) for island, event in self.events if event.kind == kind]

    @property
    def declined(self) -> set[str]:
        return {island for island, event in self.of("fragment_sent") if event.declined}


def run(
    directory: Path,
    mode: str,
    num_islands: int,
    flip: Flip | None = None,
    *,
    before_send: Callable[[str], World] | None = None,
) -> Ended:
    """Train a run, to whose island 1 something happens."""
    torch.set_num_threads(1)
    data, ended = open_bytes(TASK, 1), Ended()
    trainings = {
        name: FlippingTraining(
            ByteTraining(TASK, 1, data, num_islands=num_islands, island_slot=slot),
            flip if name == ISLAND else None,
        )
        for slot in range(num_islands)
        if (name := SLOT.format(slot))
    }

    def on_step(island: str, outer: OuterLoop, num_tokens: int) -> None:
        is_met = flip is not None and flip.place == "anchor" and island == ISLAND
        if is_met and flip is not None and outer.inner_step == flip.step:
            fragment = next(
                f for f in outer._parts.plan.fragments if any(e.name == WHERE for e in f.entries)
            )
            lanes = outer.exchange.anchor(fragment.fragment_id)
            flip_(lanes[0], INDEX, flip.bit)

    world = World(on_step=on_step, on_event=lambda island, e: ended.events.append((island, e)))
    directory.mkdir()
    result = run_islands(
        byte_config(TASK, 1, num_islands, OUTER[mode]),
        trainings,
        directory=directory,
        start_step=0,
        world=world,
    )
    ended.loss = result.figure
    ended.losses = {name: training.losses for name, training in trainings.items()}
    return ended


@functools.cache
def undisturbed(directory: Path, mode: str, num_islands: int) -> Ended:
    return run(directory / f"undisturbed-{mode}-{num_islands}", mode, num_islands)


def check(ended: Ended, base: Ended, flip: Flip) -> None:
    """Check that learning went on everywhere, and that only the island that was met declined."""
    assert ended.loss < BAR * base.loss, (flip, ended.loss, base.loss)
    assert ended.declined <= {ISLAND}
    assert {island for island, _ in ended.of("published_taken")} <= {ISLAND}
    assert not base.declined and not base.of("published_taken") and not base.of("alarm")


@pytest.fixture(scope="module")
def base_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.mark.parametrize(
    ("mode", "num_islands", "place"),
    [
        ("decoupled", 2, "parameter"),
        ("scheduled", 3, "anchor"),
        *(
            pytest.param(mode, num_islands, place, marks=pytest.mark.slow)
            for mode, num_islands in (("decoupled", 2), ("scheduled", 3))
            for place in PLACES
            if (mode, place) not in {("decoupled", "parameter"), ("scheduled", "anchor")}
        ),
    ],
)
def test_a_flipped_bit_reaches_nobody(
    tmp_path: Path, base_directory: Path, mode: str, num_islands: int, place: str
) -> None:
    flip = Flip(place)

    ended = run(tmp_path / "run", mode, num_islands, flip)

    check(ended, undisturbed(base_directory, mode, num_islands), flip)
    if place in ("parameter", "anchor", "exp_avg"):
        assert ended.declined == {ISLAND}, "the island found out by itself, before it sent"
        assert {event.about for _, event in ended.of("alarm")} == {ISLAND}
    if place == "anchor":
        assert [event.lane_id for _, event in ended.of("anchor_mended")] == [0]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("mode", [*OUTER])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bit", range(20, 31))
def test_no_bit_of_anything_at_any_moment_ends_learning(
    tmp_path: Path, base_directory: Path, mode: str, num_islands: int, place: str, bit: int
) -> None:
    flip = Flip(place, bit, STEP - 4 + (7 * bit) % 13)  # a moment of its own in the round

    ended = run(tmp_path / "run", mode, num_islands, flip)

    check(ended, undisturbed(base_directory, mode, num_islands), flip)
