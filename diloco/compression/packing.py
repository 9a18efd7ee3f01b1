"""Codes of 2, 4 or 8 bits in bytes, each part in one place.

Of `width` codes of b bits, byte j holds the codes j, j + width * b / 8, j + 2 * width * b / 8, ...
from its low bits on. Unlike neighbours in one byte, whole parts are read and written in order,
which compiles to vector instructions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits: uint8 [rows, width] -> uint8 [rows, width * bits / 8]."""
    num_bytes = codes.shape[1] * bits // 8
    packed = codes[:, :num_bytes]
    for part in range(1, 8 // bits):
        packed = packed | (codes[:, part * num_bytes : (part + 1) * num_bytes] << (part * bits))
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`: uint8 [rows, width * bits / 8] -> uint8 [rows, 8 / bits, width * bits / 8]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[:, None, :] >> shifts[:, None]) & ((1 << bits) - 1)


def smallest_code(packed: Tensor, bits: int) -> int:
    """Return the smallest code in what `pack` gave, at least one byte, without unpacking it."""
    mask = (1 << bits) - 1
    smallest = packed & mask
    for shift in range(bits, 8, bits):
        smallest = torch.minimum(smallest, (packed >> shift) & mask)
    return int(smallest.amin())
