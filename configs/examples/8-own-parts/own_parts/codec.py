"""Codec `sign1`: the sign of each value in one bit, and the mean of their sizes once a lane."""

import math

import numpy as np
import torch

from diloco.compression.base import check_finite, check_flat, check_payload
from diloco.errors import CodecError


class SignCodec:
    """One float32, then eight signs a byte; what an island loses it adds to its next send."""

    name = "sign1"
    publishes_values = False  # versions are published as differences
    has_zero = False  # no value comes back as zero

    def wire_bytes(self, numel):
        return 4 + (numel + 7) // 8

    def encode(self, values, key=0):
        check_flat(self.name, values)
        check_finite(self.name, values)
        size = values.double().abs().sum() / max(1, values.numel())
        signs = torch.from_numpy(np.packbits(values.cpu().numpy() >= 0)).to(values.device)
        return torch.cat((size.float().reshape(1).view(torch.uint8), signs))

    def decode(self, payload, numel):
        self.check(payload, numel)
        size = payload[:4].clone().view(torch.float32)
        bits = np.unpackbits(payload[4:].cpu().numpy(), count=numel)
        return torch.where(torch.from_numpy(bits).to(payload.device).bool(), size, -size)

    def check(self, payload, numel):
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        size = payload[:4].clone().view(torch.float32).item()
        has_more = numel % 8 and int(payload[-1]) & ((1 << (8 - numel % 8)) - 1)
        if not (math.isfinite(size) and math.copysign(1, size) > 0) or has_more:
            raise CodecError(f"{self.name} payload of {numel} values is none that it encodes")


SIGN1 = SignCodec()
