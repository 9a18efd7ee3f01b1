"""Forecasts memory and work of one rank of an island, from the configuration alone.

A rank of an island with mesh pp x dp_replicate x (f = dp_shard cp) x (t = tp) has n values of the
parameters of its stages: matrices in t parts, all in f. T: tokens of a micro-batch here, e: bytes
of an activation (4, or 2 in bfloat16), D: width, A and K: width of all query and key/value heads, F
of a feed-forward layer, V: vocabulary.

    parameters   4 n
    gradients    4 n
    optimizer    8 n, of Muon's matrices 4 n
    gathered     where FSDP2 gathers: e for every value of the largest rest and 2 blocks, and as
                 much for their gradients, unless copies are whole; all of the stage where nothing
                 is given back
    a block      none       T e (2 D + 2 D / t + (2 A + 2 K + 4 F) / t)
                 selective  T e (2 D + D / t + (2 A + 2 K + 2 F) / t)
                 full       T e D / t
    experts      K' (2 D + 4 F') + 4 F'' for 4 F: K' of a token of width F', F'' all shared ones
    latent       N (2 Q + 2 V') and twice its narrow vectors for 2 A + 2 K
    loss         T V (2 e + 8) with its gradient; of V / t columns with loss_parallel
    passing      what a block computes again, T e (D + 3 F / t) that its backward makes, T V e
    activations  blocks, 2 D of the last norm, and the larger of loss and passing
    peak         parameters + optimizer + gathered + the larger of
                 activations (+ gradients, if an earlier micro-batch left them), and
                 gradients + one whole block + passing

A model of transformers keeps what its own code keeps, with `tp` whole positions between matrices:
its activations are told as if it was the built-in decoder of these sizes.

Of a pipeline activations are those of the micro-batches under way: pp of "1f1b", all of others, an
upper bound. Without allocator's gaps, buffers of collectives, code and CUDA's context.

On the host, for the outer loop, of each of the island's values, dealt to the ranks that carry
lanes (`carrier_hosts`):

    4            anchor
    4            local values, while published ones are evaluated in their place
    8            with error feedback
    8 + wire     of fragments under way: pseudo-gradient, staged version, both payloads; 4 more
                 where local_mix is since_send: what the payload carries
    4            of the lanes that one rank carries of the largest fragment, not dealt, where
                 local_mix is since_send: what a merge adds

and for a checkpoint that is written behind the training, while it is:

    4 + moments  copy of parameters and optimizer

On the device for the outer loop, as far as it has room (`LaneShards.find_room`): what is said above
of hosts, and 4 PASSING bytes of each value that a rank carries of the largest fragment, in which
lanes are computed; else that alone; else the larger of the two (`diloco bench memory` counts it):

    piece        of a parameter that is sent or merged, in one all-to-all at most, twice where
                 local_mix is not 0; while it is on its way
    ahead        this rank's share of the largest fragment, and a piece where local_mix is above 0;
                 from when it is staged to its merge, with overlap_steps of 2 or more; scheduled,
                 not where local_mix is since_send

Operations: `diloco.trainer.flops`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.checkpoint.host_memory import check_memory
from diloco.config.inner import InnerOptimizerConfig
from diloco.config.island import IslandConfig
from diloco.config.outer import OuterConfig
from diloco.config.pipeline import stage_layers
from diloco.config.schema import Config
from diloco.forecast.disk import payload_bytes
from diloco.island.lanes.routes import PASSING, SLAB_BYTES
from diloco.outer.packing import layer_of
from diloco.trainer.flops import flops_per_token
from diloco.trainer.models.families import Shape, parameter_shapes, shape_of
from diloco.trainer.models.model import LlamaShape
from diloco.trainer.optimizers.optimizer import is_orthogonalised
from diloco.trainer.parallel.parallelize import MIN_UNIT_NUMEL
from diloco.trainer.parallel.pipeline import stage_ranks
from diloco.transport.units import format_bytes

#: Not a layer: what FSDP2 gathers with the whole model.
_ROOT = -1

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RankForecast:
    """Bytes of the rank of an island that takes most, and operations of each.

    `carriers` are the ranks that hold what the outer loop keeps on hosts, and move payloads; of
    `carrier_hosts` hosts. `computed_device_bytes` is what computing lanes on the device takes, and
    `outer_device_bytes` what the outer loop takes there where there is no room for that. Of
    replicas (dp_replicate) the first alone copies for a checkpoint.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    activation_bytes: int
    peak_bytes: int
    outer_host_bytes: int
    carriers: int
    carrier_hosts: int
    outer_device_bytes: int
    computed_device_bytes: int
    checkpoint_copy_bytes: int
    flops_per_inner_step: float


