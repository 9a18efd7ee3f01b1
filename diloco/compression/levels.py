"""Levels of block codecs: which multiples of its scale the values of a block are rounded to.

    name    levels with k > 0 (k < 0: their negatives, k = 0: zero)     largest
    int8    k, to 127                                                   127
    int4    k, to 7                                                     7
    e2m1    1/2, 1, 3/2, 2, 3, 4, 6                                     6
    e3m0    1, 2, 4, 8, 16, 32, 64                                      64
    int2    2 k + 1 for k = -2 to 1: -3, -1, 1, 3, no zero              3

A format is given by the function from a value, in units of the scale, to its position k, linear
between levels: rounded it is the nearest level (of a tie the one with the even k), and rounded up
or down at random it is the value on average. That of a 4-bit float is made of lines or of the bits
of a float32: additions and comparisons, which compile to vector instructions, where a search in a
table of levels does not.

Source: OCP Microscaling Formats (MX) 1.0, E2M1; Streaming DiLoCo (arXiv 2501.18512), E3M0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_ONE = 0x3F800000  # the bits of 1.0


@dataclass(frozen=True, slots=True)
class Levels:
    """How values in units of their block's scale become codes, and back.

    Attributes:
        bits: Of a code: 2, 4 or 8. The code of level k is k + 2^(bits - 1).
        largest: The largest level; the scale is a block's largest magnitude divided by it.
        position: float32 values y to float32 positions, |y| <= largest.
        level: Whole float32 positions to float32 levels, exact.
        has_zero: Whether zero is a level, and then code 0 is none, so that levels are symmetric;
            else a block of zeros has the scale 0.
        scale_bits: Significant bits of a scale: 8 is bf16. It may be off by 2^-scale_bits and must
            not make the largest value miss the largest level, so 127 needs 9.
    """

    bits: int
    largest: float
    position: Callable[[Tensor], Tensor]
    level: Callable[[Tensor], Tensor]
    has_zero: bool = True
    scale_bits: int = 8


def _same(values: Tensor) -> Tensor:
    return values


def _e2m1_position(y: Tensor) -> Tensor:
    half = y * 0.5
    below = torch.minimum(torch.minimum(y + y, y + 2), half + 4)
    return torch.maximum(torch.maximum(below, y - 2), half - 4)


def _e2m1_level(k: Tensor) -> Tensor:
    double = k + k
    below = torch.minimum(torch.minimum(k * 0.5, k + 2), double + 8)
    return torch.maximum(torch.maximum(below, k - 2), double - 8)


def _e3m0_position(y: Tensor) -> Tensor:
    magnitude = y.abs()
    # From 1 on, exponent and significand read as one number are linear between powers of two.
    logarithm = (magnitude.clamp(min=1.0).view(torch.int32) - _ONE).float() * 2.0**-23
    return torch.copysign(torch.minimum(magnitude, logarithm + 1), y)


def _e3m0_level(k: Tensor) -> Tensor:
    # 2^(|k| - 1) by its exponent; floor makes the 1/2 of k = 0 zero.
    bits = ((k.abs() - 1).to(torch.int32) << 23) + _ONE
    return torch.copysign(torch.floor(bits.view(torch.float32)), k)


INT8 = Levels(8, 127.0, _same, _same, scale_bits=9)
INT4 = Levels(4, 7.0, _same, _same)
E2M1 = Levels(4, 6.0, _e2m1_position, _e2m1_level)
E3M0 = Levels(4, 64.0, _e3m0_position, _e3m0_level)
INT2 = Levels(2, 3.0, lambda y: y * 0.5 - 0.5, lambda k: k + k + 1, has_zero=False)
