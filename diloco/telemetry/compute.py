"""What an island computes a second, of what its devices could; see `diloco.trainer.flops`.

Pure arithmetic over seconds that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeWork:
    """Work of a token and the devices that do it.

    Args:
        flops_per_token: Operations of training on one token; 0: not known.
        num_ranks: Devices of the island.
        peak_flops: Operations a second of one device at most; 0: not known (CPUs, among others).
    """

    flops_per_token: float = 0.0
    num_ranks: int = 1
    peak_flops: float = 0.0

    def tflops_per_s(self, tokens: int, seconds: float) -> float:
        """Compute 10^12 operations a second and rank; 0 where they are not known."""
        if seconds <= 0:
            return 0.0
        return tokens * self.flops_per_token / (seconds * self.num_ranks) / 1e12

    def mfu(self, tokens: int, seconds: float) -> float:
        """Compute the share of the devices' peak in [0, 1]; 0 where that is not known."""
        if not self.peak_flops:
            return 0.0
        return self.tflops_per_s(tokens, seconds) * 1e12 / self.peak_flops
