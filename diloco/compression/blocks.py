"""Block codecs: each block of 128 values is sent as one 16-bit scale and codes of 2, 4 or 8 bits.

A format (`levels`) has a few levels, the largest of which is L. Let a be the largest magnitude in a
block; the last block is filled up with zeros. Then

    scale   = a / L            rounded to 8 significant bits (bf16), for int8 to 9
    code_i  = the level that is nearest to x_i / scale; a always gets the largest level
    x_i    ~= scale * level_i

For int4, for example, |x_i - scale * level_i| <= scale / 2, up to rounding of the product. The
product is exact in float32 (9 bits times at most 7 bits), so adding it to an anchor gives the same
result fused or unfused.

Very small and very large blocks: if a < 2^-100, the scale is 1 and all codes are that of zero
(where zero is no level, the scale is 0). A scale is at most 2^126, so that its reciprocal is not
denormal.

The payload is all scales, then 128 * bits / 8 bytes for each block (`packing`): with 4 bits, byte j
holds value j in its low half and value j + 64 in its high half. On the wire a scale is the upper
half of its float32; one of 9 bits is the 16 bits after the sign.

Stochastic rounding takes the level above or below at random, so that scale * level_i is x_i on
average. It needs a scale that is rounded up, so that no value lies beyond the largest level.

One pure formula for each direction gives the same bytes eager and compiled, on CPU and GPU:

- it divides once for each block, in float64: compiled float32 division on a GPU is approximate,
  while the float64 quotient of a short scale rounds to the correctly rounded float32 quotient;
- it rounds scales with integer operations, because compilers drop a cast to bf16 and back;
- it needs no denormal float32 number, so a device that flushes these to zero changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.compression.base import Layout, check_finite, check_flat, check_payload
from diloco.compression.compiled import COMPILE_NUMEL, chosen, is_prepared, prepare
from diloco.compression.levels import Levels
from diloco.compression.packing import pack, smallest_code, unpack
from diloco.compression.random_bits import key_tensor, shifted, uniform
from diloco.errors import CodecError

BLOCK_NUMEL = 128

_SCALE_BYTES = 2
#: Blocks that an eager formula on a CPU takes at once: what it allocates stays in the CPU's caches.
_TILE = 1024
_ZERO_BLOCK = 2.0**-100
_LARGEST_SCALE = 2.0**126
_LARGEST = torch.finfo(torch.float32).max
#: What a rounded-up scale may lie below its quotient, in units in the last place of float32: two
#: multiplications are off by so much at most, and must not push an exact scale to the next.
_SLACK = 4


def _tiles(num_blocks: int, *, is_eager: bool) -> list[slice]:
    size = _TILE if is_eager else num_blocks
    return [slice(first, first + size) for first in range(0, num_blocks, size)]


class BlockCodec:
    """Sends a scale for each block and a code for each value; publishes differences."""

    publishes_values = False

    def __init__(self, name: str, levels: Levels, *, is_stochastic: bool = False) -> None:
        """Name a format; with `is_stochastic`, rounding draws from the key given to `encode`."""
        self.name = name
        self.has_zero = levels.has_zero
        self._levels = levels
        self._is_stochastic = is_stochastic
        self._shift = 24 - levels.scale_bits
        self._zero_code = 1 << (levels.bits - 1)
        self.layout = Layout(BLOCK_NUMEL, (_SCALE_BYTES, BLOCK_NUMEL * levels.bits // 8))
        # Of the largest scale, the largest level is still finite: no block overflows when decoded;
        # and its reciprocal is no denormal (int2's could be; 3 * 2^126 is near enough to any a).
        largest = torch.tensor(min(_LARGEST / levels.largest, _LARGEST_SCALE)).view(torch.int32)
        self._max_scale_bits = int(largest) >> self._shift << self._shift
        borders = self._scale_bits(torch.tensor([_ZERO_BLOCK, _LARGEST])).view(torch.float32)
        self._min_scale, self._max_scale = borders.tolist()

    def wire_bytes(self, numel: int) -> int:
        """Return the bytes of all blocks, the last one filled up: a block of int4 has 66."""
        return self.layout.wire_bytes(numel)

    @torch.no_grad()
    def encode(self, values: Tensor, key: int = 0) -> Tensor:
        """Quantise to levels; see `Codec.encode`."""
        check_flat(self.name, values)
        missing = -values.numel() % BLOCK_NUMEL
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        if not padded.numel():
            return values.new_empty(0, dtype=torch.uint8)
        blocks = padded.reshape(-1, BLOCK_NUMEL)
        payload = values.new_empty(self.wire_bytes(values.numel()), dtype=torch.uint8)
        scales = payload[: _SCALE_BYTES * len(blocks)].view(torch.int16)
        packed = payload[_SCALE_BYTES * len(blocks) :].view(len(blocks), -1)
        formula = chosen(self.quantise, padded, padded.numel())
        for tile in _tiles(len(blocks), is_eager=formula == self.quantise and padded.is_cpu):
            drawn_by = None
            if self._is_stochastic:
                drawn_by = key_tensor(shifted(key, tile.start * BLOCK_NUMEL), values.device)
            largest, scales[tile], packed[tile] = formula(blocks[tile], drawn_by)
            if not largest.isfinite().all():
                check_finite(self.name, values)
        return payload

    @torch.no_grad()
    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Multiply levels by scales; see `Codec.decode`.

        Raises:
            CodecError: Also for a scale or a code that `encode` never gives.
        """
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        if not numel:
            return payload.new_empty(0, dtype=torch.float32)
        scales, packed = self._read(payload)
        formula = chosen(self.dequantise, packed, numel)
        tiles = _tiles(len(packed), is_eager=formula == self.dequantise and packed.is_cpu)
        size = (0 if len(tiles) == 1 else len(packed), BLOCK_NUMEL)
        values = payload.new_empty(size, dtype=torch.float32)
        for tile in tiles:
            decoded, smallest = formula(scales[tile], packed[tile])
            self._check_code(int(smallest) + self._zero_code)
            if len(tiles) == 1:
                values = decoded
            else:
                values[tile] = decoded
        flat = values.flatten()
        return flat if flat.numel() == numel else flat[:numel].clone()

    @torch.no_grad()
    def check(self, payload: Tensor, numel: int) -> None:
        """Look at scales and codes; see `Codec.check`."""
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        if numel:
            _, packed = self._read(payload)
            if self._levels.has_zero:
                self._check_code(smallest_code(packed, self._levels.bits))

    @torch.no_grad()
    def warm_up(self, device: str = "cpu") -> bool:
        """Compile both formulas for vectors of COMPILE_NUMEL values and more; may take seconds.

        Returns:
            Whether they are compiled; with an unusable compiler they stay eager, with a warning.
        """
        blocks = torch.zeros(COMPILE_NUMEL // BLOCK_NUMEL, BLOCK_NUMEL, device=device)
        key = key_tensor(0, blocks.device) if self._is_stochastic else None
        packed = blocks.to(torch.uint8)[:, : BLOCK_NUMEL * self._levels.bits // 8].contiguous()
        scales = blocks[:, 0].contiguous()
        is_fast = prepare(self.quantise, blocks, key)
        return prepare(self.dequantise, scales, packed) and is_fast

    def is_warm(self, device: str = "cpu") -> bool:
        """Return whether `warm_up` was called; another call returns at once."""
        return all(is_prepared(f, device) for f in (self.quantise, self.dequantise))

    def quantise(self, blocks: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Quantise whole blocks; the reference formula, without checks.

        Args:
            blocks: Shape [num_blocks, 128], float32.
            key: Of stochastic rounding, int64 scalar; else None.

        Returns:
            Largest magnitude of each block, [num_blocks], float32, not finite where a value is not;
            its scale on the wire, [num_blocks], int16; packed codes, [num_blocks, 16 * bits],
            uint8.
        """
        largest = blocks.abs().amax(dim=1)
        bits = self._scale_bits(largest)
        reciprocals = bits.view(torch.float32).double().reciprocal().float()
        # A rounded scale leaves the largest values a little beyond the largest level. The clamp
        # also stands between the product and any sum, which compilers for GPUs would round as one.
        # A zero block's tiny values give the code of zero as well.
        bound = self._levels.largest
        y = (blocks * reciprocals[:, None]).clamp(-bound, bound)
        position = self._levels.position(y)
        if key is None:
            k = torch.round(position)
        else:
            k = torch.floor(position + uniform(key, *blocks.shape))
        codes = (k + self._zero_code).to(torch.uint8)
        if not self._levels.has_zero:
            bits = torch.where(largest < _ZERO_BLOCK, 0, bits)
        return largest, (bits >> self._shift).to(torch.int16), pack(codes, self._levels.bits)

    def dequantise(self, scales: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Undo the packing and multiply by the scales; the reference formula, without checks.

        Args:
            scales: Shape [num_blocks], float32.
            packed: Shape [num_blocks, 16 * bits], uint8.

        Returns:
            Values, [num_blocks, 128], float32; the smallest k, float32.
        """
        # The smallest k and not the smallest code: compiled, amin of uint8 gives 0 (torch 2.13.0).
        k = unpack(packed, self._levels.bits).float() - self._zero_code
        values = self._levels.level(k) * scales[:, None, None]
        return values.view(-1, BLOCK_NUMEL), k.amin()

    def _scale_bits(self, largest: Tensor) -> Tensor:
        """Return the bits of the float32 scales, int32, of which the lower `_shift` are zero.

        They are rounded as integers, half to even or up: each is a positive normal number.
        """
        quotient = torch.where(largest < _ZERO_BLOCK, 1.0, largest * (1 / self._levels.largest))
        bits = quotient.view(torch.int32)
        below = (1 << self._shift) - 1
        if self._is_stochastic:
            bits = bits + (below - _SLACK)
        else:
            bits = bits + (below >> 1) + ((bits >> self._shift) & 1)
        return (bits & ~below).clamp(max=self._max_scale_bits)

    def _read(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Split a payload of at least one block into valid scales and rows of packed codes."""
        num_blocks = payload.numel() // self.wire_bytes(BLOCK_NUMEL)
        scales = self._read_scales(payload[: _SCALE_BYTES * num_blocks])
        return scales, payload[_SCALE_BYTES * num_blocks :].reshape(num_blocks, -1)

    def _check_code(self, smallest: int) -> None:
        """Refuse the code of no level: 0, where zero is a level."""
        if smallest < self._levels.has_zero:
            raise CodecError(
                f"{self.name} payload has a code of -{self._zero_code}: it was damaged or made by "
                "something else"
            )

    def _read_scales(self, wire: Tensor) -> Tensor:
        """Read scales from the wire, and refuse any that `encode` never gives."""
        # A copy, since the payload may start at an odd address.
        bits = wire.clone().view(torch.int16).to(torch.int32) & 0xFFFF
        scales = (bits << self._shift).view(torch.float32)
        is_valid = (scales >= self._min_scale) & (scales <= self._max_scale)
        if not self._levels.has_zero:
            is_valid |= bits == 0
        if not is_valid.all():
            block = int(is_valid.logical_not().nonzero()[0])
            raise CodecError(
                f"{self.name} payload has the scale {scales[block].item()} in block {block}: "
                "it was damaged or made by something else"
            )
        return scales
