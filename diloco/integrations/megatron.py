"""`MegatronDiLoCo`: the outer loop for a training loop over Megatron-Core.

    outer = MegatronDiLoCo([model], optimizer, config.outer, transport=connection)
    while not outer.is_over:
        ...  # forward and backward, finalize_model_grads
        optimizer.step()
        outer.log(loss=loss)
        outer.step(num_tokens=tokens_of_the_island)
        scheduler.step(...)
    outer.finish()

It is a `diloco.DiLoCo`; what it adds is where the values are. Megatron itself says which part of
which parameter a rank holds (`sharded_state_dict`: tensor and pipeline parallelism, gated layers in
two halves); float32 values are the parameters, or, of a model in 16 bits, the optimizer's masters:
whole, or this rank's range of the distributed optimizer. After a merge the 16 bits are made again.

See `ShardedTensor`, `DistributedOptimizer` and `Float16OptimizerWithFloat16Params` of megatron-core
0.16.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from diloco.config.outer import OuterConfig
from diloco.errors import ConfigError
from diloco.extras import missing
from diloco.integrations.other_trainers import common_bound, repair_state_
from diloco.island.connection import Connection
from diloco.island.lanes.boxes import declare_part
from diloco.island.session import DiLoCo
from diloco.protocol.island.soundness import Mend, StepBound
from diloco.telemetry.events import Event

try:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        ChainedOptimizer,
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
        MegatronOptimizer,
    )
except ModuleNotFoundError as absent:
    raise missing("diloco.integrations.megatron", str(absent.name)) from absent


class MegatronDiLoCo(DiLoCo):
    """One rank's part in a run whose model and optimizer are Megatron-Core's."""

    def __init__(
        self,
        chunks: Sequence[Any],  # Megatron's modules: what they add has no types
        optimizer: MegatronOptimizer,
        outer: OuterConfig,
        *,
        transport: Connection,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Join the run; collective, and waits for the others, as `DiLoCo` does.

        Args:
            chunks: Of the model on this rank, in Megatron's `DistributedDataParallel` or not.
            optimizer: Made of them by `get_megatron_optimizer`.
            outer: `outer` of the configuration that went to `diloco.connect`.
            transport: The open connection; one `MegatronDiLoCo` each.
            on_event: Called with every event at once, in any thread.

        Raises:
            ConfigError: Naming what of the model or the optimizer is not supported.
            DilocoError: As the join may fail.
        """
        self._chunks = list(chunks)
        self._parts = _parts_of(optimizer)
        _check_fit(self._chunks, self._parts)
        self._inner = [part.optimizer for part in self._parts]
        super().__init__(
            trained_parameters(self._chunks, self._parts),
            outer,
            transport=transport,
            on_event=on_event,
        )
        self._to_model()

    def step(self, *, num_tokens: int = 0, bound: StepBound | None = None) -> list[Event]:
        """Account for one inner step, then send and merge what is due; see `DiLoCo.step`.

        Call it after `optimizer.step`, before the learning rate changes: the bound of the step is
        that of Adam and AdamW; other optimizers have none.
        """
        before = self.versions
        events = super().step(num_tokens=num_tokens, bound=bound or common_bound(self._inner))
        repair_state_(self._inner, self.mend)
        if self.versions != before or self.mend is not Mend.NOTHING:
            self._to_model()
        return events

    def finish(self) -> list[Event]:
        """Merge what is outstanding; the model then has the published values."""
        events = super().finish()
        self._to_model()
        return events

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Put the published values in place, in the model too; restore afterwards."""
        with super().global_parameters():
            self._to_model()
            yield
        self._to_model()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken; load the model and the optimizer before."""
        super().load_state_dict(state)
        self._to_model()

    def _to_model(self) -> None:
        """Make the 16 bits of the masters, and gather what other ranks have; collective."""
        for part in self._parts:
            if not isinstance(part, FP32Optimizer):
                part._copy_main_params_to_model_params()
        if any(isinstance(part, DistributedOptimizer) for part in self._parts):
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)


def trained_parameters(
    chunks: Sequence[Any], parts: Sequence[MegatronOptimizer]
) -> dict[str, Tensor]:
    """Return what this rank trains, in float32, each declared as the part that it is of a whole.

    Names are those of Megatron's own checkpoints, with the number of the layer in the whole model.
    A range of the distributed optimizer is a part of the flattened tensor of its tensor parallel
    rank, whose name then ends in `@RANKofRANKS`, so that an island with other ranks is refused.

    Raises:
        ConfigError: Naming a parameter that Megatron does not describe.
    """
    masters = _masters_of(parts)
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        model = _unwrapped(chunk)
        unknown = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        for entry in model.sharded_state_dict().values():
            parameter = getattr(entry, "data", None)
            if unknown.pop(id(parameter), None) is None:
                continue
            assert parameter is not None
            if isinstance(master := masters.get(parameter), _Range):
                found |= _flat_part(entry, parameter, master)
            elif master is not None or parameter.dtype == torch.float32:
                found |= _box_parts(entry, parameter if master is None else master)
            # else the distributed optimizer has its range on other ranks
        if unknown:
            raise ConfigError(
                f"Megatron's sharded_state_dict does not describe {sorted(unknown.values())}: "
                f"where in the whole model they are is not known: train them by an optimizer of "
                f"their own, or freeze them"
            )
    return found


