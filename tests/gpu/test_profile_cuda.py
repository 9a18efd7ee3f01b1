"""Traces, memory and peak of a CUDA device, where there is one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from diloco.config.records import ProfileConfig
from diloco.island.profile import StepProfile, memory_used
from diloco.telemetry.events import Event, ProfileWritten

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_trace_has_kernels_and_comes_with_a_snapshot_of_memory(tmp_path: Path) -> None:
    device, heard = torch.device("cuda"), list[Event]()
    config = ProfileConfig(num_steps=2, start_step=1, memory=True)
    traced = StepProfile(config, tmp_path / "traces" / "east-0", device, heard.append)

    for step in range(4):
        traced.before(step)
        torch.randn(256, 256, device=device) @ torch.randn(256, 256, device=device)
        traced.after(step + 1)

    (written,) = heard
    assert isinstance(written, ProfileWritten)
    assert (written.first_step, written.inner_step) == (2, 3)
    with gzip.open(written.path, "rt") as trace:
        categories = {event.get("cat") for event in json.load(trace)["traceEvents"]}
    assert "kernel" in categories
    assert Path(written.memory_path).stat().st_size > 0
    used = memory_used(4, device)
    assert used.device_peak_bytes >= 3 * 4 * 256 * 256
