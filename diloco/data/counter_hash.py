"""Random numbers of data from counters: no generator, so no state that a rank could get wrong.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Counters: TypeAlias = npt.NDArray[np.uint64]


def counter_hash(first: int, second: int, third: int, fourth: Counters) -> Counters:
    """Hash four counters to 64 bits, by one round of splitmix64 for each.

    Args:
        first: 0 to 2^64 - 1, such as the seed of the run.
        second: 0 to 2^64 - 1.
        third: 0 to 2^64 - 1.
        fourth: Any shape; the result has it, too.
    """
    state = np.zeros_like(fourth)
    for word in (np.uint64(first), np.uint64(second), np.uint64(third), fourth):
        state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state
