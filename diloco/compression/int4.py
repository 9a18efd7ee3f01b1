"""The int4 codec: blocks of 128 values, one bf16 scale each, codes -7..7, 0.516 bytes a value.

Of a block with largest magnitude a (the last block is filled up with zeros):

    scale = bf16(a / 7)         1 where a < 2^-100, and all codes are 0 there
    code_i = round(x_i / scale) half to even; a is always coded as 7
    x_i   ~= scale * code_i     exact in float32 (8-bit significand times at most 3 bits), so that
                                adding it to an anchor fused or unfused gives the same bits

so |x_i - scale * code_i| <= scale / 2, up to rounding of the product. The payload is all scales,
then 64 bytes a block: byte j holds value j in its low half and value j + 64 in its high half, each
as code + 8.

One pure formula per direction gives the same bytes eager, compiled, on CPU and on GPU. For that it
divides once a block, in float64 (compiled float32 division on a GPU is approximate; of an 8-bit
scale the float64 quotient rounds to the correctly rounded float32 one), and rounds scales with
integers (compilers drop a cast to bf16 and back). It needs no denormal float32 number, so flushing
these to zero changes nothing.
"""

from __future__ import annotations

import functools
import logging
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from diloco.compression.base import check_finite, check_flat, check_payload
from diloco.errors import CodecError

logger = logging.getLogger(__name__)

BLOCK_NUMEL = 128
#: From this many values on, CPU vectors are coded by the compiled formula if a compiler is there.
COMPILE_NUMEL = 4 << 20

_HALF = BLOCK_NUMEL // 2
_BLOCK_BYTES = 2 + _HALF
_LARGEST_CODE = 7
_OFFSET = 8
_ONE_SEVENTH = 1 / _LARGEST_CODE
_ZERO_BLOCK = 2.0**-100
#: bf16 scales of the smallest and the largest magnitude that float32 has room for. The largest,
#: 146 * 2^118, times 7 is still finite: no block can overflow when decoded.
_MIN_SCALE = 146 * 2.0**-110
_MAX_SCALE = 146 * 2.0**118

_Formula = TypeVar("_Formula", bound=Callable[..., Any])


class Int4Codec:
    """Send 4-bit codes with a scale a block; publishes differences."""

    name = "int4"
    publishes_values = False

    def wire_bytes(self, numel: int) -> int:
        """Return 66 bytes for each block of 128 values begun."""
        return -(-numel // BLOCK_NUMEL) * _BLOCK_BYTES

    @torch.no_grad()
    def encode(self, values: Tensor) -> Tensor:
        """Quantise to the nearest code; see `Codec.encode`."""
        check_flat(self.name, values)
        missing = -values.numel() % BLOCK_NUMEL
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        if not padded.numel():
            return values.new_empty(0, dtype=torch.uint8)
        largest, scales, codes = _chosen(quantise, padded, padded.numel())(
            padded.reshape(-1, BLOCK_NUMEL)
        )
        if not largest.isfinite().all():
            check_finite(self.name, values)
        return torch.cat((scales.view(torch.uint8), codes.flatten()))

    @torch.no_grad()
    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Multiply codes by scales; see `Codec.decode`.

        Raises:
            CodecError: Also for a scale or a code that `encode` never gives.
        """
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        if not numel:
            return payload.new_empty(0, dtype=torch.float32)
        num_blocks = payload.numel() // _BLOCK_BYTES
        # A copy, since the payload may start at an odd address.
        scales = payload[: 2 * num_blocks].clone().view(torch.bfloat16).float()
        codes = payload[2 * num_blocks :].reshape(num_blocks, _HALF)
        is_valid = (scales >= _MIN_SCALE) & (scales <= _MAX_SCALE)
        if not is_valid.all():
            block = int(is_valid.logical_not().nonzero()[0])
            raise CodecError(
                f"{self.name} payload has the scale {scales[block].item()} in block {block}: "
                "it was damaged or made by something else"
            )
        if codes.min() < 16 or (codes & 15).min() == 0:
            raise CodecError(
                f"{self.name} payload has a code of -8: it was damaged or made by something else"
            )
        values = _chosen(dequantise, codes, numel)(scales, codes).flatten()
        return values if values.numel() == numel else values[:numel].clone()


def quantise(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise whole blocks; the reference formula, without checks.

    Args:
        blocks: Shape [num_blocks, 128], float32.

    Returns:
        Largest magnitude of each block, [num_blocks], float32, not finite where a value is not;
        the bits of its bf16 scale, [num_blocks], int16; packed codes, [num_blocks, 64], uint8.
    """
    largest = blocks.abs().amax(dim=1)
    ratio = torch.where(largest < _ZERO_BLOCK, 1.0, largest * _ONE_SEVENTH)
    # Round to bf16, half to even, on the bits: ratio is a positive normal number.
    bits = ratio.view(torch.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    scales = bits.view(torch.float32)
    reciprocals = scales.double().reciprocal().float()
    # |x / scale| <= 7 (1 + 2^-8): no clamp is needed. A zero block's tiny values give 0 as well.
    codes = (blocks * reciprocals[:, None]).round_().to(torch.int8)
    halves = codes.add_(_OFFSET).view(torch.uint8)
    packed = halves[:, :_HALF] | (halves[:, _HALF:] << 4)
    return largest, (bits >> 16).to(torch.int16), packed


def dequantise(scales: Tensor, packed: Tensor) -> Tensor:
    """Undo the packing and multiply by the scales; the reference formula, without checks.

    Args:
        scales: Shape [num_blocks], float32.
        packed: Shape [num_blocks, 64], uint8.

    Returns:
        Shape [num_blocks, 128], float32.
    """
    shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=packed.device)
    halves = (packed[:, None, :] >> shifts[:, None]) & 15
    values = halves.float().sub_(_OFFSET).mul_(scales[:, None, None])
    return values.view(-1, BLOCK_NUMEL)


@functools.cache
def compiled(formula: _Formula) -> _Formula:
    """Return `formula` compiled by inductor for any number of blocks; the first call compiles."""
    return cast(_Formula, torch.compile(formula, fullgraph=True, dynamic=True))


@functools.cache
def can_compile() -> bool:
    """Tell whether this host can build CPU kernels: it has `g++` and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which("g++") and headers.exists():
        return True
    logger.info("int4 codes large vectors eagerly and slower: no g++ or no %s", headers)
    return False


def _chosen(formula: _Formula, operand: Tensor, numel: int) -> _Formula:
    """Return `formula`, compiled if `numel` is worth it, on the CPU, where a compiler is there."""
    is_worth_it = operand.is_cpu and numel >= COMPILE_NUMEL
    return compiled(formula) if is_worth_it and can_compile() else formula
