"""The all-reduce exchange publishes what a syncer would have, to the bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.outer.optimizer import OuterOptimizer
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord
from tests.remaking import recompute
from tests.virtual_allreduce import AllReduceRun
from tests.virtual_run import Setting, VirtualRun

NAMES = tuple("abcdefghijklmnop")
NUMEL = 300


def wander(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Move every parameter by an island's own, repeatable noise."""
    for index, parameter in enumerate(parameters.values()):
        seed = 1000 * inner_step + 10 * NAMES.index(island) + index
        generator = torch.Generator().manual_seed(seed)
        parameter.sub_(0.1 * torch.randn(parameter.shape, generator=generator))


def setting_of(directory: Path, num_islands: int, codec: str, **changes: object) -> Setting:
    generator = torch.Generator().manual_seed(5)
    initial = {
        name: torch.randn(NUMEL, generator=generator).tolist() for name in ("first", "second")
    }
    islands = NAMES[:num_islands]
    setting = Setting(
        initial,
        wander,
        directory,
        inner_steps=9,
        islands=islands,
        tokens={name: 1 + index for index, name in enumerate(islands)},
        inner_steps_per_round=3,
        num_fragments=2,
        overlap_steps=1,
        flush=True,
        optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 2),
        uplink_codec=codec,
        downlink_codec=codec,
    )
    return replace(setting, **changes)  # type: ignore[arg-type]


def records(directory: Path, setting: Setting) -> dict[tuple[int, int], VersionRecord]:
    """All retained records of a store, by fragment and version."""
    found = {}
    for fragment in setting.plan().fragments:
        store = FragmentStore(directory, fragment, 4)
        newest = store.newest()
        assert newest is not None
        for version in range(newest.version + 1):
            found[fragment.fragment_id, version] = store.load(version)
    return found


def state_of(record: VersionRecord) -> Mapping[str, object]:
    """What must be equal to the bit: the header, every vector, every published payload.

    But for what only a syncer says: what its islands may ask about, who may fall behind what is
    remembered, and what decided a version whose members come and go.
    """
    header = {**record.header(), "last_included": {}}
    for name in ("rules", "merged_tokens"):
        header.pop(name, None)
    vectors = [
        getattr(lane, name).numpy().tobytes()
        for lane in record.lanes
        for name in ("theta", "published", "momentum")
    ]
    payloads = [bytes(payload) for payload in record.payloads]
    return {
        "header": header,
        "vectors": vectors,
        "payloads": payloads,
    }


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize(
    ("num_islands", "codec"),
    [
        (2, "float32"),
        (2, "int4"),
        (3, "float32"),
        (3, "int4"),
        (16, "int4"),
        pytest.param(16, "float32", marks=pytest.mark.slow),
        pytest.param(3, "int4-stochastic", marks=pytest.mark.slow),
        pytest.param(3, "e2m1", marks=pytest.mark.slow),
        pytest.param(3, "topk64", marks=pytest.mark.slow),
    ],
)
def test_versions_equal_those_of_a_syncer(tmp_path: Path, num_islands: int, codec: str) -> None:
    by_syncer = setting_of(tmp_path / "syncer", num_islands, codec)
    by_peers = setting_of(tmp_path / "peers", num_islands, codec)
    by_syncer.directory.mkdir()
    by_peers.directory.mkdir()

    expected = run_virtual(VirtualRun(by_syncer).run())
    islands = run_virtual(AllReduceRun(by_peers).run())

    truth = {k: state_of(r) for k, r in records(by_syncer.directory, by_syncer).items()}
    assert len(truth) > 6
    for name, island in islands.items():
        own = records(by_peers.directory / "peers" / name, by_peers)
        assert {key: state_of(record) for key, record in own.items()} == truth
        assert island.local == expected[name].local
        assert island.published == expected[name].published


def test_records_of_few_islands_can_be_recomputed(tmp_path: Path) -> None:
    setting = setting_of(tmp_path, 3, "int4")

    run_virtual(AllReduceRun(setting).run())

    for name in setting.islands:
        own = records(tmp_path / "peers" / name, setting)
        fragment = setting.plan().fragments[0]
        rules = setting.publication()
        assert recompute(own[0, 0], own[0, 1], rules, fragment) == own[0, 1].lane_digests


def test_textbook_diloco_without_overlap(tmp_path: Path) -> None:
    def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
        parameters["w"].sub_({"a": 1.0, "b": 3.0}[island])

    setting = Setting({"w": [16.0]}, descend, tmp_path, inner_steps=8)

    islands = run_virtual(AllReduceRun(setting).run())

    assert [v["w"][0] for v in islands["a"].local] == [15, 14, 13, 8, 7, 6, 5, 0]
