"""Faults in the training of one rank under `diloco chaos`: flipped bits, poisoned updates.

    DIR/training.json    training-ISLAND -> what happens to it, read once a second between inner
                         steps; DIR is that of `diloco.faults.process`

    flip-bit    one bit of one value of a parameter, or of a moment of the inner optimizer, once, on
                one rank
    poison      as long as it is said: every update times 100 ("scale"), with the other sign
                ("signs"), or noise of its size ("noise"); or the tokens of every batch in another
                order ("labels")

A rank asks one object, `RankFaults`, for each inner step; in an ordinary run it only makes the
step.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.durable import read_json, write_json
from diloco.faults.process import STEP_VARIABLE, VARIABLE, fired_path, training_name, training_path
from diloco.island.lanes.boxes import stored
from diloco.trainer.launched_step import LaunchedStep
from diloco.trainer.state import training_tensors
from diloco.trainer.trainer import InnerTrainer, Text

logger = logging.getLogger(__name__)

_READ_S = 1.0
_SCALE = 100.0


class RankFaults:
    """Faults in the training of one rank: none, in an ordinary run."""

    def around(self, text: Text) -> Text:
        """Wrap the text that the rank trains on."""
        return text

    def step(self, trainer: InnerTrainer, inner_step: int, schedule_step: float) -> LaunchedStep:
        """Launch an inner step, see `InnerTrainer.inner_step`."""
        return trainer.inner_step(inner_step, schedule_step)


def rank_faults(
    environment: Mapping[str, str], island: str, *, island_rank: int, num_ranks: int
) -> RankFaults:
    """Give the faults of this rank's training: those of `diloco chaos`, if it takes part."""
    least_s, directory = float(environment.get(STEP_VARIABLE, 0.0)), environment.get(VARIABLE)
    faults = RankFaults()
    if directory:
        faults = CorruptedTraining(Path(directory), island, island_rank, num_ranks)
    return PacedTraining(faults, least_s) if least_s else faults


class PacedTraining(RankFaults):
    """Makes every inner step last so many seconds at least, asleep, and passes on to `faults`."""

    def __init__(self, faults: RankFaults, least_s: float) -> None:
        """Assign only."""
        self._faults, self._least_s = faults, least_s

    def around(self, text: Text) -> Text:
        """See `RankFaults`."""
        return self._faults.around(text)

    def step(self, trainer: InnerTrainer, inner_step: int, schedule_step: float) -> LaunchedStep:
        """See `RankFaults`."""
        launched = self._faults.step(trainer, inner_step, schedule_step)
        metrics = launched.read()
        time.sleep(max(0.0, self._least_s - metrics.duration_s))
        paced = replace(metrics, duration_s=max(metrics.duration_s, self._least_s))
        return replace(launched, is_known=True, read=lambda: paced)  # on all ranks alike


class CorruptedTraining(RankFaults):
    """Faults of `training.json`, between two inner steps of one rank, in the training thread."""

    def __init__(self, directory: Path, island: str, island_rank: int, num_ranks: int) -> None:
        """Record that this rank reads the file."""
        self._directory = directory
        self._who = training_name(island)
        self._island_rank, self._num_ranks = island_rank, num_ranks
        self._what: Mapping[str, Any] = {}
        self._flipped = -1
        self._looked_s = -_READ_S
        self._before: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._emit_state()

    def step(self, trainer: InnerTrainer, inner_step: int, schedule_step: float) -> LaunchedStep:
        """See `RankFaults`."""
        self._before_step(trainer)
        launched = trainer.inner_step(inner_step, schedule_step)
        self._after_step(trainer)
        return launched

    def _before_step(self, trainer: InnerTrainer) -> None:
        """Read what is to happen."""
        now = time.monotonic()
        if now - self._looked_s >= _READ_S:
            self._looked_s = now
            self._what = (read_json(training_path(self._directory)) or {}).get(self._who, {})
            self._emit_state()
        if self._what.get("how") in ("scale", "signs", "noise"):
            named = training_tensors(trainer.model, trainer.optimizer)["model"]
            self._before = {name: stored(tensor).clone() for name, tensor in named.items()}

    def _after_step(self, trainer: InnerTrainer) -> None:
        """Do it."""
        what, before = self._what, self._before
        self._before = {}
        if "bit" in what and what["number"] != self._flipped:
            self._flipped = what["number"]
            if what["seed"] % self._num_ranks == self._island_rank:
                self._flip(trainer, what)
        elif before:
            named = training_tensors(trainer.model, trainer.optimizer)["model"]
            for name, tensor in named.items():
                _poison_(stored(tensor), before[name], what["how"])
            self._count("poison")

    def around(self, text: Text) -> Text:
        """Give the tokens of a batch in another order, while `training.json` says so."""
        return _ShuffledText(text, self._shuffled)

    def _shuffled(self, tokens: Tensor) -> Tensor:
        if self._what.get("how") != "labels":
            return tokens
        self._count("poison")
        order = torch.randperm(tokens.numel()).to(tokens.device)
        return tokens.flatten()[order].view_as(tokens)

    @torch.no_grad()
    def _flip(self, trainer: InnerTrainer, what: Mapping[str, Any]) -> None:
        named = training_tensors(trainer.model, trainer.optimizer)[what["what"]]
        names = [name for name in sorted(named) if stored(named[name]).numel()]
        name = names[what["seed"] % len(names)]
        values = stored(named[name]).view(-1)
        index = what["seed"] // len(names) % values.numel()
        was = float(values[index])
        bits = values[index : index + 1].view(torch.int32)
        bits ^= 1 << what["bit"]
        self._count("flip-bit")
        logger.warning(
            "bit %d of value %d of %s of %s flips on purpose: %g becomes %g",
            what["bit"], index, what["what"], name, was, float(values[index]),
        )  # fmt: skip

    def _count(self, what: str) -> None:
        """Count it, and tell of the first at once: the rank may not live to tell of more."""
        self._counts[what] += 1
        if self._counts[what] == 1:
            self._emit_state()

    def _emit_state(self) -> None:
        write_json(fired_path(self._directory, self._who, os.getpid()), dict(self._counts))


class _ShuffledText:
    def __init__(self, text: Text, shuffled: Callable[[Tensor], Tensor]) -> None:
        self._text, self._shuffled = text, shuffled

    def batch(self, inner_step: int) -> Tensor:
        return self._shuffled(self._text.batch(inner_step))


@torch.no_grad()
def _poison_(values: Tensor, before: Tensor, how: str) -> None:
    update = values - before
    if how == "scale":
        update *= _SCALE
    elif how == "signs":
        update.neg_()
    else:
        size = update.square().mean().sqrt() if update.numel() else 0.0
        update = torch.randn_like(update) * size
    torch.add(before, update, out=values)
