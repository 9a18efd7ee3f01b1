"""The digest of values is the same wherever they are, and only it comes from there."""

from __future__ import annotations

import pytest
import torch

from diloco.versions.value_digest import lane_digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("numel", [0, 1, 1 << 16, (1 << 16) + 1, (1 << 23) + 12_345])
def test_a_device_digests_as_a_cpu_does(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert lane_digest(values.cuda()) == lane_digest(values)
