"""Top-k codecs: the k largest of each 4,096 values, 12-bit indices, 2-bit values.

Of a chunk (the last one is filled up with zeros) the k values of largest magnitude are sent, of
equal ones those that come first, with two magnitudes a chunk: high for those above the mean of the
k, low for the others, each the mean of its group in bf16. All else is decoded as zero, so error
feedback is a must. topk64 takes 0.227 bits a value, topk128 0.445.

The payload is low and high of all chunks (bf16), then 3 k / 2 bytes of indices a chunk, ascending
(byte j, j + k / 2 and j + k hold the low 8 bits of index j, its high 4 and the low 4 of index
j + k / 2, and the high 8 of that), then k / 4 bytes a chunk of values, sign + 2 * is_high
(`packing`). In a chunk whose largest magnitude is under 2^-100 both magnitudes are 0.

Every device must send the same bytes, so nothing depends on the order of a sum or of equal values:
magnitudes are compared as integers with their index behind, and summed as integers, in units of
2^-46 of the largest one's power of two; denormal values count as zero, as some hosts take them.

Source: SparseLoCo (arXiv 2508.15706): chunks, k = 64, 2-bit values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.compression.base import Layout, check_finite, check_flat, check_payload, values_of
from diloco.compression.packing import pack, unpack
from diloco.errors import CodecError

CHUNK_NUMEL = 4096

_INDEX_BITS = 12
_UNIT_BITS = 46  # 128 magnitudes, and their product with 128, stay below 2^63
_INFINITY_BITS = 0x7F800000
_ZERO_CHUNK_BITS = (127 - 100) << 23  # of 2^-100
_LARGEST_BF16_BITS = 0x7F7F0000
_SMALLEST_NORMAL = 2.0**-126
_SMALLEST_NORMAL_BITS = 0x00800000
_SMALLEST_BF16_BITS = _SMALLEST_NORMAL_BITS >> 16


class TopKCodec:
    """Send the k largest values of a chunk in 14 bits each; publishes differences."""

    publishes_values = False
    has_zero = False  # zeros that are picked in a chunk of few other values come back as their mean

    def __init__(self, name: str, k: int) -> None:
        """Name a density: `k` values of each chunk, a multiple of 4, at most 128."""
        self.name = name
        self._k = k
        self._sections = (4, 3 * k // 2, k // 4)
        self.layout = Layout(CHUNK_NUMEL, self._sections)

    def wire_bytes(self, numel: int) -> int:
        """Return 4 + 3 k / 2 + k / 4 bytes for each chunk of 4096 values begun."""
        return self.layout.wire_bytes(numel)

    @torch.no_grad()
    def encode(self, values: Tensor, key: int = 0) -> Tensor:
        """Pick the largest values of each chunk; see `Codec.encode`."""
        check_flat(self.name, values)
        missing = -values.numel() % CHUNK_NUMEL
        chunks = torch.nn.functional.pad(values, (0, missing)).reshape(-1, CHUNK_NUMEL)
        if not len(chunks):
            return values.new_empty(0, dtype=torch.uint8)
        signed = chunks.view(torch.int32)
        signed = torch.where((signed & 0x7FFFFFFF) < _SMALLEST_NORMAL_BITS, 0, signed)
        chunks, bits = signed.view(torch.float32), signed & 0x7FFFFFFF
        largest = bits.amax(dim=1)
        if largest.amax() >= _INFINITY_BITS:
            check_finite(self.name, values)
        indices = self._largest(bits)
        picked = chunks.gather(1, indices)
        # In a last chunk of fewer than k values, the zeros that fill it up do not count.
        counted = torch.full_like(largest, self._k, dtype=torch.int64)
        counted[-1] = min(self._k, CHUNK_NUMEL - missing)
        low, high, is_high = _two_magnitudes(picked.abs(), largest, counted)
        codes = (picked < 0).to(torch.uint8) | (is_high.to(torch.uint8) << 1)
        magnitudes = torch.stack((low, high), dim=1).flatten().view(torch.uint8)
        packed = _pack_indices(indices).flatten(), pack(codes, 2).flatten()
        return torch.cat((magnitudes, *packed))

    @torch.no_grad()
    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Put the values back in their places; see `Codec.decode`.

        Raises:
            CodecError: Also for magnitudes or indices that `encode` never gives.
        """
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        if not numel:
            return payload.new_empty(0, dtype=torch.float32)
        magnitudes, indices, packed = self._read(payload, numel)
        low, high = magnitudes[:, :1], magnitudes[:, 1:]
        codes = unpack(packed, 2).flatten(1)
        picked = torch.where(codes > 1, high, low)
        picked = torch.where((codes & 1) > 0, -picked, picked)
        values = picked.new_zeros(len(indices), CHUNK_NUMEL).scatter_(1, indices, picked).flatten()
        return values if values.numel() == numel else values[:numel].clone()

    @torch.no_grad()
    def check(self, payload: Tensor, numel: int) -> None:
        """Look at magnitudes and indices; see `Codec.check`."""
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        if numel:
            self._read(payload, numel)

    def _read(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return every chunk's two magnitudes, indices and packed values, all valid."""
        num_chunks = payload.numel() // sum(self._sections)
        parts = torch.split(payload, [num_chunks * size for size in self._sections])
        # Compared as integers: so -0 is none, and hosts that flush denormals refuse the same.
        bits = values_of(parts[0], torch.int16).view(num_chunks, 2)
        is_sent = (bits == 0) | ((bits >= _SMALLEST_BF16_BITS) & (bits <= _LARGEST_BF16_BITS >> 16))
        indices = _unpack_indices(parts[1].reshape(num_chunks, self._sections[1]))
        is_ordered = (bits[:, 0] <= bits[:, 1]).all() and (indices[:, 1:] > indices[:, :-1]).all()
        if not (is_sent.all() and is_ordered):
            raise CodecError(
                f"{self.name} payload has magnitudes or indices out of order: it was damaged or "
                "made by something else"
            )
        # Of fewer than k values all are sent, and as many of the zeros behind them as are missing.
        last_numel = numel - (num_chunks - 1) * CHUNK_NUMEL
        if indices[-1, -1] >= max(last_numel, self._k):
            raise CodecError(
                f"{self.name} payload has index {int(indices[-1, -1])} in its last chunk, of "
                f"{last_numel} values: it was damaged or made by something else"
            )
        magnitudes = bits.view(torch.bfloat16).float()
        return magnitudes, indices, parts[2].reshape(num_chunks, self._sections[2])

    def _largest(self, bits: Tensor) -> Tensor:
        """Return the ascending indices of the k largest, [num_chunks, k], int64."""
        last = CHUNK_NUMEL - 1
        reversed_indices = torch.arange(last, -1, -1, device=bits.device)
        ranked = (bits.long() << _INDEX_BITS) | reversed_indices  # no two are equal
        chosen = ranked.topk(self._k, dim=1, sorted=False).values
        return (last - (chosen & last)).sort(dim=1).values


def _two_magnitudes(
    picked: Tensor, largest: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Split magnitudes at their mean: bits of the bf16 means, int16, and who is above.

    Args:
        picked: Magnitudes, [num_chunks, k], float32.
        largest: Bits of the largest magnitude of each chunk, int32.
        counted: How many of the magnitudes their mean is of, int64; the others are zeros.
    """
    exponent = (largest >> 23) - 127
    units = ((1023 + _UNIT_BITS - exponent).long() << 52).view(torch.float64)
    amounts = (picked.double() * units[:, None]).long()
    total = amounts.sum(dim=1)
    is_high = amounts * counted[:, None] > total[:, None]
    num_high = is_high.sum(dim=1)
    high_total = (amounts * is_high).sum(dim=1)
    low = (total - high_total) / (counted - num_high) / units
    high = torch.where(num_high > 0, high_total / num_high.clamp(min=1) / units, low)
    is_zero = largest < _ZERO_CHUNK_BITS
    return _bf16_bits(low, is_zero), _bf16_bits(high, is_zero), is_high


def _bf16_bits(values: Tensor, is_zero: Tensor) -> Tensor:
    """Round float64 >= 0 to the bits of a finite, not denormal bf16, half to even."""
    kept = torch.where(is_zero | (values < _SMALLEST_NORMAL), 0.0, values)
    bits = kept.float().view(torch.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)).clamp(max=_LARGEST_BF16_BITS)
    return (bits >> 16).to(torch.int16)


def _pack_indices(indices: Tensor) -> Tensor:
    first, second = indices.chunk(2, dim=1)
    planes = (first & 255, (first >> 8) | ((second & 15) << 4), second >> 4)
    return torch.cat(planes, dim=1).to(torch.uint8)


def _unpack_indices(packed: Tensor) -> Tensor:
    low, middle, high = packed.long().chunk(3, dim=1)
    return torch.cat((low | ((middle & 15) << 8), (middle >> 4) | (high << 4)), dim=1)
