"""Reads what wandb writes offline: a log of records in blocks, with no public reader."""

from __future__ import annotations

import json
import struct
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_FILE_HEADER_BYTES = 7
_HEADER = struct.Struct("<IHB")
_FULL, _LAST = 1, 4


@dataclass
class WandbFile:
    """What one start wrote."""

    run: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)  # name or pattern -> its step metric
    rows: list[dict[str, Any]] = field(default_factory=list)
    is_ended: bool = False


def offline_files(directory: Path) -> list[Path]:
    """Files of all starts below a run's directory, the oldest first."""
    return sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))


def read_wandb(path: Path) -> WandbFile:
    """Read one file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from wandb.proto import wandb_internal_pb2 as wire

    told = WandbFile()
    for payload in _records(path.read_bytes()):
        record = wire.Record.FromString(payload)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                told.run = {
                    "id": run.run_id,
                    "group": run.run_group,
                    "name": run.display_name,
                    "project": run.project,
                }
                told.settings |= _items(run.config.update)
            case "config":
                told.settings |= _items(record.config.update)
            case "metric":
                name = record.metric.name or record.metric.glob_name
                told.metrics[name] = record.metric.step_metric
            case "history":
                told.rows.append(_items(record.history.item))
            case "exit":
                told.is_ended = True
    return told


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> list[bytes]:
    assert data[:4] == b":W&B"
    records, partial, at = [], b"", _FILE_HEADER_BYTES
    while at + _HEADER.size <= len(data):
        if _BLOCK_BYTES - at % _BLOCK_BYTES < _HEADER.size:
            at += _BLOCK_BYTES - at % _BLOCK_BYTES
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        partial += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            records.append(partial)
            partial = b""
    return records
