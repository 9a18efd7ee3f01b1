"""Digests values where they are: the same 16 bytes on every device, and only these leave it.

    x_i  the 32 bits of value i as a signed integer, i = 2^16 b + j, 0 <= j < 2^16
    h_t  = n + sum_b r_t(b) sum_j w_t(j) x_i  mod 2^64, t = 0, 1, of n values
    w_t(j) = S(2^41 t + j) | 1, r_t(b) = S(2^41 t + 2^40 + b) | 1

S(k) is output k, counted from 0, of SplitMix64 seeded with 0. Sums of integers have no order:
blocks and threads add in any. What hardware and software get wrong is found: one wrong value
always, several with about one chance in 2^64 that they are not, in 2^54 where they are sign bits of
the same places of several blocks. It is no proof against who makes values for a digest, so that
blake3 is compared of bytes that another party gives.

Source: PROTOCOL.md, "Digests"; "Strongly universal string hashing is fast" (Lemire and Kaser, 2014)
for sums of products; "Fast splittable pseudorandom number generators" (Steele et al., 2014).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import blake3
import torch
from torch import Tensor

from diloco.compression.base import to_bytes

LANE_DIGEST_BYTES = 16
#: Of SplitMix64, as int64: torch multiplies these modulo 2^64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BLOCK = 1 << 16
#: Blocks that are widened to 64 bits together: what a CPU's cache holds, and what fills a device.
_ON_CPU, _ON_DEVICE = 1, 64


def lane_digest(published: Tensor) -> bytes:
    """Digest a flat and contiguous float32 vector: h_0 and h_1, little-endian.

    Elsewhere than on the CPU only the calling thread's stream is waited for.
    """
    bits, device = published.view(torch.int32), published.device
    num_blocks = -(-len(bits) // _BLOCK)
    num_weights = max(_BLOCK, 1 << num_blocks.bit_length())  # of few sizes, which are kept
    within = [_weights(2 * t, _BLOCK, device) for t in range(2)]
    across = [_weights(2 * t + 1, num_weights, device)[:num_blocks] for t in range(2)]
    return bytes(to_bytes(_sums(bits, within, across)))


def _sums(bits: Tensor, within: Sequence[Tensor], across: Sequence[Tensor]) -> Tensor:
    """Compute h_0 and h_1 of the weights; the same compiled."""
    num_whole, rest = divmod(len(bits), _BLOCK)
    at_once = _ON_CPU if bits.device.type == "cpu" else _ON_DEVICE
    sums = torch.empty(2, num_whole + bool(rest), dtype=torch.int64, device=bits.device)
    for first in range(0, num_whole, at_once):
        last = min(first + at_once, num_whole)
        rows = bits[first * _BLOCK : last * _BLOCK].to(torch.int64).view(-1, _BLOCK)
        for t in range(2):
            sums[t, first:last] = (rows * within[t]).sum(1)
    if rest:
        tail = bits[-rest:].to(torch.int64)
        for t in range(2):
            sums[t, -1] = (tail * within[t][:rest]).sum()
    return (sums * torch.stack([*across])).sum(1) + len(bits)


def version_digest(lane_digests: Sequence[bytes]) -> bytes:
    """Digest a version: blake3 over its lane digests in lane order (32 bytes)."""
    return blake3.blake3(b"".join(lane_digests)).digest()


@functools.lru_cache(maxsize=32)
def _weights(stream: int, num: int, device: torch.device) -> Tensor:
    """Compute S(2^40 stream + k) | 1 for k < `num`, once a device.

    On the CPU: this copy is there when it returns, for the streams of all threads. What one stream
    computes, others would read before it has.
    """
    state = (torch.arange(1, num + 1) + (stream << 40)) * _GOLDEN
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return ((state ^ _shifted(state, 31)) | 1).to(device)


def _shifted(state: Tensor, by: int) -> Tensor:
    """Shift 64 bits to the right; the mask, since int64 repeats its sign."""
    return (state >> by) & ((1 << (64 - by)) - 1)
