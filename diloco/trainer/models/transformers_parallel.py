"""Splits a model of `transformers` over the ranks along `tp`, by the plan that it has itself.

    colwise                            outputs of a matrix in parts, which stay in parts
    colwise_gather_output, colwise_rep the same, gathered (of the head: not, with loss_parallel)
    rowwise                            inputs in parts, outputs summed
    embedding_rowwise                  rows of the table in parts, what is looked up is summed
    replicated_with_grad_allreduce     whole, used on this rank's heads only: gradients are summed

Whatever the plan does not name is whole on every rank. Every rank holds all positions between the
matrices: these plans have no sequence parallelism.

How near the losses of tp = 2 come to those of one rank is the model's: of a small Gemma 4
(gemma4_text), which does not scale its scores down, they were 1.1e-5 apart in six steps, but 3.5e-5
where one rank's parameters were changed by 1e-7 of themselves; gradients agreed to 5e-6 (Llama: 0,
5e-7 and 5e-7).

Source: `base_model_tp_plan` of transformers 5; Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from diloco.config.mesh import nearest
from diloco.errors import ConfigError
from diloco.trainer.models.transformers_model import TransformersModel

#: Attribute of modules whose own parameters' gradients are parts of a sum over the ranks.
PARTIAL_OVER_TP = "partial_over_tp"

#: Whole on every rank, and gradients of parts are summed.
_PARTIAL = "replicated_with_grad_allreduce"
_GATHERED = ("colwise_gather_output", "colwise_rep")
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    **dict.fromkeys(_GATHERED, lambda: ColwiseParallel(output_layouts=Replicate())),
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
_REMEDY = "set mesh.tp = 1 and use dp_shard"


def check_tp_plan(model: TransformersModel, tp: int, *, keeps_logits_split: bool) -> None:
    """Refuse a number of ranks that the model's plan does not allow; needs no process group.

    Args:
        model: Not parallelised.
        tp: Ranks along `tp`; 1 is always allowed.
        keeps_logits_split: Whether each rank is to keep its part of the logits.

    Raises:
        ConfigError: If the model has no plan, or one with an unknown style, or convolutions, or
            `tp` does not divide heads and widths.
    """
    if tp == 1:
        return
    kind, plan = type(model.decoder).__name__, plan_of(model)
    if not plan:
        raise ConfigError(
            f"mesh.tp = {tp}: {kind} of transformers has no tensor-parallel plan; {_REMEDY}"
        )
    for path, style in plan.items():
        if style not in _STYLES and style != _PARTIAL:
            raise ConfigError(
                f'mesh.tp = {tp}: the plan of {kind} has the style "{style}" for {path}, and '
                f"{', '.join(_STYLES)} and {_PARTIAL} are known; {_REMEDY}"
            )
    for path, module in model.decoder.named_modules():
        if isinstance(module, nn.Conv1d):  # kernels read its weight past the module's own code
            raise ConfigError(
                f"mesh.tp = {tp}: {kind} has the convolution {path}, which is not split; {_REMEDY}"
            )
    if keeps_logits_split and plan.get("lm_head") not in _GATHERED:
        raise ConfigError(
            f"mesh.loss_parallel = true: the plan of {kind} does not split lm_head; leave it out"
        )
    sizes = {"num_heads": model.shape.num_heads, "num_kv_heads": model.shape.num_kv_heads}
    for path, style in plan.items():
        module = model.decoder.get_submodule(path)
        for name, parameter in module.named_parameters(recurse=False):
            if style != _PARTIAL and (style != "rowwise" or parameter.ndim == 2):
                sizes[f"{path}.{name}"] = parameter.shape[1 if style == "rowwise" else 0]
    undivided = {name: size for name, size in sizes.items() if size % tp}
    if undivided:
        name, size = next(iter(undivided.items()))
        raise ConfigError(
            f"mesh.tp = {tp} must divide {name} = {size} of {kind}; {nearest(tp, *sizes.values())}"
        )


def plan_of(model: TransformersModel) -> dict[str, str]:
    """Give the style of every module that the model's plan names."""
    rules = {
        re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style
        for pattern, style in (model.decoder.tp_plan or {}).items()
    }
    return {
        path: style
        for path, _ in model.decoder.named_modules()
        for pattern, style in rules.items()
        if pattern.fullmatch(path)
    }


def apply_transformers_tp(
    model: TransformersModel, mesh: DeviceMesh, *, keeps_logits_split: bool
) -> None:
    """Split a model on the meta device over a mesh of one axis, in place.

    Args:
        model: As it was built.
        mesh: The ranks along `tp`.
        keeps_logits_split: Whether the model returns this rank's V / tp columns of the logits.

    Raises:
        ConfigError: As `check_tp_plan` does.
    """
    check_tp_plan(model, mesh.size(), keeps_logits_split=keeps_logits_split)
    # The logits are a view of the head's DTensor, and nobody writes into them.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(\w+\) returned a view tensor")
    plan = plan_of(model)
    styles = {path: _STYLES[style]() for path, style in plan.items() if style != _PARTIAL}
    if keeps_logits_split:
        styles["lm_head"] = ColwiseParallel(output_layouts=Shard(-1))
    parallelize_module(model.decoder, mesh, styles)
    for path, module in model.decoder.named_modules():
        if path not in styles:
            _replicate(module, mesh)
            if plan.get(path) == _PARTIAL:
                setattr(module, PARTIAL_OVER_TP, True)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a module's own parameters be whole on every rank, and its code see plain tensors.

    They are DTensors all the same, since optimizers take no mixture of both.
    """
    own = dict(module.named_parameters(recurse=False))
    if not own:
        return
    for name, parameter in own.items():
        whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        module._parameters[name] = nn.Parameter(whole)
    compute = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        held: dict[str, Any] = {name: module._parameters[name] for name in own}
        for name, parameter in held.items():
            local: Any = parameter.to_local(grad_placements=[Replicate()])
            module._parameters[name] = local
        try:
            return compute(*args, **kwargs)
        finally:
            module._parameters.update(held)

    module.forward = forward
