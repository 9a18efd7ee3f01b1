"""What `diloco chaos` does to what this rank trains: bits that flip, work that is poisoned.

    DIR/spoilt.json    spoilt-ISLAND -> what happens to it, looked at once a second between inner
                       steps; DIR is that of `diloco.faults.chaos`

    flip-bit    one bit of one value of a parameter, or of a moment of the inner optimizer, once, on
                one rank
    poison      as long as it is said: every update times 100 ("scale"), with the other sign
                ("signs"), or noise of its size ("noise"); or the tokens of every batch in another
                order ("labels")

Nothing of this is there without `diloco chaos`: `spoiler_of` then gives None.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.durable import read_json, write_json
from diloco.faults.chaos import VARIABLE, fired_path, spoilt_name, spoilt_path
from diloco.island.lanes.boxes import stored
from diloco.trainer.state import training_tensors
from diloco.trainer.trainer import InnerTrainer, Text

logger = logging.getLogger(__name__)

_READ_S = 1.0
_SCALE = 100.0


class Spoiler:
    """One rank's; between two inner steps, in the training thread."""

    def __init__(self, directory: Path, island: str, island_rank: int, num_ranks: int) -> None:
        """Say that this rank looks."""
        self._directory = directory
        self._who = spoilt_name(island)
        self._island_rank, self._num_ranks = island_rank, num_ranks
        self._what: Mapping[str, Any] = {}
        self._flipped = -1
        self._looked_s = -_READ_S
        self._before: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._tell()

    def before(self, trainer: InnerTrainer) -> None:
        """Look what is to happen, before an inner step."""
        now = time.monotonic()
        if now - self._looked_s >= _READ_S:
            self._looked_s = now
            self._what = (read_json(spoilt_path(self._directory)) or {}).get(self._who, {})
            self._tell()
        if self._what.get("how") in ("scale", "signs", "noise"):
            named = training_tensors(trainer.model, trainer.optimizer)["model"]
            self._before = {name: stored(tensor).clone() for name, tensor in named.items()}

    def after(self, trainer: InnerTrainer) -> None:
        """Do it, after the inner step."""
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
        """Let the tokens of a batch come in another order, while that is said."""
        return _ShuffledText(text, self)

    def shuffled(self, tokens: Tensor) -> Tensor:
        """Return tokens as they are trained on."""
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
            self._tell()

    def _tell(self) -> None:
        write_json(fired_path(self._directory, self._who, os.getpid()), dict(self._counts))


class _ShuffledText:
    def __init__(self, text: Text, spoiler: Spoiler) -> None:
        self._text, self._spoiler = text, spoiler

    def batch(self, inner_step: int) -> Tensor:
        return self._spoiler.shuffled(self._text.batch(inner_step))


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


def spoiler_of(
    environment: Mapping[str, str], island: str, *, island_rank: int, num_ranks: int
) -> Spoiler | None:
    """Give what spoils this rank's training; None: it takes no part in `diloco chaos`."""
    directory = environment.get(VARIABLE)
    return Spoiler(Path(directory), island, island_rank, num_ranks) if directory else None
