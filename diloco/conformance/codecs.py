"""Byte vectors of the codecs: what each makes of the same values, and what it gives back.

`codecs.toml` has the size, the first bytes and the digests. The values are made of integers, so
that no random generator and no mathematical library is between two machines.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import blake3
import numpy as np
import torch
from torch import Tensor

from diloco.compression.base import to_bytes
from diloco.transport.contracts import Buffer

#: A chunk of the sparse codecs, 4 blocks of the others, and a part of one.
NUMEL = 4096 + 4 * 128 + 5
#: From which stochastic codecs draw.
KEY = 0x0123456789ABCDEF
_BLOCK = 128
_HEAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class ByteVector:
    """What a codec makes of the values.

    Attributes:
        num_bytes: Size of the payload.
        head: Its first bytes, in hexadecimal digits.
        payload: Digest of the payload.
        decoded: Digest of the decoded values, as float32 in little-endian order.
    """

    num_bytes: int
    head: str
    payload: str
    decoded: str

    @classmethod
    def of(cls, payload: Tensor, decoded: Tensor) -> ByteVector:
        """Describe a payload and what was decoded from it, on any device."""
        encoded = to_bytes(payload.cpu())
        values = to_bytes(decoded.cpu().view(torch.uint8))
        return cls(len(encoded), head(encoded), digest(encoded), digest(values))

    def difference(self, found: ByteVector) -> str:
        """Say in what `found` is not the same; empty: in nothing."""
        if found.payload != self.payload:
            return (
                f"its payload begins with {found.head} ({found.num_bytes} bytes), not {self.head} "
                f"({self.num_bytes} bytes); digest {found.payload}, not {self.payload}"
            )
        if found != self:
            return f"the right bytes are decoded to other values: digest {found.decoded}"
        return ""


@cache
def byte_vectors() -> Mapping[str, ByteVector]:
    """Read what codecs are to give, by name."""
    text = Path(__file__).with_name("codecs.toml").read_text(encoding="utf-8")
    return {name: ByteVector(**each) for name, each in tomllib.loads(text).items()}


@cache
def values() -> Tensor:
    """Make the values: every block of another size, the second one zeros, shape [NUMEL]."""
    index = np.arange(NUMEL, dtype=np.uint64)
    mixed = (index + np.uint64(1)) * np.uint64(2_654_435_761) % np.uint64(1 << 32)
    mixed = (mixed ^ (mixed >> np.uint64(15))) % np.uint64(1 << 24)
    block = (index // np.uint64(_BLOCK)).astype(np.int64)
    # 24 bits, so that every product with a power of two is exact in float32.
    made = np.ldexp(mixed.astype(np.float64) - (1 << 23), -23 - block % 24)
    made[block == 1] = 0.0
    made[-1] = -0.0
    return torch.from_numpy(made.astype(np.float32))


def head(payload: Buffer) -> str:
    """Write the first bytes of a payload."""
    return bytes(payload[:_HEAD_BYTES]).hex()


def digest(payload: Buffer) -> str:
    """Hash bytes to 32 hexadecimal digits."""
    return blake3.blake3(payload).hexdigest(length=16)
