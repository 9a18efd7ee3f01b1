"""Codecs that send each value as one floating-point number, little-endian.

    float32    exact; the only codec that publishes parameters themselves
    float16    11 significant bits between 6e-5 and 65504, fewer below
    bfloat16   8 significant bits of any float32

16 bits would lose most of a small update of the parameters, so these two publish differences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.compression.base import (
    Layout,
    check_finite,
    check_flat,
    check_payload,
    is_finite,
    values_of,
)
from diloco.errors import CodecError


class FloatCodec:
    """Send values rounded to a floating-point format, half to even."""

    has_zero = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        """Name a format of 16 or 32 bits."""
        self.name = name
        self.publishes_values = dtype == torch.float32
        self.layout = Layout(1, (dtype.itemsize,))
        self._dtype = dtype

    def wire_bytes(self, numel: int) -> int:
        """Return 2 or 4 bytes a value."""
        return self.layout.wire_bytes(numel)

    @torch.no_grad()
    def encode(self, values: Tensor, key: int = 0) -> Tensor:
        """Round to the format; see `Codec.encode`.

        Raises:
            CodecError: Also for a value that would be rounded to infinity.
        """
        check_flat(self.name, values)
        rounded = values.to(self._dtype, memory_format=torch.contiguous_format, copy=True)
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
