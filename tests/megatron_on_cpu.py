"""Megatron-Core on a machine without a GPU, as far as a small model needs it; for tests.

Imported before anything of Megatron, it gives what Megatron asks of `torch.cuda`, wherever a model
is, an answer that means the CPU. Dropout must be 0: its generator is a GPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Makes tensors for "cuda" on the CPU, whose types are then called those of a GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        result = func(*args, **given)
        if func is torch.Tensor.type and isinstance(result, str):
            result = result.replace("torch.", "torch.cuda.")
        return result


if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    _OnCpu().__enter__()

    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
