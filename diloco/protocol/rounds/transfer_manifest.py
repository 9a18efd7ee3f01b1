"""The manifest of a state transfer: what one island sends another of its inner optimizer.

    manifest    JSON: whose it is, of which checkpoint, and size and digest of every lane
    lane        safetensors: `exp_avg` and `exp_avg_sq`, float32 [lane.numel]

By lane, so that it serves an island of any layout. Whatever arrives is written by a peer: it is
held against the plan and refused by name, and never read by anything but JSON and safetensors.

Source: PROTOCOL.md, "State transfer"; Decoupled DiLoCo (arXiv 2604.21428, App. E.3).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diloco.bounded_text import bounded_text
from diloco.errors import PayloadRefused
from diloco.outer.fragments import Fragment, Plan
from diloco.refusals import Cause

#: Of a lane besides its values: lengths, names and shapes of two tensors.
MOST_LANE_HEADER = 1 << 10
_VALUES_BYTES = 8  # of both moments
_LANE_TEXT = 160
_TEXT = 1 << 12
_DIGEST_HEX = 64
_MOST_NAME = 256


@dataclass(frozen=True, slots=True)
class LaneDigest:
    """One lane of a transfer: bytes of its safetensors, and their blake3 in hex."""

    num_bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class TransferManifest:
    """A whole transfer.

    Args:
        run: Name of the run.
        timeline: In which it is given.
        source: The island that gives it.
        checkpoint: Of the source, from which it is: an inner step, or the number of a cut.
        inner_step: At which the source stood then.
        inner_optimizer: Name of the optimizer that the moments are of.
        optimizer_step: Age of the moments.
        versions: That the source held then, in plan order.
        plan: Fingerprint of the plan.
        lanes: Lane by lane, under `lane_name`.
    """

    run: str
    timeline: int
    source: str
    checkpoint: int
    inner_step: int
    inner_optimizer: str
    optimizer_step: int
    versions: tuple[int, ...]
    plan: str
    lanes: Mapping[str, LaneDigest]

    def to_json(self) -> bytes:
        """Return the JSON text that crosses the link; `source` is "donor" there."""
        said = asdict(self)
        said["donor"] = said.pop("source")
        return json.dumps(said, sort_keys=True).encode()


def lane_name(fragment_id: int, lane_id: int) -> str:
    """Name a lane of the plan."""
    return f"{fragment_id}/{lane_id}"


def most_manifest_bytes(plan: Plan) -> int:
    """Bound the bytes of a manifest by the plan."""
    num_lanes = sum(len(fragment.lanes) for fragment in plan.fragments)
    return _TEXT + _LANE_TEXT * num_lanes + 24 * len(plan.fragments)


def read_manifest(text: bytes | bytearray | memoryview, plan: Plan) -> TransferManifest:
    """Read what a peer sent as a manifest.

    Raises:
        PayloadRefused: If it is none, or of another plan, or does not name every lane of it once.
    """
    try:
        said: dict[str, Any] = json.loads(bytes(text))
        lanes = {
            str(name): LaneDigest(_number(lane["num_bytes"]), _text(lane["blake3"], _DIGEST_HEX))
            for name, lane in dict(said["lanes"]).items()
        }
        manifest = TransferManifest(
            run=_text(said["run"]),
            timeline=_number(said["timeline"]),
            source=_text(said["donor"]),
            checkpoint=_number(said["checkpoint"]),
            inner_step=_number(said["inner_step"]),
            inner_optimizer=_text(said["inner_optimizer"]),
            optimizer_step=_number(said["optimizer_step"]),
            versions=tuple(_number(version) for version in list(said["versions"])),
            plan=_text(said["plan"]),
            lanes=lanes,
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = bounded_text(f"{type(error).__name__}: {error}", 100)
        raise PayloadRefused(Cause.FRAME, f"no manifest of a transfer: {why}") from error
    if manifest.plan != plan.fingerprint():
        shown = bounded_text(manifest.plan, 16)
        raise PayloadRefused(
            Cause.PLAN, f"plan: {plan.fingerprint()[:16]} here, {shown} there: of another model"
        )
    if len(manifest.versions) != len(plan.fragments):
        raise PayloadRefused(
            Cause.PLAN,
            f"{len(manifest.versions)} versions; the plan has {len(plan.fragments)} fragments",
        )
    _check_lanes(manifest.lanes, plan.fragments)
    return manifest


def _check_lanes(lanes: Mapping[str, LaneDigest], fragments: Sequence[Fragment]) -> None:
    numels = {lane_name(f.fragment_id, n.lane_id): n.numel for f in fragments for n in f.lanes}
    if lanes.keys() != numels.keys():
        raise PayloadRefused(
            Cause.LANE, f"{len(lanes)} lanes are listed, the plan has these {len(numels)}"
        )
    for name, lane in lanes.items():
        least = _VALUES_BYTES * numels[name]
        if not least <= lane.num_bytes <= least + MOST_LANE_HEADER:
            raise PayloadRefused(
                Cause.SIZE, f"lane {name} of {lane.num_bytes} bytes; the plan asks about {least}"
            )


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _text(value: Any, length: int = 0) -> str:
    if not isinstance(value, str) or not len(value) <= _MOST_NAME or length not in (0, len(value)):
        raise ValueError(f"{str(value)[:40]!r} is no such text")
    return value
