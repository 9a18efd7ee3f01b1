"""The 16-bit codecs: values rounded to float16 or bfloat16, little-endian, 2 bytes each.

float16 keeps 11 significant bits between 6e-5 and 65504, fewer below; bfloat16 keeps 8, of any
float32. Both publish differences: 16-bit parameters would lose most of a small update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.compression.base import (
    check_finite,
    check_flat,
    check_payload,
    is_finite,
    values_of,
)
from diloco.errors import CodecError


class Float16Codec:
    """Send values rounded to 16 bits, half to even; publishes differences."""

    publishes_values = False
    has_zero = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        """Name a 16-bit format."""
        self.name = name
        self._dtype = dtype

    def wire_bytes(self, numel: int) -> int:
        """Return 2 * numel."""
        return 2 * numel

    @torch.no_grad()
    def encode(self, values: Tensor, key: int = 0) -> Tensor:
        """Round to 16 bits; see `Codec.encode`.

        Raises:
            CodecError: Also for a value that would be rounded to infinity.
        """
        check_flat(self.name, values)
        rounded = values.to(self._dtype, memory_format=torch.contiguous_format)
        if not is_finite(rounded):
            check_finite(self.name, values)
            index = int(rounded.isfinite().logical_not().nonzero()[0])
            raise CodecError(
                f"{self.name} met {values[index].item()} at element {index} of {values.numel()}, "
                f"beyond its largest value {torch.finfo(self._dtype).max}: use another codec"
            )
        return rounded.view(torch.uint8)

    @torch.no_grad()
    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Widen to float32; see `Codec.decode`."""
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        # A copy, since the payload may start at an odd address.
        values = payload.clone(memory_format=torch.contiguous_format).view(self._dtype).float()
        check_finite(self.name, values)
        return values

    def check(self, payload: Tensor, numel: int) -> None:
        """Look for a value that is not finite; see `Codec.check`."""
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        check_finite(self.name, values_of(payload, self._dtype))
