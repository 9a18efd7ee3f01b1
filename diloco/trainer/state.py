"""Reads and restores the training state of model and inner optimizer, by canonical name.

    model        parameters
    exp_avg      first moments of AdamW, momentum of Muon
    exp_avg_sq   second moments of AdamW; zero for the matrices that Muon takes, which have none

Names are those of the plan, so what one island wrote fits another of any layout. Learning rate and
data position follow from the inner step and are not state. Moments of one optimizer are nothing to
another: the name is stored with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from diloco.errors import ConfigError
from diloco.island.lanes.boxes import declared_like, stored, write_stored_
from diloco.island.lanes.parameters import canonical_parameters
from diloco.trainer.optimizers.muon import Muon
from diloco.trainer.optimizers.optimizer import largest_ratio

MOMENTS = ("exp_avg", "exp_avg_sq")
#: Key of the optimizer's name, in a checkpoint's manifest and in what describes a copy.
INNER_OPTIMIZER = "inner_optimizer"
_STEP = "step"
#: Of bounds of moments: many roundings; and what is lost where squares are too small for float32.
_TOLERANCE = 1.01
_TINY = 1e-18

#: (section, canonical name) -> the full tensor, float32, CPU.
Read = Callable[[str, str], Tensor]


def training_tensors(
    model: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return parameters and moments as they are stored: DTensors stay DTensors, nothing is copied.

    Args:
        model: As `canonical_parameters` takes it.
        optimizer: AdamW or Muon over its parameters. Moments that it has not, or not yet, are zero.

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


def kept_moments(
    model: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return of `moments` those that the optimizer keeps: what memory of the same layout needs."""
    parameters, kept = canonical_parameters(model), _kept(optimizer)
    return {
        moment: {
            name: _moment(optimizer, parameter, moment)
            for name, parameter in parameters.items()
            if moment in kept.get(parameter, ())
        }
        for moment in MOMENTS
    }


def kept_tensors(
    model: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return of `training_tensors` those in use: what is to be copied of the training state."""
    return {"model": canonical_parameters(model), **kept_moments(model, optimizer)}


def kept_parameters(
    model: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> list[Tensor]:
    """Return for each of `kept_moments`, in their order, the parameter that it is of."""
    parameters, kept = canonical_parameters(model), _kept(optimizer)
    return [p for moment in MOMENTS for p in parameters.values() if moment in kept.get(p, ())]


def _kept(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[str, ...]]:
    groups = optimizer.param_groups
    return {p: group.get("moments", MOMENTS) for group in groups for p in group["params"]}


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's name, as `inner.optimizer.name` has it."""
    return "muon" if isinstance(optimizer, Muon) else "adamw"


def check_optimizer(optimizer: torch.optim.Optimizer, found: object, source: str) -> None:
    """Refuse the moments of another optimizer.

    Args:
        optimizer: That is to take them.
        found: Name of the optimizer that they are of, as stored.
        source: Where they are, in words.

    Raises:
        ConfigError: With both names.
    """
    if (name := optimizer_name(optimizer)) != found:
        raise ConfigError(
            f"{source} holds the state of inner.optimizer.name = {found!r} (there), this run has "
            f"{name!r} (here): moments of one are nothing to the other. Set it to {found!r}; or "
            "begin another run from the parameters alone, by run.warm_start = an export"
        )


def _moment(optimizer: torch.optim.Optimizer, parameter: Tensor, moment: str) -> Tensor:
    if parameter in optimizer.state and moment in optimizer.state[parameter]:
        found: Tensor = optimizer.state[parameter][moment]
        return declared_like(found, parameter)
    return declared_like(torch.zeros_like(parameter), parameter)


def optimizer_age(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return how many steps the optimizer has made, where it counts them; float32, 0 dimensions."""
    steps = [state[_STEP] for state in optimizer.state.values()]
    return torch.stack(steps).max() if steps else torch.zeros(())


def optimizer_step(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps the optimizer has made: the age of its moments; 0 before the first.

    Waits for the device.
    """
    return int(optimizer_age(optimizer))


@torch.no_grad()
def mend_moments_(optimizer: torch.optim.Optimizer, *, clip_norm: float = math.inf) -> int:
    """Zero the moments of the values whose moments no gradients can have made; return how many.

    Those that are not finite, first moments beyond what the second allows (`largest_ratio`), or
    either beyond the norm that gradients were clipped to. What steps go on from is as if those
    values had had no gradient yet. Waits for the device.

    Args:
        optimizer: AdamW, Adam or `Muon`; those of others are left alone.
        clip_norm: Largest norm of a gradient; infinite: they were not clipped.
    """
    num_mended = 0
    for group in optimizer.param_groups:
        ratio = largest_ratio(*group["betas"]) if "betas" in group else math.inf
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            kept = [stored(state[moment]) for moment in MOMENTS if moment in state]
            if not kept:
                continue
            is_wrong = _is_wrong(*kept, ratio=ratio, clip_norm=clip_norm)
            if num_wrong := int(is_wrong.sum()):
                num_mended += num_wrong
                for moment in kept:
                    moment.masked_fill_(is_wrong, 0.0)
    return num_mended


def _is_wrong(
    exp_avg: Tensor, exp_avg_sq: Tensor | None = None, *, ratio: float, clip_norm: float
) -> Tensor:
    most = clip_norm * _TOLERANCE
    is_right = (exp_avg.abs() <= most) & exp_avg.isfinite()
    if exp_avg_sq is None:
        return ~is_right
    is_right &= exp_avg_sq.isfinite() & (exp_avg_sq >= 0) & (exp_avg_sq <= most * most)
    if math.isfinite(ratio):
        is_right &= exp_avg.abs() <= exp_avg_sq.sqrt() * (ratio * _TOLERANCE) + _TINY
    return ~is_right


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
    """Give a new optimizer the moments that `read` has, at the age of `step` optimizer steps.

    Learning rates and other settings are left alone.
    """
    new_moments_(model, optimizer, step=step)
    for moment, tensors in kept_moments(model, optimizer).items():
        for name, values in tensors.items():
            write_stored_(values, read(moment, name))


def new_moments_(
    model: nn.Module | Iterable[nn.Module], optimizer: torch.optim.Optimizer, *, step: int
) -> dict[str, dict[str, Tensor]]:
    """Give a new optimizer moments of zero at the age of `step` optimizer steps.

    Returns:
        Moment -> canonical name -> the tensor in use, of the layout of the parameter, to be filled;
        where the optimizer keeps none, one that nobody will read.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    kept = _kept(optimizer)
    for parameter in canonical_parameters(model).values():
        if not parameter.requires_grad:
            continue  # a buffer has none; `moments` gives zeros in their place
        # Where AdamW itself keeps it: with the parameter when fused, else on the CPU.
        device = parameter.device if is_fused else torch.device("cpu")
        age = torch.tensor(float(step), dtype=torch.float32, device=device)
        optimizer.state[parameter] = {_STEP: age} | {
            moment: torch.zeros_like(parameter) for moment in kept[parameter]
        }
    return moments(model, optimizer)
