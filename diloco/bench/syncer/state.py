"""What the close of a round costs more where the run's state is in an object store.

A version is written as the syncer writes one, and has its name once the store has it: its bytes as
one object, then the entry of the chain, which has the bytes of a small one. An S3 server (moto) is
a process of its own, behind a line that delays every byte. In turn, the same version is written to
this disk alone, and its bytes and then a small object are sent to the store with none of the
product's work: two round trips, the bytes' way and the server's own time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from diloco.bench.network.s3_server import BUCKET, delayed, environment_at, s3_server
from diloco.durable import replicate, write_durably
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectStore
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.transport.units import format_bytes

_ENTRY = bytes(300)
_COLUMNS = (
    Column("row", "a version of"),
    Column("disk_ms", "disk alone, ms", ".1f"),
    Column("objects_ms", "two objects alone, ms", ".1f"),
    Column("p50_ms", "in the store, p50, ms", ".1f"),
    Column("p99_ms", "p99", ".1f"),
    Column("ratio", "ratio", ".3f"),
)


@dataclass(frozen=True, slots=True)
class StateSetting:
    """What is measured.

    Attributes:
        sizes: Bytes of a version.
        num_versions: Of each size.
        delay_ms: To the object store, one way.
        ratio: Bar of a version in the store, over disk and two objects alone.
    """

    sizes: tuple[int, ...] = (8 << 10, 1 << 20, 8 << 20)
    num_versions: int = 60
    delay_ms: float = 15.0
    ratio: float = 1.1


def run(watch: Watch, rows: Sequence[str] = (), *, setting: StateSetting | None = None) -> Report:
    """Measure all rows whose names match.

    Raises:
        ConfigError: If a pattern matches no row, or moto or obstore is not installed.
    """
    setting = setting or StateSetting()
    by_name = {format_bytes(size): size for size in setting.sizes}
    wanted = matching(list(by_name), rows)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="diloco-bench-state-") as directory:
        place = Path(directory)
        with (
            s3_server(place / "s3.log") as server,
            delayed(server.port, setting.delay_ms / 1e3) as line,
        ):
            store = ObjectStore(f"s3://{BUCKET}/state", environment=environment_at(line))
            for done, name in enumerate(wanted):
                watch(name, done, len(wanted))
                figures = _measure(store, place / str(done), by_name[name], setting)
                results.append({"row": name, **figures})
    requirements = [
        Requirement(
            f"{r['row']}: in the store / (disk + two objects)", r["ratio"], setting.ratio, ""
        )
        for r in results
    ]
    return Report("state", asdict(setting), _COLUMNS, results, requirements)


def _measure(
    store: ObjectStore, place: Path, size: int, setting: StateSetting
) -> Mapping[str, float]:
    alone, root = place / "alone", place / "root"
    for directory in (alone, root):
        directory.mkdir(parents=True)
    replica = Replica(store, place.name, root, lambda path: True)
    replica.open(lambda number: {"of": "bench"}, lambda found: None)
    disk, objects, kept = [], [], []
    for number in range(setting.num_versions):
        version = os.urandom(size)
        began = time.perf_counter()
        write_durably(alone / f"v{number}", [version])
        written = time.perf_counter()
        store.put(f"alone/{number}", version)
        store.create(f"alone/{number}.entry", _ENTRY)
        sent = time.perf_counter()
        replicate(replica)
        try:
            write_durably(root / f"v{number}", [version])
        finally:
            replicate(None)
        kept.append(1e3 * (time.perf_counter() - sent))
        disk.append(1e3 * (written - began))
        objects.append(1e3 * (sent - written))
    return {
        "disk_ms": median(disk),
        "objects_ms": median(objects),
        "p50_ms": median(kept),
        "p99_ms": quantiles(kept, n=100)[98],
        "ratio": median(kept) / (median(disk) + median(objects)),
    }
