"""Owns which matrix products of the blocks are computed in 8 bits; torchao computes them.

    float8-tensorwise   E4M3 forward, E5M2 of gradients; a scale for each matrix
    float8-rowwise      E4M3; a scale for each row of what is multiplied
    mxfp8               E4M3; a power of two for each 32 values of a row

Scales are computed each time from what is multiplied, of all three products of a linear layer:
forward, and both of its backward. Parameters are the same tensors as before: gathered and cast to
bfloat16 by FSDP2, cast to 8 bits where they are used. Left in bfloat16 are embedding, norms, head,
routers and routed experts, and layers with a width that is no multiple of `Float8.unit` on each of
the ranks that share them.

Source: FP8 formats (arXiv 2209.05433); OCP microscaling formats (MX) 1.0; torchao.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

import torch
from torch import nn

from diloco.config.compute import FLOAT8, Precision
from diloco.errors import ConfigError

logger = logging.getLogger(__name__)


def multiply_in_float8(
    blocks: Iterable[nn.Module], precision: Precision, device: torch.device, *, tp: int = 1
) -> tuple[str, ...]:
    """Replace the linear layers of blocks by ones that multiply in 8 bits, in place.

    Args:
        blocks: On the meta device, not split yet; their parameters stay.
        precision: A key of `FLOAT8`.
        device: Where they will compute; on a CPU 8 bits are emulated, for tests: slow, and rounded
            alike.
        tp: Ranks that a matrix will be split over; the widths that each has count.

    Returns:
        Names of the layers in their blocks, sorted, each once.

    Raises:
        ConfigError: If none has the widths that it takes.
    """
    unit, is_emulated = FLOAT8[precision].unit * tp, device.type == "cpu"
    changed, left = set[str](), set[str]()
    for block in blocks:
        for name, layer in list(block.named_modules()):
            if not isinstance(layer, nn.Linear):
                continue
            if layer.in_features % unit or layer.out_features % unit:
                left.add(name)
                continue
            changed.add(name)
            parent, _, last = name.rpartition(".")
            setattr(block.get_submodule(parent), last, _made_of(layer, precision, is_emulated))
    if not changed:
        raise ConfigError(
            f'precision = "{precision}": no layer of a block has widths that are multiples of '
            f'{unit}; set it to "bfloat16", or change model.dim and model.ffn_dim'
        )
    logger.info(
        "matrix products in 8 bits: precision=%s layers=%s left_in_bfloat16=%s",
        precision, ",".join(sorted(changed)), ",".join(sorted(left)) or "-",
    )  # fmt: skip
    return tuple(sorted(changed))


def _made_of(layer: nn.Linear, precision: Precision, is_emulated: bool) -> nn.Module:
    """Make a layer of torchao's with the parameter of a plain one."""
    # Here: importing torchao takes seconds, and it is an optional part.
    if precision == "mxfp8":
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common import KernelPreference

        kernels = KernelPreference.EMULATED if is_emulated else KernelPreference.AUTO
        sizes = layer.in_features, layer.out_features
        made: nn.Module = MXFP8Linear(*sizes, bias=False, device="meta", kernel_preference=kernels)
        made.weight = layer.weight
        return made
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(precision.removeprefix("float8-"))
    if is_emulated:
        config = dataclasses.replace(config, emulate=True)
    # Of a single layer, so that which ones is decided above, for all three precisions alike.
    converted: nn.Module = convert_to_float8_training(layer, config=config)
    return converted
