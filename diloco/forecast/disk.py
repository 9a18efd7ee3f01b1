"""Computes what a run keeps on disk, and checks that it fits.

    checkpoint of an island  (16 + payload) B a parameter: weights, two moments, anchor and what is
                             in flight, 8 more with error feedback; `keep` complete ones, those
                             that may become complete, one being written
    record of the syncer     (12 + M payloads up + one down) B a parameter: theta, published,
                             momentum (4 more: adam's second moment) and what they were made
                             from; the newest, those that `retained_versions` keeps, and those that
                             checkpoints pin
      snapshot_rounds > 1    two of these besides the pinned, and of all other versions since the
                             older of them what they were made from: frames
      keep_contributions     a frame of every version of the run

A pin is a hard link, and a fragment gets one version in H inner steps: n checkpoints, one every k
inner steps, pin at most min(n, ceil(n k / H) + 1) versions of it; those of stops, n.

Upper bounds, without file headers; tensors with a codec of their own are counted like all others.
Not counted, since it is there only until the resumed run has a complete checkpoint of its own: what
a resume abandons; nor that checkpoints which failed on one island draw the complete ones apart; nor
what islands give each other of inner optimizers (`diloco.syncer.transfer_store`), 8 B a parameter
each, which goes where there is no room. No torch is imported, so that a coordinator can ask.

Source: PROTOCOL.md, "Records and frames" and "Run checkpoints and pins".
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.outer.schedule import num_rounds
from diloco.state_dir import StateDir
from diloco.transport.units import format_bytes

_SCALE_BYTES = 2 / 128
#: Bytes of one value on the wire, scales included, in whole blocks and chunks.
PAYLOAD_BYTES: Mapping[str, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "int8": 1 + _SCALE_BYTES,
    "topk64": 116 / 4096,
    "topk128": 228 / 4096,
    "int2": 1 / 4 + _SCALE_BYTES,
    **dict.fromkeys(
        ("int4", "e2m1", "e3m0", "int4-stochastic", "e2m1-stochastic", "e3m0-stochastic"),
        1 / 2 + _SCALE_BYTES,
    ),
}
_FOREIGN_BYTES = 4.0  # at most, as float32: a codec is there to send less
_INNER_AND_ANCHOR_BYTES = 16.0
_RESIDUALS_BYTES = 8.0
_STATE_BYTES = 12.0
_SECOND_MOMENT_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class DiskForecast:
    """Bytes on disk, at most.

    Args:
        checkpoint_bytes: One checkpoint of one island.
        num_checkpoints: That an island has at once.
        record_bytes: One version of all fragments in the syncer's store.
        num_records: Versions of each fragment that the store has at once.
        frame_bytes: What one version of all fragments was made from.
        num_frames: Versions of each fragment of which the store has only that.
        written_bytes: A version of all fragments, on average: a record, or one of every
            `snapshot_rounds` and frames between.
    """

    checkpoint_bytes: int
    num_checkpoints: int
    record_bytes: int
    num_records: int
    frame_bytes: int
    num_frames: int
    written_bytes: int

    @property
    def island_bytes(self) -> int:
        """All checkpoints of one island."""
        return self.num_checkpoints * self.checkpoint_bytes

    @property
    def store_bytes(self) -> int:
        """The syncer's store."""
        return self.num_records * self.record_bytes + self.num_frames * self.frame_bytes


def payload_bytes(codec: str) -> float:
    """Return the bytes of one value on the wire; of another package's codec, at most."""
    return PAYLOAD_BYTES.get(codec, _FOREIGN_BYTES)


def forecast_disk(config: Config, num_parameters: int) -> DiskForecast:
    """Compute what a run keeps on disk; `num_parameters` are the trained ones."""
    outer = config.outer
    up, down = payload_bytes(outer.uplink_codec), payload_bytes(outer.downlink_codec)
    residuals = _RESIDUALS_BYTES * outer.error_feedback
    num_checkpoints = config.checkpoint.keep + config.num_unsure_checkpoints + 1
    second = _SECOND_MOMENT_BYTES if outer.optimizer.name == "adam" else 0.0
    frame = len(config.islands) * up + down
    num_whole, num_frames = outer.retained_versions + 1, 0
    if outer.snapshot_rounds > 1:
        num_whole, num_frames = 2, outer.retained_versions + 2 * outer.snapshot_rounds
    if outer.keep_contributions == "all":
        num_frames += (
            num_rounds(
                config.run.inner_steps,
                outer.inner_steps_per_round,
                outer.first_inner_steps_per_round,
            )
            + 1
        )
    every = outer.snapshot_rounds
    written = (_STATE_BYTES + second) / every + frame
    return DiskForecast(
        checkpoint_bytes=round(num_parameters * (_INNER_AND_ANCHOR_BYTES + residuals + up)),
        num_checkpoints=num_checkpoints,
        record_bytes=round(num_parameters * (_STATE_BYTES + second + frame)),
        num_records=num_whole + _num_pinned_versions(config, num_checkpoints),
        frame_bytes=round(num_parameters * frame),
        num_frames=num_frames,
        written_bytes=round(num_parameters * written),
    )


