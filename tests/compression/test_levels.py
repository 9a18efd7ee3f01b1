"""The arithmetic of levels against searching for the nearest one in a table."""

import pytest
import torch
from torch import Tensor

from diloco.compression.levels import E2M1, E3M0, INT2, INT4, INT8, Levels

#: Levels by k, from the smallest on.
TABLES = {
    "int8": (INT8, [float(k) for k in range(-127, 128)]),
    "int4": (INT4, [float(k) for k in range(-7, 8)]),
    "e2m1": (E2M1, [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "e3m0": (E3M0, [-64, -32, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64]),
    "int2": (INT2, [-3, -1, 1, 3]),
}
every_format = pytest.mark.parametrize(("levels", "table"), TABLES.values(), ids=TABLES)


def ks(levels: Levels, table: list[float]) -> Tensor:
    first = levels.has_zero - (1 << (levels.bits - 1))
    return torch.arange(first, first + len(table))


@every_format
def test_levels_are_those_of_the_format(levels: Levels, table: list[float]) -> None:
    k = ks(levels, table)

    assert levels.level(k.float()).tolist() == table
    assert levels.position(torch.tensor(table)).tolist() == k.tolist()
    assert max(table) == levels.largest


@every_format
def test_the_rounded_position_is_the_nearest_level(levels: Levels, table: list[float]) -> None:
    level = torch.tensor(table, dtype=torch.float64)
    y = torch.linspace(-1.0, 1.0, 100_001) * levels.largest * (1 + 2.0**-8)

    k = torch.round(levels.position(y))

    distances = (level[:, None] - y.double()).abs()
    chosen = distances.gather(0, (k.long() - ks(levels, table)[0])[None])[0]
    # A position is rounded once or twice to 24 bits, at most 2^-22 of the largest level.
    assert (chosen - distances.amin(dim=0)).max() <= 2.0**-21 * levels.largest


@every_format
def test_a_tie_goes_to_the_even_k(levels: Levels, table: list[float]) -> None:
    level = torch.tensor(table)
    between = (level[1:] + level[:-1]) / 2

    k = torch.round(levels.position(between))

    first = ks(levels, table)[:-1]
    assert k.tolist() == (first + first % 2).tolist()


@every_format
def test_a_position_is_linear_between_levels(levels: Levels, table: list[float]) -> None:
    level, k = torch.tensor(table), ks(levels, table)
    share = torch.linspace(0.0, 1.0, 33)[:, None]

    position = levels.position(level[:-1] + share * (level[1:] - level[:-1]))

    # 33 shares are multiples of 2^-5, so that everything up to 127 is exact.
    assert torch.equal(position, k[:-1] + share)


@every_format
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38])
def test_what_is_nearly_zero_is_zero(levels: Levels, table: list[float], value: float) -> None:
    k = torch.round(levels.position(torch.tensor([value]))).item()

    assert k == 0  # int2 has no zero: k = 0 is level 1
    assert levels.level(torch.tensor([0.0])).item() == (0 if levels.has_zero else 1)