def forecast_rank(
    config: Config,
    island: IslandConfig,
    largest_fragment: int,
    *,
    per_host: int = 0,
    num_lanes: int = 0,
) -> RankForecast:
    """Compute what a rank takes.

    Args:
        config: The run's; its model is no loop's own.
        island: Of the run.
        largest_fragment: Values of the largest fragment.
        per_host: Ranks of a host; 0: as usual.
        num_lanes: Of all fragments; 0: as many as there are ranks, or more.
    """
    shape = shape_of(config.model)
    mesh, length = island.mesh, config.data.sequence_length
    tokens = island.tokens_per_inner_step // (mesh.dp_size * island.micro_batches * mesh.cp)
    shapes = parameter_shapes(shape)
    ranks = [
        memory_of(
            shape, own, island, tokens=tokens, optimizer=config.inner.optimizer, z_loss=z_loss
        )
        for own in _by_pp_rank(shape, shapes, island)
        for z_loss in (config.inner.z_loss > 0,)
    ]
    most = max(ranks, key=lambda rank: rank["peak_bytes"])
    num_values = sum(map(math.prod, shapes.values()))
    per_host = per_host or island.usual_per_host
    hosts = island.ranks // per_host
    carriers = island.carrier_hosts * per_host
    carriers = min(carriers or island.ranks, island.ranks, num_lanes or island.ranks)
    # Whole lanes are dealt.
    share = math.ceil(num_lanes / carriers) / num_lanes if num_lanes else 1 / carriers
    carried = _most_carried(config.outer, carriers, largest_fragment)
    added_bytes = 4 * carried if config.outer.local_mix == "since_send" else 0
    return RankForecast(
        **most,
        outer_host_bytes=round(_outer_host_bytes(config, num_values, largest_fragment) * share)
        + added_bytes,
        carriers=carriers,
        carrier_hosts=min(carriers, island.carrier_hosts or hosts, hosts),
        outer_device_bytes=_outer_device_bytes(config, island, shapes, largest_fragment),
        computed_device_bytes=4 * PASSING * carried,
        checkpoint_copy_bytes=_checkpoint_copy_bytes(config, shapes)
        * island.mesh.dp_replicate
        // island.ranks,
        flops_per_inner_step=flops_per_token(shape, length)
        * island.tokens_per_inner_step
        / island.ranks,
    )


def memory_of(
    shape: Shape,
    shapes: Shapes,
    island: IslandConfig,
    *,
    tokens: int,
    optimizer: InnerOptimizerConfig,
    z_loss: bool = False,
) -> dict[str, int]:
    """Compute the bytes on the device of a rank; see the module's formulas.

    Args:
        shape: Of the whole model.
        shapes: Unsharded shapes of the parameters of this rank's stages, by name.
        island: Mesh, micro-batches and ways of computing.
        tokens: Of a micro-batch on this rank.
        optimizer: AdamW or Muon.
        z_loss: Whether the loss has a penalty.
    """
    mesh, value_bytes = island.mesh, 2 if island.compute.is_cast else 4
    shards = mesh.dp_shard * mesh.cp
    local = {name: _local_numel(name, s, mesh.tp, shards) for name, s in shapes.items()}
    kept = sum(
        number * (4 if _has_one_moment(optimizer, name, shapes[name]) else 8)
        for name, number in local.items()
    )
    parameters = gradients = 4 * sum(local.values())
    layers = sorted({layer for layer in map(layer_of, shapes) if layer is not None})
    blocks = [_block_bytes(shape, i, tokens, mesh.tp, value_bytes) for i in layers]
    kept_of = [getattr(block, island.activation_checkpointing) for block in blocks]
    if island.activation_checkpointing == "full" and island.compile and mesh.tp > 1:
        heads = tokens * shape.num_heads * (shape.head_dim * value_bytes + 4) // mesh.tp
        kept_of = [kept + heads for kept in kept_of]  # of attention: see `recompute_of`
    stored, loss, logits = sum(kept_of), 0, 0
    if shape.num_layers - 1 in layers:  # the last stage
        columns = shape.vocab_size // (mesh.tp if mesh.loss_parallel else 1)
        logits = tokens * columns * value_bytes
        loss = 2 * logits + tokens * columns * (16 if z_loss else 8)
        stored += tokens * shape.dim * value_bytes * (1 + mesh.tp) // mesh.tp
    stored *= _under_way(island)
    # A block's backward: what it computes again, and what it makes; the loop still holds logits.
    passing = logits + max(
        block.none - own + block.backward for block, own in zip(blocks, kept_of, strict=True)
    )
    gathered = _gathered_bytes(shapes, island, value_bytes)
    earlier = gradients if island.micro_batches > 1 else 0
    activations = stored + max(loss, passing)
    last = logits + max(block.none + block.backward for block in blocks)
    return {
        "parameter_bytes": parameters,
        "gradient_bytes": gradients,
        "optimizer_bytes": kept,
        "gathered_bytes": gathered,
        "activation_bytes": activations,
        "peak_bytes": parameters + kept + gathered + max(earlier + activations, gradients + last),
    }


