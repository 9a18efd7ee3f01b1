"""The hook that makes a trainer's gradients those of all members, while backward still runs.

Backward gives gradients from the last parameter to the first; they are laid out in one vector in
that order, so its first chunk is complete first and is reduced under the rest of backward.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.baseline.reduction import GradientReduction, all_reduce, padded_numel


class GradientSum:
    """Replaces each gradient by the weighted sum over members; a `GradientHook` of the trainer.

    Attributes:
        exposed_s: Seconds that training has waited, backward being over.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        reduction: GradientReduction,
        *,
        weight: float,
    ) -> None:
        """Listen to the gradients of a model.

        Args:
            parameters: Of the whole model, in its order; whole tensors of float32, on one device.
            reduction: Over the members, for that device.
            weight: This member's part of the sum: weights of all members add up to 1.
        """
        self._parameters = list(reversed(list(parameters)))
        for parameter in self._parameters:
            if isinstance(parameter, DTensor) or parameter.dtype != torch.float32:
                raise ValueError("a baseline's ranks hold whole float32 parameters")
        self._flat = _flat_of(self._parameters, reduction)
        self._reduction, self._weight = reduction, weight
        self._views: dict[nn.Parameter, Tensor] = {}
        self._chunks: dict[nn.Parameter, range] = {}
        size, first = reduction.chunk_numel, 0
        for parameter in self._parameters:
            end = first + parameter.numel()
            self._views[parameter] = self._flat[first:end].view_as(parameter)
            self._chunks[parameter] = range(first // size, -(-end // size))
            first = end
            parameter.register_post_accumulate_grad_hook(self._came)  # type: ignore[no-untyped-call]
        self._num_chunks = self._flat.numel() // size
        self._missing: set[nn.Parameter] = set()
        self._open: list[int] = []
        self._next = 0
        self.exposed_s = 0.0

    def over(self, reduction: GradientReduction, weight: float) -> None:
        """Sum over other members from the next inner step on; chunks must be of the same size."""
        assert reduction.chunk_numel == self._reduction.chunk_numel, "the vector has its layout"
        self._reduction, self._weight = reduction, weight

    def begin(self) -> None:
        """Take the gradients of the backward that follows, all that were accumulated in them."""
        self._missing = set(self._parameters)
        self._open = [0] * self._num_chunks
        for chunks in self._chunks.values():
            for chunk in chunks:
                self._open[chunk] += 1
        self._next = 0
        self._reduction.begin(self._flat)

    def finish(self) -> None:
        """Put the sums in place of the gradients; a parameter that has none gives zeros."""
        for parameter in list(self._missing):
            self._views[parameter].zero_()
            self._counted(parameter)
        began = time.perf_counter()
        self._reduction.finish()
        self.exposed_s += time.perf_counter() - began
        for parameter, view in self._views.items():
            parameter.grad = view

    def _came(self, parameter: nn.Parameter) -> None:
        """Copy a gradient that is complete, and start what is complete with it."""
        if parameter not in self._missing:
            return  # of a micro-batch before the last one
        grad = parameter.grad
        assert grad is not None
        torch.mul(grad, self._weight, out=self._views[parameter])
        self._counted(parameter)

    def _counted(self, parameter: nn.Parameter) -> None:
        self._missing.discard(parameter)
        for chunk in self._chunks[parameter]:
            self._open[chunk] -= 1
        while self._next < self._num_chunks and self._open[self._next] == 0:
            self._reduction.ready(self._next)
            self._next += 1


class ParameterMean:
    """Replaces parameters by their weighted mean over members: local SGD's only exchange."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], reduction: GradientReduction, *, weight: float
    ) -> None:
        """Keep the parameters; arguments as of `GradientSum`."""
        self._parameters = list(parameters)
        self._reduction, self._weight = reduction, weight
        self._flat = _flat_of(self._parameters, reduction)

    @torch.no_grad()
    def average(self) -> None:
        """Average now; every member calls it after the same inner step."""
        sizes = [parameter.numel() for parameter in self._parameters]
        views = torch.split(self._flat[: sum(sizes)], sizes)
        for parameter, view in zip(self._parameters, views, strict=True):
            torch.mul(parameter.flatten(), self._weight, out=view)
        all_reduce(self._reduction, self._flat)
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.copy_(view.view_as(parameter))


def _flat_of(parameters: Sequence[nn.Parameter], reduction: GradientReduction) -> Tensor:
    """Make a vector of zeros with room for all values, where they are."""
    numel = sum(parameter.numel() for parameter in parameters)
    return torch.zeros(padded_numel(reduction, numel), device=parameters[0].device)
