"""Measures: how large contributions are, unit by unit, taken while each is decoded for the merge.

Knows nothing of islands or rounds; what is judged by these figures is `diloco.outer.guard`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diloco.outer.guard import Floats

#: Values that are measured at once: in the second-level cache of a CPU core, and enough that the
#: calls cost little.
_TILE_NUMEL = 1 << 17


@torch.no_grad()
def measured(values: Tensor, places: Sequence[slice]) -> tuple[Floats, Floats]:
    """Measure places of a vector.

    Args:
        values: Flat, float32, CPU; finite, and as large as float32 goes.
        places: Slices of it with a start and an end.

    Returns:
        Sum of squares of each place, infinite where float32 does not hold that of a part of it,
        and its largest |value|; both float64 of shape [places].
    """
    squares, largest = np.zeros(len(places)), np.zeros(len(places))
    for index, place in enumerate(places):
        for start in range(place.start, place.stop, _TILE_NUMEL):
            tile = values[start : min(start + _TILE_NUMEL, place.stop)]
            low, high = torch.aminmax(tile)
            squares[index] += torch.dot(tile, tile).item()
            largest[index] = max(largest[index], -low.item(), high.item())
    return squares, largest
