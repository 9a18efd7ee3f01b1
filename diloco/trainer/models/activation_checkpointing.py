"""Activation checkpointing: what a block keeps for its backward, and what it computes again.

    full        the block's input is kept; its backward begins with its forward
    selective   the outputs of matrix products and of attention as well: what is computed again is
                elementwise (norms, rotations, activations), cheap and large

Called inside the block, not around it: names of parameters and hooks of FSDP2 stay what they are,
and the gathered parameters are there when the forward is made again.

Source: arXiv 1604.06174 (full); arXiv 2205.05198 (selective).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from diloco.trainer.models.experts import Router

_aten = torch.ops.aten
#: Kept by "selective": each costs far more to compute than its output takes to keep. Collectives
#: of tensor parallelism are computed again, so that what they return need not be kept whole.
_ATTENTION = [
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
_KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
    *_ATTENTION,
]

#: (function, inputs) -> what the function returns, with the backward computing it again.
Recompute = Callable[..., Tensor]
_Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


def recompute_of(
    block: nn.Module, kind: Literal["selective", "full"], *, keeps_attention: bool = False
) -> Recompute:
    """Return how a block calls itself so that its backward computes it again.

    Nothing in a block is random, so no generator's state is kept. Routers count tokens once:
    what is computed again is not counted.

    Args:
        block: Whose routers must not count twice.
        kind: What is computed again.
        keeps_attention: Whether "full" keeps what attention returns as well. For compiled blocks
            over tp: PyTorch 2.13 counts attention as random, and mixes up the state of a generator
            with the mesh of a DTensor among what it keeps.
    """
    contexts: Callable[[], _Contexts] | None = None
    if kind == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _KEPT)
    elif keeps_attention:
        contexts = partial(create_selective_checkpoint_contexts, _ATTENTION)
    if routers := [module for module in block.modules() if isinstance(module, Router)]:
        contexts = partial(_counting_once, routers, contexts)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if contexts is not None:
        options["context_fn"] = contexts
    return partial(checkpoint, **options)


def _counting_once(
    routers: Sequence[Router], contexts: Callable[[], _Contexts] | None
) -> _Contexts:
    first, again = (contextlib.nullcontext(), contextlib.nullcontext())
    if contexts is not None:
        first, again = contexts()  # type: ignore[assignment]
    return first, _not_counting(routers, again)


@contextlib.contextmanager
def _not_counting(
    routers: Sequence[Router], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    for router in routers:
        router.is_counting = False
    try:
        with inner:
            yield
    finally:
        for router in routers:
            router.is_counting = True
