"""Which text each island of a laboratory sees, and the union of all: what data parallel sees.

Islands of equal size cut one batch among them, so that the union of a step is the same batch
whatever their number, and what is compared differs in who averages what and when, in nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diloco.config.schema import Config
from diloco.data.batches import Batches, Data
from diloco.data.corpus import TextData
from diloco.protocol.run.slots import SlotPosition
from diloco.simulations.lab.point import is_even


def batches_of(config: Config, data: Data, split: str) -> dict[str, Batches]:
    """Give every island its batches.

    Args:
        config: The run.
        data: Its text.
        split: "iid" or "topics".
    """
    sizes = {
        name: config.islands[name].tokens_per_inner_step // config.data.sequence_length
        for name in sorted(config.islands)
    }
    num_islands = len(sizes)
    if split == "topics":
        parts = _topics(data, config, num_islands)
        return {
            name: parts[slot].batches(
                slots=(slot,), num_slots=num_islands, batch_size=size, dp_coordinate=0, dp_size=1
            )
            for slot, (name, size) in enumerate(sizes.items())
        }
    if is_even(config):
        return {
            name: data.batches(
                slots=(0,),
                num_slots=1,
                batch_size=sum(sizes.values()),
                dp_coordinate=slot,
                dp_size=num_islands,
            )
            for slot, name in enumerate(sizes)
        }
    return {
        name: data.batches(
            slots=(slot,), num_slots=num_islands, batch_size=size, dp_coordinate=0, dp_size=1
        )
        for slot, (name, size) in enumerate(sizes.items())
    }


def union_of(config: Config, data: Data, split: str) -> Batches:
    """Give the batches of all islands as one."""
    if split == "topics" or not is_even(config):
        return UnionBatches(batches_of(config, data, split).values())
    tokens = sum(island.tokens_per_inner_step for island in config.islands.values())
    return data.batches(
        slots=(0,),
        num_slots=1,
        batch_size=tokens // config.data.sequence_length,
        dp_coordinate=0,
        dp_size=1,
    )


def _topics(data: Data, config: Config, num_islands: int) -> Sequence[TextData]:
    """Cut the training text, which is in the order of its paths, into one part an island."""
    assert isinstance(data, TextData), "refused when the laboratory was loaded"
    text = data.corpus.train
    ends = [len(text) * number // num_islands for number in range(num_islands + 1)]
    return [
        TextData(
            replace(data.corpus, train=text[first:last]),
            sequence_length=config.data.sequence_length,
            seed=config.run.seed,
        )
        for first, last in itertools.pairwise(ends)
    ]


class UnionBatches:
    """The batches of all islands, one after the other."""

    def __init__(self, parts: Collection[Batches]) -> None:
        """Assign only."""
        self._parts = list(parts)

    def batch(self, inner_step: int) -> Tensor:
        """Give what all islands draw after `inner_step` completed steps."""
        return torch.cat([part.batch(inner_step) for part in self._parts])

    def state_dict(self) -> dict[str, Any]:
        """Give the cursors of all."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the cursors of all."""
        for part, of_part in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(of_part)

    def seek(self, inner_step: int) -> None:
        """Go to where `inner_step` completed steps lead."""
        for part in self._parts:
            part.seek(inner_step)

    def positions(self) -> dict[int, SlotPosition]:
        """Give how far each slot has been drawn."""
        return {slot: at for part in self._parts for slot, at in part.positions().items()}

    def hold(self, claims: Mapping[int, SlotPosition], *, inner_step: int) -> Mapping[int, str]:
        """Have every part go on with the slots that it has."""
        problems = dict[int, str]()
        for part in self._parts:
            own = {slot: claims[slot] for slot in part.positions()}
            problems |= part.hold(own, inner_step=inner_step)
        return problems