def _num_pinned_versions(config: Config, num_checkpoints: int) -> int:
    """Versions of one fragment that the pins of so many checkpoints name, at most."""
    every = config.checkpoint.every_inner_steps
    if every == 0:
        return num_checkpoints
    outer = config.outer
    least = outer.first_inner_steps_per_round or outer.inner_steps_per_round
    rounds = math.ceil(num_checkpoints * every / least)
    return min(num_checkpoints, rounds + 1)


def check_room(
    config: Config,
    num_parameters: int,
    *,
    islands: Collection[str],
    is_new: bool,
    own_store: Path | None = None,
) -> None:
    """Refuse a run that cannot keep on this machine what it must.

    Args:
        config: The run.
        num_parameters: Trained parameters; of one syncer those that it has.
        islands: Islands whose checkpoints are written on this machine; the syncer's store is.
        is_new: Whether the run begins; else what is in its directories is counted as written.
        own_store: Of one syncer, whose part alone is looked at; None: the stores of all.

    Raises:
        ConfigError: Naming what is needed, what is free and what to change; or the place in which
            nothing can be written.
    """
    _check_writable(Path(config.coordinator.state_dir), "coordinator.state_dir")
    if islands:
        _check_writable(config.checkpoint_dir, "checkpoint.dir")
    planned = forecast_disk(config, num_parameters)
    state = StateDir(Path(config.coordinator.state_dir))
    syncers = state.of_syncers(config.own_syncers)
    stores = [own_store] if own_store is not None else [each.store for each in syncers]
    whose = "the syncer's store" if len(stores) == 1 else "the syncers' stores"
    needs = [(stores, whose, planned.store_bytes)] if stores else []
    for island in sorted(islands):
        what = f"checkpoints of island {island}"
        needs.append(([config.checkpoint_dir / island], what, planned.island_bytes))
    by_disk: dict[int, list[tuple[Path, str, int]]] = {}
    for paths, what, num_bytes in needs:
        path = paths[0]
        missing = num_bytes if is_new else max(0, num_bytes - sum(map(_bytes_in, paths)))
        by_disk.setdefault(_existing(path).stat().st_dev, []).append((path, what, missing))
    for parts in by_disk.values():
        _insist(parts, num_parameters)


def check_directories(config: Config) -> None:
    """Refuse places that can never be made, because a file is in the way; touches nothing.

    Raises:
        ConfigError: Naming the key and the file.
    """
    places = {
        "coordinator.state_dir": Path(config.coordinator.state_dir),
        "checkpoint.dir": config.checkpoint_dir,
        "telemetry.dir": config.telemetry_dir,
    }
    for key, path in places.items():
        if not (place := _existing(path)).is_dir():
            raise ConfigError(
                f"{key} = {path} cannot be a directory: {place} is none; choose another place, in "
                f"the run file or with --set {key}=DIRECTORY"
            )


def _check_writable(path: Path, key: str) -> None:
    place = _existing(path)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key} = {path}: nothing can be written in {place}: {error.strerror or error}; choose "
            f"another place, in the run file or with --set {key}=DIRECTORY"
        ) from error


def _insist(parts: list[tuple[Path, str, int]], num_parameters: int) -> None:
    """Refuse what does not fit on one disk."""
    needed = sum(num_bytes for _, _, num_bytes in parts)
    free = shutil.disk_usage(_existing(parts[0][0])).free
    if needed <= free:
        return
    listed = "\n  ".join(f"{what}: {format_bytes(n)} in {path}" for path, what, n in parts)
    raise ConfigError(
        f"this run writes up to {format_bytes(needed)} more ({num_parameters:,} parameters), and "
        f"{format_bytes(free)} are free on that disk:\n  {listed}\nMake room, or lower "
        f"checkpoint.keep or outer.retained_versions, or give another checkpoint.dir or "
        f"coordinator.state_dir"
    )


def _existing(path: Path) -> Path:
    """Return the path or the nearest directory above it that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _bytes_in(directory: Path) -> int:
    """Bytes of all files below a directory, each file once however many names it has."""
    sizes: dict[int, int] = {}
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.stat(os.path.join(root, name))
            except OSError:  # a writer has renamed it meanwhile, or it is a link to itself
                continue
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())
