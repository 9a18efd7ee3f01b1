"""Random bits of stochastic rounding: a hash of counters, so no generator and no state.

The same key and index give the same bits on every device, eager and compiled.

Source: PROTOCOL.md, "Codecs"; the mixing function is lowbias32 (Wellons, "Prospecting for hash
functions", 2018).
"""

from __future__ import annotations

import blake3
import torch
from torch import Tensor

#: lowbias32's multipliers 0x7FEB352D and 0x846CA68B, as int32: torch multiplies these modulo 2^32.
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)


def rounding_key(*counters: int | str) -> int:
    """Hash what tells one payload of a run from all others to 64 bits.

    The timeline does not count: a resumed run must draw what an uninterrupted one does.
    """
    text = "/".join(map(str, counters))
    return int.from_bytes(blake3.blake3(text.encode()).digest(length=8), "little")


def key_tensor(key: int, device: torch.device) -> Tensor:
    """Put a key of 64 bits into an int64 scalar, which is no constant of a compiled formula."""
    signed = key - (1 << 64) if key >> 63 else key
    return torch.tensor(signed, device=device)


def shifted(key: int, by: int) -> int:
    """Return the key for which `uniform` draws at index i what it draws at i + `by` for `key`."""
    return key >> 32 << 32 | (key + by) & 0xFFFFFFFF


def uniform(key: Tensor, rows: int, width: int) -> Tensor:
    """Draw float32 [rows, width] in (0, 1): (h + 1/2) / 2^16 with 16 bits h of every index's hash.

    So few bits that the sum with a position is never rounded up to the next whole number.

    Args:
        key: Result of `key_tensor`.
        rows: Up to 2^32 / width.
        width: Indices run along the rows.
    """
    indices = torch.arange(rows * width, device=key.device).to(torch.int32).view(rows, width)
    low, high = (key & 0xFFFFFFFF).to(torch.int32), (key >> 32).to(torch.int32)
    hashed = _mix(_mix(indices + low) ^ high)
    return ((hashed & 0xFFFF).float() + 0.5) * 2.0**-16


def _mix(state: Tensor) -> Tensor:
    """Hash int32 one to one; masks, since shifts to the right repeat the sign."""
    state = (state ^ ((state >> 16) & 0xFFFF)) * _FIRST
    state = (state ^ ((state >> 15) & 0x1FFFF)) * _SECOND
    return state ^ ((state >> 16) & 0xFFFF)
