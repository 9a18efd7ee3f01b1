"""Floating-point operations of training the decoder, and the share of a device's peak they take.

    flops a token = 6 N + 6 L H (Q + V) S, with heads of one width 6 N + 12 L D S
    MFU = tokens a second x flops a token / (ranks x peak flops of a device)

N: values of the matrices that a token is multiplied with, which are all but the input embedding's
table; a tied head's matrix counts once, and of routed experts as many as a token goes through. 2
operations a value forward, 4 backward. L layers, H query heads, Q width of a query or key head, V
of a value head (latent attention has two widths), D = H Q, S positions: scores take 2 S H Q
forward, their use of values 2 S H V, twice that backward. The convention of PaLM and torchtitan:
attention counts in full although half of it is masked (causal), and what is recomputed in the
backward does not count. Peaks are those of dense bfloat16.

Source: PaLM (arXiv 2204.02311) appendix B; torchtitan `get_nparams_and_flops`.
"""

from __future__ import annotations

import math

import torch

from diloco.trainer.models.families import Shape, num_looked_up, parameter_shapes

#: Dense bfloat16 operations a second by a part of the device's name, the first that fits: makers'
#: data sheets.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "B200": 2.25e15,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}


def flops_per_token(shape: Shape, sequence_length: int) -> float:
    """Compute 6 N + 6 L H (Q + V) S of one trained token.

    Args:
        shape: Sizes of the whole decoder, however it is spread over ranks.
        sequence_length: Positions of a training sequence.
    """
    shapes = parameter_shapes(shape)
    multiplied = sum(math.prod(size) for size in shapes.values() if len(size) == 2)
    multiplied -= num_looked_up(shape)
    # Stacked experts are of three dimensions, the first of which counts them.
    one_of_each = sum(math.prod(size[1:]) for size in shapes.values() if len(size) == 3)
    multiplied += shape.experts.experts_per_token * one_of_each
    latent = shape.latent_attention
    widths = 2 * shape.head_dim
    if latent.kv_rank:
        widths = latent.nope_dim + latent.rope_dim + latent.value_dim
    attention = shape.num_layers * shape.num_heads * widths * sequence_length
    return 6.0 * multiplied + 6.0 * attention


def peak_flops(device: torch.device) -> float:
    """Look up a device's peak; 0 for a CPU or an unknown device: no MFU can be told."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), 0.0)
