"""The float32 codec: raw little-endian values, 4 bytes each."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.compression.base import check_finite, check_flat, check_payload, values_of


class Float32Codec:
    """Send values as they are: exact, and the only codec that publishes parameters themselves."""

    name = "float32"
    publishes_values = True
    has_zero = True

    def wire_bytes(self, numel: int) -> int:
        """Return 4 * numel."""
        return 4 * numel

    @torch.no_grad()
    def encode(self, values: Tensor, key: int = 0) -> Tensor:
        """Copy the values' bytes; see `Codec.encode`."""
        check_flat(self.name, values)
        check_finite(self.name, values)
        return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    @torch.no_grad()
    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Copy the bytes into values; see `Codec.decode`."""
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        values = payload.clone(memory_format=torch.contiguous_format).view(torch.float32)
        check_finite(self.name, values)
        return values

    def check(self, payload: Tensor, numel: int) -> None:
        """Look for a value that is not finite; see `Codec.check`."""
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        check_finite(self.name, values_of(payload, torch.float32))
