"""Owns how an island's ranks share the model: tensor parallelism first, data parallelism around it.

Rewires a model built on the meta device, materialises it on this rank's device and ties it again.
Knows the model, no data and no outer loop; `gradients` handles what comes out of its backward.

    fsdp (dp_shard x cp)     FSDP2: parameters, gradients and optimizer state in shards
    dp_replicate x fsdp      the same, and gradients are averaged over the copies (HSDP)
    dp_replicate alone       whole parameters on every rank, gradients averaged

    cp                       positions in parts, attention reaches those of other ranks (`context`)
    ep                       experts dealt to the ranks of fsdp, and rows sent to them
                             (`expert_parallel`); FSDP2 over the other fsdp / ep ranks

Source: ZeRO (arXiv 1910.02054), FSDP (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from diloco.config.compute import FLOAT8, PLAIN, Compute, compute_problems
from diloco.config.mesh import (
    MeshConfig,
    heads_problem,
    positions_problem,
    transformers_problems,
)
from diloco.errors import ConfigError
from diloco.trainer.models.activation_checkpointing import Recompute, recompute_of
from diloco.trainer.models.experts import Experts, forget_load_
from diloco.trainer.models.families import Model
from diloco.trainer.models.float8 import multiply_in_float8
from diloco.trainer.models.model import Block, Llama
from diloco.trainer.models.transformers_model import TransformersModel
from diloco.trainer.models.transformers_parallel import apply_transformers_tp
from diloco.trainer.parallel.context import ContextAttention
from diloco.trainer.parallel.expert_parallel import spread_experts
from diloco.trainer.parallel.mesh import IslandMesh
from diloco.trainer.parallel.pipeline import Pipeline, parts_of
from diloco.trainer.parallel.tensor_parallel import (
    apply_tensor_parallel,
    await_embedding,
    pipeline_collectives,
)

#: Blocks of fewer elements are gathered together with the root: one collective for all of them
#: instead of two a block. A block of 2^22 float32 values, 16 MiB, fills a fast link by itself.
MIN_UNIT_NUMEL = 1 << 22

#: What FSDP2 gathers is cast on the way; shards and what is added between ranks are float32. Inputs
#: are not cast: the residual stream has the type of the embedding, and angles of RoPE stay float32.
_UNCAST = MixedPrecisionPolicy()
_BFLOAT16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)


def parallelize(
    model: Model, mesh: IslandMesh, *, sequence_length: int, compute: Compute = PLAIN
) -> None:
    """Spread a model built on the meta device over the mesh and give it memory, in place.

    Values are undefined afterwards; `initialise_` or a checkpoint provides them.

    Args:
        model: From `build_model`, or a stage of the built-in decoder.
        mesh: From `make_mesh`.
        sequence_length: Positions of a training sequence.
        compute: What of a block is computed again, compiled and in which precision.

    Raises:
        ConfigError: If `compute` does not go with mesh or model, `tp` or `cp` do not divide heads,
            widths, vocabulary or sequence length, the device has no way to attend over `cp`, or
            `ep` does not divide the experts.
    """
    assert not compute.is_cast or mesh.submesh("dp_replicate", "fsdp") is not None, (
        "parameters are cast where they are gathered: make_mesh(..., is_cast=True)"
    )
    for name, value, problem in compute_problems(
        compute,
        mesh.config,
        num_experts=model.shape.experts.num_experts,
        is_transformers=isinstance(model, TransformersModel),
    ):
        raise ConfigError(f"{name} = {value!r} {problem}")
    if compute.precision in FLOAT8:  # before layers are split: they are replaced, hooks and all
        multiply_in_float8(model.blocks, compute.precision, mesh.device, tp=mesh.config.tp)
    tp_mesh, keeps_logits_split = mesh.submesh("tp"), mesh.config.loss_parallel
    if isinstance(model, TransformersModel):
        _check_axes(mesh.config)
        if tp_mesh is not None:
            apply_transformers_tp(model, tp_mesh, keeps_logits_split=keeps_logits_split)
    else:
        _apply_context_parallel(model, mesh, sequence_length=sequence_length)
        if tp_mesh is not None:
            apply_tensor_parallel(
                model,
                tp_mesh,
                sequence_length=sequence_length // mesh.config.cp,
                keeps_logits_split=keeps_logits_split,
            )
            if compute.compile_backend:
                await_embedding(model)
            if mesh.config.async_tp:
                pipeline_collectives(tp_mesh)
    model.tie_()  # now: what is sharded twice apart is no longer one parameter
    if (ep_mesh := mesh.expert_submesh("ep")) is not None:
        for experts in _experts(model):
            spread_experts(experts, ep_mesh)
    _apply_compute(model, compute, mesh)
    _apply_data_parallel(model, mesh, _BFLOAT16 if compute.is_cast else _UNCAST)
    model.to_empty(device=mesh.device)
    model.tie_()
    model.assert_tied()


def _check_axes(config: MeshConfig) -> None:
    for axis, value, problem in transformers_problems(config):
        raise ConfigError(f"{axis} = {value} {problem}")


def _apply_context_parallel(model: Llama, mesh: IslandMesh, *, sequence_length: int) -> None:
    """Let attention reach the positions of the other ranks along `cp`."""
    config, shape = mesh.config, model.shape
    if mesh.cp_group is None:
        return
    is_latent = shape.latent_attention.kv_rank > 0
    num_kv_heads = shape.num_heads if is_latent else shape.num_kv_heads
    problem = positions_problem(config, sequence_length) or heads_problem(
        config, num_kv_heads, is_latent=is_latent
    )
    if mesh.device.type != "cpu" and config.context != "ulysses":
        problem = f'uses a kernel of CPUs, and this is {mesh.device.type}: set "ulysses"'
    if problem:
        raise ConfigError(f'mesh cp = {config.cp}, context = "{config.context}": {problem}')
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.attend = ContextAttention(config.context, mesh.cp_group)


def _apply_compute(model: Model, compute: Compute, mesh: IslandMesh) -> None:
    """Let blocks compute again what they do not keep, and compile them.

    Each block is compiled by itself with its activation checkpointing, so that the compiler plans
    both. Blocks are alike and share one compiled graph; names of parameters do not change.
    """
    if compute.is_cast and isinstance(model, Llama):
        model.residual_dtype = torch.bfloat16
    for block in model.blocks:
        if compute.activation_checkpointing != "none":
            recompute = recompute_of(
                block,
                compute.activation_checkpointing,
                keeps_attention=bool(compute.compile_backend) and mesh.config.tp > 1,
            )
            if isinstance(block, Block):
                block.recompute = recompute
            else:
                block.forward = _recomputed(block.forward, recompute)
        if compute.compile_backend:
            block.compile(backend=compute.compile_backend, fullgraph=True)


def compile_ahead(
    model: Model | Pipeline, mesh: IslandMesh, *, batch_size: int, sequence_length: int
) -> None:
    """Make a forward and a backward of zeros, which compile what is compiled; collective.

    For a minute in which nobody waits for this island: its first inner step is one of the run, and
    deadlines of rounds run from the first contribution of a faster island. Parameters stay as
    they are, and have no gradients; no expert has a load of it.

    Args:
        model: From `parallelize`, with values; of a pipeline, before it runs.
        mesh: The ranks that it was parallelised over.
        batch_size: Sequences of this rank's micro-batch.
        sequence_length: Tokens of each.
    """
    num_positions = sequence_length // mesh.config.cp
    positions_S = torch.arange(num_positions, device=mesh.device)
    for part in parts_of(model):
        if isinstance(part, Llama) and part.embed is None:
            length, dtype = num_positions // mesh.config.tp, part.residual_dtype
            x = torch.zeros(batch_size, length, part.shape.dim, dtype=dtype, device=mesh.device)
            x.requires_grad_()
        else:
            x = torch.zeros(batch_size, num_positions, dtype=torch.int64, device=mesh.device)
        out = part(x, positions_S)
        torch.autograd.backward(out.float().mean())
        forget_load_(part)
    model.zero_grad(set_to_none=True)


def _recomputed(forward: Callable[..., Any], recompute: Recompute) -> Callable[..., Any]:
    """Call a block's forward so that the backward computes it again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recompute(forward, *args, **kwargs)

    return call


