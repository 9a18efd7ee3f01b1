"""Every codec both ways in a whole run: nobody disagrees, and nothing is lost for good."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.compression.registry import CODECS
from diloco.outer.optimizer import OuterOptimizer
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.store import FragmentStore
from tests.remaking import recompute
from tests.virtual_run import Setting, VirtualIsland, VirtualRun

TARGETS = {"norm": -0.25, "u.weight": 1.0, "v.weight": 0.5}


def approach(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Go a tenth of the way to the target, and a little astray."""
    generator = torch.Generator().manual_seed(ord(island) * 1000 + inner_step)
    for name, parameter in parameters.items():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.1 * (TARGETS[name] - parameter) + 0.002 * noise)


def setting(directory: Path, uplink: str, downlink: str, *, feedback: bool) -> Setting:
    """Tensors of 5, 300 and 200 values, so that blocks are padded; 20 rounds."""
    return Setting(
        {"norm": [1.0] * 5, "u.weight": [0.0] * 300, "v.weight": [0.0] * 200},
        approach,
        directory,
        inner_steps=80,
        num_fragments=2,
        overlap_steps=1,
        optimizer=OuterOptimizer("sgd", 1.0, 0.0, 0),
        uplink_codec=uplink,
        downlink_codec=downlink,
        error_feedback=feedback,
    )


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


COARSE = ("int2", "topk64", "topk128")
MIXED = ("int4 norm=float32", "int2 norm=bfloat16 v.*=int8", "topk64 norm=int4-stochastic")


@pytest.mark.parametrize("codec", COARSE)
def test_a_short_lane_ends_with_what_was_published(tmp_path: Path, codec: str) -> None:
    short = {"norm": [1.0] * 5, "v.weight": [0.0] * 45}
    config = replace(setting(tmp_path, codec, codec, feedback=True), initial=short, inner_steps=8)

    islands = run_virtual(VirtualRun(config).run())  # islands hash what they hold at the end

    assert islands["a"].session.digests == islands["b"].session.digests


@pytest.mark.parametrize("codec", (*CODECS, *MIXED))
def test_islands_reach_the_target_together(tmp_path: Path, codec: str) -> None:
    is_coarse = codec.split()[0] in COARSE
    config = setting(tmp_path, codec, codec, feedback=is_coarse)

    run = VirtualRun(config)
    islands = run_virtual(run.run())

    assert islands["a"].session.digests == islands["b"].session.digests
    for island in islands.values():
        assert {event["outcome"] for event in island.kinds("fragment_merged")} == {"included"}
        assert not island.kinds("digest_mismatch")
        assert not island.kinds("round_expired")
        assert distance(island) < (0.3 if is_coarse else 0.02)
    for fragment in config.plan().fragments:
        store = FragmentStore(config.directory, fragment, 4)
        found = store.recover()
        assert found is not None
        assert found.record.version >= 19
        assert found.record.payload_codec == codec
        for version in range(found.record.version - 3, found.record.version + 1):
            before, after = store.load(version - 1), store.load(version)
            digests = recompute(before, after, config.publication(), fragment)
            assert digests == after.lane_digests


def distance(island: VirtualIsland) -> float:
    """Root mean square distance from the target of what is published."""
    published = island.published[-1]
    errors = [torch.tensor(values) - TARGETS[name] for name, values in published.items()]
    return torch.cat(errors).square().mean().sqrt().item()


def test_islands_of_a_run_draw_apart(tmp_path: Path) -> None:
    config = setting(tmp_path, "int4-stochastic", "int4-stochastic", feedback=False)

    run_virtual(VirtualRun(config).run())

    store = FragmentStore(config.directory, config.plan().fragments[0], 4)
    found = store.recover()
    assert found is not None
    contributions = store.load(found.record.version).contributions
    assert contributions["a"][0] != contributions["b"][0]
