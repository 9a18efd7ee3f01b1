"""A run whose every call may meet a fault publishes the bytes of a run that met none."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from diloco.transport.calls.loopback import run_virtual
from diloco.transport.contracts import Transport
from diloco.transport.shaping.faulty import Fault, Faults, FaultScript, FaultyTransport
from tests.virtual_run import Setting, VirtualIsland, VirtualRun


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.sub_({"a": 1.0, "b": 3.0}[island] + 0.1 * inner_step)


@dataclass
class Ended:
    """What a run left: the islands' parameters, every record, the faults that fired."""

    values: list[dict[str, list[float]]]
    records: list[tuple[int, int, str, tuple[str, ...]]]
    fired: Counter[Fault]


def train(directory: Path, script: FaultScript) -> Ended:
    """Train two islands whose calls all take one link."""
    directory.mkdir()
    initial = {name: [16.0, 1.0, -3.0] for name in "uv"}
    setting = Setting(
        initial, descend, directory, inner_steps=24, num_fragments=2, overlap_steps=1,
        round_deadline_s=3000.0,
    )  # fmt: skip

    async def scenario() -> Ended:
        run = VirtualRun(setting)
        await run.start_syncer()
        faults = Faults(script, "wan")

        def connect() -> Transport:
            return FaultyTransport(run.network.connect("syncer"), faults)

        islands = [VirtualIsland(name, setting, connect(), connect()) for name in setting.islands]
        await asyncio.gather(*(island.run() for island in islands))
        for island in islands:
            await island.exchange.stop()
        await run.kill_syncer()
        records = [
            (
                record["fragment_id"],
                record["version"],
                record["digest"],
                tuple(contributor["island"] for contributor in record["contributors"]),
            )
            for record in run.records
        ]
        return Ended([island.values() for island in islands], records, faults.fired)

    return run_virtual(scenario())


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.CORRUPT])
def test_no_fault_changes_a_byte_of_what_is_published(tmp_path: Path, fault: Fault) -> None:
    script = FaultScript(seed=2, rates={fault: 0.4}, delay_s=5.0, slow_bps=100.0)

    faulty = train(tmp_path / "faulty", script)
    undisturbed = train(tmp_path / "undisturbed", FaultScript(seed=2))

    assert faulty.fired[fault] > 0
    assert sorted(faulty.records) == sorted(undisturbed.records)
    assert faulty.values == undisturbed.values


def test_damaged_publications_are_fetched_again(tmp_path: Path) -> None:
    fetches = frozenset({"fragment.fetch"})

    faulty = train(
        tmp_path / "faulty", FaultScript(seed=4, rates={Fault.CORRUPT: 0.05}, methods=fetches)
    )
    undisturbed = train(tmp_path / "undisturbed", FaultScript(seed=2))

    assert faulty.fired[Fault.CORRUPT] > 0
    assert faulty.records == undisturbed.records
    assert faulty.values == undisturbed.values


def test_damaged_contributions_are_refused_and_all_go_on_alike(tmp_path: Path) -> None:
    submits = frozenset({"fragment.submit"})

    faulty = train(
        tmp_path / "faulty", FaultScript(seed=2, rates={Fault.CORRUPT: 0.3}, methods=submits)
    )

    versions = [record for record in faulty.records if record[1] > 0]
    missing = sum(2 - len(contributors) for *_, contributors in versions)
    # A round whose contributions are all damaged expires.
    assert 0 < missing <= faulty.fired[Fault.CORRUPT]
    assert all(contributors for *_, contributors in versions)
