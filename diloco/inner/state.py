"""What training an island leaves in its model and its inner optimizer, by canonical name.

    model        parameters
    exp_avg      first moments of AdamW
    exp_avg_sq   second moments of AdamW

Names are those of the plan, so what one island wrote fits another of any layout. Learning rate and
data position follow from the inner step and are not state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from diloco.sync.boxes import declared_like, write_stored_
from diloco.sync.buffers import is_synchronised
from diloco.sync.shards import canonical_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"

#: (section, canonical name) -> the full tensor, float32, CPU.
Read = Callable[[str, str], Tensor]


def training_tensors(
    model: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return parameters and moments as they are stored: DTensors stay DTensors, nothing is copied.

    Args:
        model: As `canonical_parameters` takes it.
        optimizer: AdamW over its parameters. Moments of a parameter that it has not met are zero.

    Returns:
        Section -> canonical name -> tensor of the shape and layout of the parameter.
    """
    return {"model": canonical_parameters(model), **moments(model, optimizer)}


def moments(
    model: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return the sections of `training_tensors` that are the optimizer's."""
    parameters = canonical_parameters(model)
    return {
        moment: {
            name: _moment(optimizer, parameter, moment) for name, parameter in parameters.items()
        }
        for moment in MOMENTS
    }


def _moment(optimizer: torch.optim.Optimizer, parameter: Tensor, moment: str) -> Tensor:
    if parameter in optimizer.state and moment in optimizer.state[parameter]:
        found: Tensor = optimizer.state[parameter][moment]
        return declared_like(found, parameter)
    return declared_like(torch.zeros_like(parameter), parameter)


def optimizer_step(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps the optimizer has made: the age of its moments; 0 before the first."""
    return max((int(state[_STEP]) for state in optimizer.state.values()), default=0)


def load_parameters_(model: nn.Module | Iterable[nn.Module], read: Read) -> None:
    """Write section "model" into the parameters, each rank its own part; no communication."""
    for name, parameter in canonical_parameters(model).items():
        write_stored_(parameter, read("model", name))


def load_moments_(
    model: nn.Module | Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    read: Read,
    *,
    step: int,
) -> None:
    """Give a new AdamW the moments that `read` has, at the age of `step` optimizer steps.

    Learning rates and other settings are left alone.
    """
    for moment, tensors in new_moments_(model, optimizer, step=step).items():
        for name, values in tensors.items():
            write_stored_(values, read(moment, name))


def new_moments_(
    model: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer, *, step: int
) -> dict[str, dict[str, Tensor]]:
    """Give a new AdamW moments of zero at the age of `step` optimizer steps.

    Returns:
        Moment -> canonical name -> the tensor in use, of the layout of the parameter, to be filled.
    """
    is_fused = any(group["fused"] for group in optimizer.param_groups)
    for parameter in canonical_parameters(model).values():
        if is_synchronised(parameter):
            continue  # a buffer has none; `moments` gives zeros in their place
        # Where AdamW itself keeps it: beside the parameter when fused, else on the CPU.
        device = parameter.device if is_fused else torch.device("cpu")
        age = torch.tensor(float(step), dtype=torch.float32, device=device)
        optimizer.state[parameter] = {_STEP: age} | {
            moment: torch.zeros_like(parameter) for moment in MOMENTS
        }
    return moments(model, optimizer)
