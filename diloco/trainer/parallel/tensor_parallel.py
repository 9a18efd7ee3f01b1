"""Owns how matrices and positions of the decoder are split over the ranks along `tp`.

Matrices are split by columns into attention and feed-forward and by rows out of them; between them
the residual stream holds S / tp positions a rank (sequence parallelism). Attention and feed-forward
gather the positions first, so RoPE sees every one of them.

Source: Megatron-LM (arXiv 1909.08053), sequence parallelism (arXiv 2205.05198).
"""

from __future__ import annotations

import warnings

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from diloco.config.model import without_tp_plan
from diloco.errors import ConfigError
from diloco.trainer.models.attention import Attention
from diloco.trainer.models.model import Block, Llama
from diloco.trainer.models.transformers_parallel import PARTIAL_OVER_TP


def apply_tensor_parallel(
    model: Llama, mesh: DeviceMesh, *, sequence_length: int, keeps_logits_split: bool
) -> None:
    """Split a model on the meta device over a mesh of one axis, in place.

    Args:
        model: The decoder, or a stage of it.
        mesh: The ranks along `tp`.
        sequence_length: Positions of a training sequence.
        keeps_logits_split: Whether the model returns this rank's V / tp columns of the logits
            instead of all of them, as a plain tensor either way.

    Raises:
        ConfigError: If the model has parts without a plan, or the number of ranks does not divide
            heads, widths, vocabulary or sequence length.
    """
    if planless := without_tp_plan(model.shape.experts, model.shape.latent_attention):
        raise ConfigError(
            f"mesh tp = {mesh.size()}: there is no tensor-parallel plan for {planless}; set tp = 1 "
            "and use dp_shard"
        )
    _check_divisible(model, mesh.size(), sequence_length)
    # The logits are a view of the head's DTensor, and nobody writes into them.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(\w+\) returned a view tensor")
    root: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        root["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if model.head is not None:
        logits = Shard(-1) if keeps_logits_split else Replicate()
        root["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=logits)
    if root:
        parallelize_module(model, mesh, root)
    if model.norm is not None:
        model.norm = PositionwiseNorm(model.norm, mesh)
    block: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.blocks:
        assert isinstance(layer, Block)
        parallelize_module(layer, mesh, block)
        layer.attention_norm = PositionwiseNorm(layer.attention_norm, mesh)
        layer.ffn_norm = PositionwiseNorm(layer.ffn_norm, mesh)
        attention = layer.attention
        assert isinstance(attention, Attention), "the other has no plan"
        if attention.q_norm is not None and attention.k_norm is not None:  # of this rank's heads
            attention.q_norm = PositionwiseNorm(attention.q_norm, mesh)
            attention.k_norm = PositionwiseNorm(attention.k_norm, mesh)


def _check_divisible(model: Llama, tp: int, sequence_length: int) -> None:
    shape = model.shape
    for path, value in (
        ("data.sequence_length", sequence_length),
        ("model.num_kv_heads", shape.num_kv_heads),
        ("model.ffn_dim", shape.ffn_dim),
        ("model.vocab_size", shape.vocab_size),
    ):
        if value % tp:
            raise ConfigError(
                f"{path} = {value} is not a multiple of the mesh's tp = {tp}; change one of them"
            )


class PositionwiseNorm(nn.RMSNorm):
    """RMSNorm of this rank's own positions, or heads; the weight is replicated over `tp`.

    Its gradient covers these only, whatever its placements say: `partial_parameters`
    names it to `settle_gradients_`, which adds those of all norms over the ranks at once. Labelled
    Partial, each would cost a collective of its own inside every backward of FSDP2.

    PyTorch's `SequenceParallel` computes the same with a dozen DTensor operations a norm, which
    cost more than the additions that they carry, on small models.
    """

    partial_over_tp = True

    def __init__(self, norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
        """Take over the weight of a norm.

        Args:
            norm: Whole, on the meta device.
            mesh: The ranks along `tp`.
        """
        super().__init__(norm.normalized_shape, eps=norm.eps, device=norm.weight.device)
        weight = distribute_tensor(norm.weight.detach(), mesh, [Replicate()], src_data_rank=None)
        self.weight = nn.Parameter(weight)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Normalise every position by itself."""
        weight = self.weight
        assert isinstance(weight, DTensor)
        weight_D = weight.to_local(grad_placements=(Replicate(),))
        return F.rms_norm(x_BSD, self.normalized_shape, weight_D, self.eps)


def await_embedding(model: Llama) -> None:
    """Let compiled blocks have the embedding's output itself, and not the promise of it.

    DTensor hands on the result of a collective that is under way as a tensor of its own class;
    given to a compiled block, its gradient does not find the way back (torch 2.13). A copy waits.
    """
    if model.embed is not None:
        model.embed.register_forward_hook(_copied)


def _copied(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.clone()


def pipeline_collectives(mesh: DeviceMesh) -> None:
    """Let the compiler hide collectives along `tp` under the matrix products next to them.

    Compiled graphs of this process then cut gather and product, or product and scatter, into parts
    that go through memory which the ranks' devices share.

    Args:
        mesh: The ranks along `tp`, CUDA devices of one host.

    Source: async tensor parallelism of PyTorch, arXiv 2410.06511 section 3.1.
    """
    # Here: only who compiles anyhow loads the compiler.
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # Deprecated as needless, and still what the compiler asks for (torch 2.13).
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients are parts of a sum over the ranks along `tp`."""
    partial = (module for module in model.modules() if getattr(module, PARTIAL_OVER_TP, False))
    return [parameter for module in partial for parameter in module.parameters(recurse=False)]