@dataclass(frozen=True, slots=True)
class _Range:
    """Master values of a range of a flattened parameter, which begins at `start`."""

    values: Tensor
    start: int


def _masters_of(parts: Sequence[MegatronOptimizer]) -> dict[Tensor, Tensor | _Range]:
    """Return the float32 masters of parameters in 16 bits, as far as this rank has them."""
    found: dict[Tensor, Tensor | _Range] = {}
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            groups = part.model_float16_groups, part.shard_fp32_from_float16_groups
            for parameter, master in _pairs(*groups):
                start = part._get_model_param_range_map(parameter)["param"].start
                found[parameter] = _Range(master, start)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            found |= _pairs(part.float16_groups, part.fp32_from_float16_groups)
    return found


def _pairs(
    groups: Sequence[Sequence[Tensor]], of_masters: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters of groups with their masters."""
    for parameters, masters in zip(groups, of_masters, strict=True):
        yield from zip(parameters, masters, strict=True)


def _box_parts(
    entry: ShardedTensor | ShardedTensorFactory, values: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and float32 tensors of what an entry of Megatron's checkpoint says of values."""
    if isinstance(entry, ShardedTensor):
        yield _declared(entry, values, "")
        return
    halves = replace(entry, data=values).build()  # a gated layer has its two matrices in one
    for number, half in enumerate(halves):
        axis = half.prepend_axis_num
        whole, offset = list(half.global_shape), list(half.global_offset)
        whole[axis] //= len(halves)
        offset[axis] -= number * whole[axis]
        placed = replace(half, global_shape=tuple(whole), global_offset=tuple(offset))
        yield _declared(placed, half.data, f"[{number}]")


def _declared(entry: ShardedTensor, values: Tensor, suffix: str) -> tuple[str, Tensor]:
    """Return the name of a tensor in the whole model, and an alias declared as its part."""
    axes = entry.prepend_axis_num
    alias = values.detach().requires_grad_()  # one memory, of which an optimizer knows nothing
    declare_part(alias, entry.global_shape[axes:], entry.global_offset[axes:])
    return _name_of(entry) + suffix, alias


def _flat_part(
    entry: ShardedTensor | ShardedTensorFactory, parameter: Tensor, master: _Range
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of a rank's flattened tensor, and the range that this rank has of it."""
    first = entry if isinstance(entry, ShardedTensor) else entry.build()[0]
    name, numel = _name_of(first), parameter.numel()
    if numel < math.prod(first.global_shape[first.prepend_axis_num :]):
        rank = parallel_state.get_tensor_model_parallel_rank()
        name += f"@{rank}of{parallel_state.get_tensor_model_parallel_world_size()}"
    alias = master.values.detach().view(-1).requires_grad_()
    yield name, declare_part(alias, (numel,), (master.start,))


def _name_of(entry: ShardedTensor) -> str:
    """Return the name of a tensor; of a layer's with the layer's number in the whole model."""
    if not entry.prepend_axis_num:
        return str(entry.key)
    return str(entry.key).replace("layers.", f"layers.{entry.global_offset[0]}.", 1)


def _parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that one of Megatron is a chain of, or itself."""
    if isinstance(optimizer, ChainedOptimizer):
        return [each for part in optimizer.chained_optimizers for each in _parts_of(part)]
    return [optimizer]


def _unwrapped(chunk: Any) -> Any:
    """Return the model inside Megatron's wrappers."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def _check_fit(chunks: Sequence[Any], parts: Sequence[MegatronOptimizer]) -> None:
    """Refuse what would train something else than the run.

    Raises:
        ConfigError: Naming every problem, and what to set.
    """
    problems = []
    for part in parts:
        if not isinstance(
            part, FP32Optimizer | Float16OptimizerWithFloat16Params | DistributedOptimizer
        ):
            problems.append(f"{type(part).__name__}: where its float32 values are is not known")
        elif part.config.use_precision_aware_optimizer:
            problems.append("use_precision_aware_optimizer: its masters are not float32: leave out")
    for chunk in chunks:
        config = _unwrapped(chunk).config
        for name in ("num_moe_experts", "fp8", "fp4", "multi_latent_attention"):
            if getattr(config, name, None):
                problems.append(f"{name} = {getattr(config, name)}: not tried with islands yet")
        ddp = getattr(chunk, "ddp_config", None)
        if ddp is not None and ddp.overlap_param_gather:
            problems.append("overlap_param_gather = True: merges would be overtaken: set it False")
    if problems:
        raise ConfigError("Megatron-Core: " + "; ".join(dict.fromkeys(problems)))
