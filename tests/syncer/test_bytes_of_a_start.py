"""What a start of a syncer reads of its store, counted by the kernel, and what it reads later."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.rounds.terms import Contributor, RoundKey
from diloco.protocol.run.alarms import LASTING_S
from diloco.telemetry.events import AlarmRaised
from diloco.transport.calls.loopback import run_virtual
from diloco.versions.publication import LaneState, lane_blake3
from diloco.versions.record import StoredRecord, locate, record_path
from diloco.versions.store import FragmentStore
from diloco.versions.value_digest import lane_digest
from diloco.versions.version import VersionRecord
from tests.virtual_run import Setting, VirtualRun, descend

NUMEL = 1 << 18
FRAGMENT = make_plan([TensorSpec("w", (NUMEL,))], num_fragments=1).fragments[0]


def read_bytes(work: Callable[[], object]) -> int:
    """Count what this process reads meanwhile, of files and otherwise."""

    def rchar() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    own = rchar()
    own = rchar() - own  # of the counting itself
    before = rchar()
    work()
    return rchar() - before - own


def stored(directory: Path, num_islands: int, num_versions: int = 6) -> FragmentStore:
    """Store versions whose payload has a byte, and each contribution two, a parameter."""
    store = FragmentStore(directory, FRAGMENT, 4)
    store.recover()
    names = [f"i{number:02d}" for number in range(num_islands)]
    lanes = [torch.zeros(lane.numel) for lane in FRAGMENT.lanes]
    digests = tuple(map(lane_digest, lanes))
    for version in range(num_versions):
        store.commit(
            VersionRecord(
                version=version,
                fragment_id=0,
                timeline=0,
                key=RoundKey(0, 0, version - 1, 0) if version else None,
                is_flush=False,
                payload_codec="float32",
                lane_digests=digests,
                lane_blake3=tuple(map(lane_blake3, lanes)),
                lanes=tuple(LaneState(lane, lane, lane) for lane in lanes),
                payloads=tuple(bytes(lane.numel) for lane in FRAGMENT.lanes) if version else (),
                contributors=tuple(Contributor(name, 1, 1, 1, 1, digests) for name in names),
                contributions={
                    name: [bytes(2 * lane.numel) for lane in FRAGMENT.lanes] for name in names
                }
                if version
                else {},
            )
        )
    return FragmentStore(directory, FRAGMENT, 4)


def with_bad_sector(version: int, bad: str) -> Callable[[StoredRecord, str], Any]:
    """Read as `StoredRecord.read` does, from a disk that cannot read one section."""
    read: Any = StoredRecord.read

    def reading(stored: StoredRecord, name: str) -> Any:
        if (stored.header["version"], name) == (version, bad):
            raise OSError(errno.EIO, "Input/output error")
        return read(stored, name)

    return reading


@pytest.mark.parametrize("num_islands", [2, 16])
def test_a_start_reads_once_what_it_serves(tmp_path: Path, num_islands: int) -> None:
    store = stored(tmp_path, num_islands)
    newest = locate(record_path(tmp_path / "fragment-0000", 5))
    header_bytes = min(section.start for section in newest.sections.values())
    num_bytes = read_bytes(store.recover)
    # Theta, published, momentum and the payload; headers of six versions, read more than once.
    assert 13 * NUMEL <= num_bytes < 13 * NUMEL + 15 * header_bytes


def test_the_memory_of_a_start_does_not_grow_with_the_islands(tmp_path: Path) -> None:
    peaks = []
    for num_islands in (2, 16):
        store = stored(tmp_path / str(num_islands), num_islands)
        tracemalloc.start()
        recovered = store.recover()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert recovered is not None and not recovered.record.contributions
    assert peaks[1] - peaks[0] < 2 * NUMEL, "not one contribution more"


@pytest.mark.parametrize("is_bad_sector", [False, True])
@pytest.mark.parametrize("name", ["contribution/a/0", "theta/0"])
def test_what_the_start_did_not_read_is_verified_while_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_bad_sector: bool
) -> None:
    setting = Setting({"u": [16.0] * 2}, descend, tmp_path, inner_steps=90, inner_steps_per_round=4)

    async def scenario() -> None:
        run = VirtualRun(setting)
        await run.start_syncer()
        islands = [run.island(each) for each in "ab"]
        training = [asyncio.create_task(island.run()) for island in islands]
        await asyncio.sleep(30.0)
        await run.kill_syncer()
        store = FragmentStore(tmp_path, setting.plan().fragments[0], 4)
        newest = store.versions()[-1]
        rotten = newest if name.startswith("contribution") else newest - 1
        path = record_path(tmp_path / "fragment-0000", rotten)
        body = bytearray(path.read_bytes())
        body[locate(path).sections[name].start] ^= 1
        for task in training:
            task.cancel()
        if not is_bad_sector:
            path.write_bytes(body)

        await run.start_syncer()
        assert run.syncer.damage(0) == "", "it is served"
        if is_bad_sector:
            monkeypatch.setattr(StoredRecord, "read", with_bad_sector(rotten, name))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LASTING_S):
                await run.syncer.verify_stores()
        told, again = [event for event in run.events if isinstance(event, AlarmRaised)]
        assert again == told, "it holds as long as it is so"
        assert (told.alarm, told.fragment_id) == ("store_rots", 0)
        assert f"version {rotten} of fragment 0 is damaged" in told.text
        assert "diloco repair RUN.toml" in told.text
        await asyncio.gather(*training, return_exceptions=True)
        for island in islands:
            await island.exchange.stop()
        await run.kill_syncer()

    run_virtual(scenario())