def _apply_data_parallel(model: Model, mesh: IslandMesh, policy: MixedPrecisionPolicy) -> None:
    """Make units of FSDP2, or of plain replication where there is nothing to shard over.

    A unit is gathered, and its gradients are reduced, in one collective. A block's own unit gives
    its gathered parameters back after its forward and gathers again for its backward; the root's,
    needed at both ends of a step, keeps them from forward to backward (reshard "auto"). A stage of
    a pipeline keeps all of them while micro-batches pass it.
    """
    data_mesh = mesh.submesh("dp_replicate", "fsdp")
    if data_mesh is None:
        return
    apart, reshard = _apply_data_parallel_to_experts(model, mesh, policy), mesh.config.reshard

    def make_unit(module: nn.Module, *, gives_back: bool) -> None:
        if mesh.size("fsdp") == 1:
            replicate(module, mesh=data_mesh, mp_policy=policy)
            return
        fully_shard(
            module,
            mesh=data_mesh,
            reshard_after_forward=gives_back,
            mp_policy=policy,
            ignored_params=apart,
        )

    for layer in _unit_blocks(model, mesh.config):
        make_unit(layer, gives_back=reshard != "never" and mesh.size("pp") == 1)
    make_unit(model, gives_back=reshard == "always")


def _apply_data_parallel_to_experts(
    model: Model, mesh: IslandMesh, policy: MixedPrecisionPolicy
) -> set[nn.Parameter]:
    """Make a unit of each layer's experts over the ranks that have the same ones.

    Returns:
        What no unit may take: experts that no other rank has, spread over all of fsdp.
    """
    if mesh.expert_mesh is None:
        return set()
    same_mesh = mesh.expert_submesh("dp_replicate", "efsdp")
    if same_mesh is None:
        return {parameter for experts in _experts(model) for parameter in experts.parameters()}
    gives_back = mesh.config.reshard != "never" and mesh.size("pp") == 1
    for experts in _experts(model):
        if mesh.expert_submesh("efsdp") is not None:
            fully_shard(experts, mesh=same_mesh, reshard_after_forward=gives_back, mp_policy=policy)
        else:
            replicate(experts, mesh=same_mesh, mp_policy=policy)
    return set()


def _experts(model: Model) -> list[Experts]:
    """Find the routed experts of all layers here."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def _unit_blocks(model: Model, config: MeshConfig) -> Iterator[nn.Module]:
    """Yield the blocks that are units of their own."""
    if config.fsdp_unit == "model":
        return
    least = 1 if config.fsdp_unit == "block" else MIN_UNIT_NUMEL
    for block in model.blocks:
        if sum(parameter.numel() for parameter in block.parameters()) >= least:
            yield block


def set_is_last_micro_batch_(model: nn.Module, mesh: IslandMesh, is_last: bool) -> None:
    """Say before a backward whether another one of the same inner step follows, in place.

    What can wait for the last one waits: gradients are averaged over copies of the model once an
    inner step, and with reshard "never" parameters are gathered once. Shards of gradients are
    reduced after every backward, for whole ones would take the memory that sharding saves.
    """
    if not isinstance(model, FSDPModule):
        return
    if mesh.size("fsdp") == 1:
        model.set_requires_gradient_sync(is_last)
    elif mesh.size("dp_replicate") > 1:
        model.set_requires_all_reduce(is_last)
    if mesh.config.reshard == "never":
        model.set_reshard_after_backward(is_last)
