"""State directories of runs that were never run: known parameters in durable records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from diloco.config.load import load_config, resolved_toml
from diloco.config.schema import Config
from diloco.outer.fragments import Fragment, Plan, TensorSpec, make_plan
from diloco.protocol.rounds.terms import Contributor, RoundKey
from diloco.state_dir import StateDir
from diloco.trainer.models.families import Shape, parameter_shapes
from diloco.trainer.models.model import Llama, LlamaShape
from diloco.versions.publication import LaneState, lane_blake3
from diloco.versions.store import FragmentStore
from diloco.versions.value_digest import lane_digest
from diloco.versions.version import VersionRecord
from tests.run_files import write_run

ISLANDS = ("east", "west")


def tiny_run(directory: Path, *, tied: bool = False, ffn_dim: int = 96) -> Path:
    """Write a run file of two islands and two fragments."""
    return write_run(directory, dict.fromkeys(ISLANDS, ""), tied=tied, ffn_dim=ffn_dim)


def random_parameters(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Draw every parameter: matrices around 0, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.1 * torch.randn(size, generator=generator) + (len(size) == 1)
        for name, size in parameter_shapes(shape).items()
    }


def model_of(shape: LlamaShape, parameters: Mapping[str, Tensor]) -> Llama:
    """Give our decoder with these parameters."""
    model = Llama(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    return model


def store_run(
    run_file: Path,
    parameters: Mapping[str, Tensor],
    versions: Sequence[int] = (3, 2),
    *,
    is_flush: bool = False,
    store: Path | None = None,
) -> StateDir:
    """Write a state directory as if its fragments had been published at `versions`.

    Version v of fragment p was sent at inner step 10 v + p. `store` puts the records elsewhere.
    """
    config = load_config(run_file)
    state = StateDir(Path(config.coordinator.state_dir))
    state.create()
    state.resolved.write_text(resolved_toml(config))
    plan = plan_of(config, parameters)
    state.plan.write_text(plan.to_json())
    for fragment, version in zip(plan.fragments, versions, strict=True):
        records = FragmentStore(store or state.store, fragment, 4)
        records.recover()
        records.commit(record_of(fragment, version, parameters, is_flush=is_flush))
    return state


def plan_of(config: Config, parameters: Mapping[str, Tensor]) -> Plan:
    specs = [TensorSpec(name, tuple(value.shape)) for name, value in parameters.items()]
    return make_plan(specs, num_fragments=config.outer.num_fragments)


def record_of(
    fragment: Fragment, version: int, parameters: Mapping[str, Tensor], *, is_flush: bool = False
) -> VersionRecord:
    """Publish `parameters`; theta and momentum hold other values, which nobody may take."""
    vector = torch.zeros(fragment.padded_numel)
    for entry in fragment.entries:
        flat = parameters[entry.name].reshape(-1)[entry.start : entry.end]
        vector[entry.offset : entry.offset + flat.numel()] = flat
    lanes = [vector[lane.start : lane.end].clone() for lane in fragment.lanes]
    sent_at = 10 * version + fragment.fragment_id
    digests = tuple(lane_digest(lane) for lane in lanes)
    contributors = tuple(Contributor(name, 1, 128, 1, sent_at, digests) for name in ISLANDS)
    return VersionRecord(
        version=version,
        fragment_id=fragment.fragment_id,
        timeline=0,
        key=RoundKey(0, fragment.fragment_id, version - 1, 0) if version else None,
        is_flush=is_flush,
        payload_codec="int4",
        lane_digests=digests,
        lane_blake3=tuple(map(lane_blake3, lanes)),
        lanes=tuple(LaneState(lane + 1, lane, lane + 2) for lane in lanes),
        payloads=tuple(b"payload" for _ in lanes) if version else (),
        contributors=contributors if version else (),
        contributions={name: [b"sent" for _ in lanes] for name in ISLANDS} if version else {},
    )