@dataclass(frozen=True, slots=True)
class _BlockBytes:
    """Bytes that a block keeps for its backward in each mode, and that the backward adds."""

    none: int
    selective: int
    full: int
    backward: int


def _block_bytes(shape: Shape, layer: int, tokens: int, tp: int, value_bytes: int) -> _BlockBytes:
    """Compute them for the tokens of a micro-batch."""
    dim, latent, experts = shape.dim, shape.latent_attention, shape.experts
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    if latent.kv_rank:
        head = latent.nope_dim + latent.rope_dim + latent.value_dim
        heads = 2 * shape.num_heads * head + 2 * (latent.kv_rank + latent.q_rank)
    inner, rows = shape.ffn_dim, 0
    if shape.has_experts(layer):
        inner = (experts.experts_per_token + experts.num_shared) * experts.expert_dim
        rows = experts.experts_per_token * dim
    scale = tokens * value_bytes
    return _BlockBytes(
        none=scale * (2 * dim + 2 * dim // tp + (heads + 4 * inner) // tp + 2 * rows),
        selective=scale * (2 * dim + dim // tp + (heads + 2 * inner) // tp + rows),
        full=scale * dim // tp,
        backward=scale * (dim + 3 * inner // tp + rows),
    )


def _by_pp_rank(shape: Shape, shapes: Shapes, island: IslandConfig) -> list[Shapes]:
    """Deal the parameters to the ranks along pp, as their stages have them."""
    mesh = island.mesh
    if mesh.pp == 1:
        return [shapes]
    assert isinstance(shape, LlamaShape), "others have no pipelines"
    ranks = stage_ranks(mesh.schedule, mesh.pp, mesh.stages_per_rank)
    of_layer = [
        ranks[stage]
        for stage, layers in enumerate(stage_layers(shape.num_layers, len(ranks)))
        for _ in layers
    ]
    dealt: list[dict[str, tuple[int, ...]]] = [{} for _ in range(mesh.pp)]
    for name, each in shapes.items():
        top, *rest = name.split(".")
        if top == "layers":
            dealt[of_layer[int(rest[0])]][name] = each
        else:
            dealt[ranks[0 if top == "embed" else -1]][name] = each
            if top == "embed" and shape.tie_embeddings:
                dealt[ranks[-1]]["head.weight"] = each
    return list(dealt)


def _local_numel(name: str, shape: tuple[int, ...], tp: int, shards: int) -> int:
    """Count the values of a parameter on a rank: rows are dealt in whole ones."""
    rest = math.prod(shape[1:])
    if len(shape) == 1:
        return -(-shape[0] // shards)
    return -(-shape[0] // (tp * shards)) * rest


def _has_one_moment(optimizer: InnerOptimizerConfig, name: str, shape: tuple[int, ...]) -> bool:
    return optimizer.name != "adamw" and is_orthogonalised(optimizer, name, len(shape))


def _under_way(island: IslandConfig) -> int:
    """Bound how many micro-batches a rank of a pipeline has begun and not ended."""
    mesh = island.mesh
    if mesh.pp == 1:
        return 1
    return min(mesh.pp, island.micro_batches) if mesh.schedule == "1f1b" else island.micro_batches


def _gathered_bytes(shapes: Shapes, island: IslandConfig, value_bytes: int) -> int:
    """Bound what FSDP2 has gathered at once, parameters and gradients."""
    mesh = island.mesh
    if mesh.dp_size * mesh.cp == 1:
        return 0
    sizes: dict[int, int] = {}
    for name, shape in shapes.items():
        layer = layer_of(name)
        unit = _ROOT if layer is None else layer
        # Experts, which are stacked, are never gathered over the ranks that they are dealt to.
        split = {1: 1, 2: mesh.tp}.get(len(shape), mesh.ep)
        numel = math.prod(shape) // split
        sizes[unit] = sizes.get(unit, 0) + numel
    least = {"model": math.inf, "block": 1, "auto": MIN_UNIT_NUMEL}[mesh.fsdp_unit]
    units = sorted((n for unit, n in sizes.items() if unit != _ROOT and n >= least), reverse=True)
    rest = sum(sizes.values()) - sum(units)
    if mesh.reshard != "never" and mesh.pp == 1:
        units = units[:2]
    copies = 1 if mesh.dp_shard * mesh.cp == 1 else 2  # whole gradients are counted already
    return copies * value_bytes * (rest + sum(units))


def check_host_memory(config: Config, *, num_local_ranks: int, is_on_cpu: bool) -> None:
    """Refuse checkpoints behind the training where their copy does not fit, before ranks meet.

    Besides the copy, the lanes of the fragment that is being written are counted, what the outer
    loop keeps, the local values during an evaluation among it, and parameters and optimizer of
    ranks that compute on the CPU.

    Args:
        config: With an island selected.
        num_local_ranks: Of the island, on this host.
        is_on_cpu: Whether they compute on the CPU.

    Raises:
        ConfigError: With what they take, and what there is.
    """
    rank = forecast_rank(config, config.island, 0)
    if rank.checkpoint_copy_bytes == 0:
        return
    own = rank.checkpoint_copy_bytes + rank.outer_host_bytes
    own += rank.parameter_bytes // config.outer.num_fragments
    if is_on_cpu:
        own += rank.parameter_bytes + rank.optimizer_bytes
    copies = format_bytes(num_local_ranks * rank.checkpoint_copy_bytes)
    check_memory(
        "checkpoint.asynchronous = true",
        f"{num_local_ranks} ranks of island {config.island_id} and {copies} of copies for "
        f"checkpoints behind their training",
        num_local_ranks * own,
        "spread the island over more hosts, or set it to false: training then waits for the disk, "
        "and no copy is made",
    )


def _checkpoint_copy_bytes(config: Config, shapes: Shapes) -> int:
    """Bytes of an island's copy for a checkpoint behind the training; 0: none is made."""
    checkpoint = config.checkpoint
    if not checkpoint.asynchronous or not (checkpoint.every_inner_steps or checkpoint.every_tokens):
        return 0
    optimizer = config.inner.optimizer
    return sum(
        math.prod(shape) * (4 + (4 if _has_one_moment(optimizer, name, shape) else 8))
        for name, shape in shapes.items()
    )


def _outer_device_bytes(
    config: Config, island: IslandConfig, shapes: Shapes, largest_fragment: int
) -> int:
    """Bound what the outer loop has on a rank's device at once."""
    mesh = island.mesh
    shards = mesh.dp_shard * mesh.cp
    largest = max(_local_numel(name, shape, mesh.tp, shards) for name, shape in shapes.items())
    piece = min(4 * min(largest, largest_fragment), SLAB_BYTES // island.ranks)
    outer = config.outer
    mixed = piece if outer.local_mix != 0 else 0
    is_staged = outer.overlap_steps > 1 and not outer.is_on_arrival
    is_ahead = is_staged and outer.local_mix != "since_send"
    ahead = 4 * largest_fragment // (mesh.tp * shards) if is_ahead else 0
    return max(piece, ahead) + mixed


def _outer_host_bytes(config: Config, num_values: int, largest_fragment: int) -> int:
    outer = config.outer
    lasting = 8 + 8 * outer.error_feedback
    period = outer.first_inner_steps_per_round or outer.inner_steps_per_round
    under_way = 1 + outer.overlap_steps * outer.num_fragments // period
    wire = payload_bytes(outer.uplink_codec) + payload_bytes(outer.downlink_codec)
    carried = 4 * (outer.local_mix == "since_send")
    moving = min(num_values, under_way * largest_fragment) * (8 + carried + wire)
    return round(num_values * lasting + moving)


def _most_carried(outer: OuterConfig, num_carriers: int, largest_fragment: int) -> int:
    """Count the values of the largest fragment that one rank carries: those of whole lanes."""
    return largest_fragment * math.ceil(outer.num_lanes / num_carriers) // outer.num_lanes
