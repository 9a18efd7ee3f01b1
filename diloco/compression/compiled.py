"""Formulas compiled for large vectors on CPUs, where this host has a compiler.

Eager and compiled formulas give the same bytes, so each host chooses for itself.
"""

from __future__ import annotations

import functools
import logging
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

#: From this many values on, CPU vectors are coded by the compiled formula if a compiler is there.
COMPILE_NUMEL = 4 << 20

_Formula = TypeVar("_Formula", bound=Callable[..., Any])


def chosen(formula: _Formula, operand: Tensor, numel: int) -> _Formula:
    """Return `formula`, compiled if `numel` is worth it, on the CPU, where a compiler is there."""
    is_worth_it = operand.is_cpu and numel >= COMPILE_NUMEL
    return compiled(formula) if is_worth_it and can_compile() else formula


@functools.cache
def compiled(formula: _Formula) -> _Formula:
    """Return `formula` compiled by inductor for any number of blocks; the first call compiles.

    The first dimension of every operand is dynamic and nothing else: `dynamic=True` would make
    variables of a codec's constants, too. Codecs share a formula's code object, and dynamo gives up
    at eight compilations of one; isolated, each formula has its own count.
    """
    # mypy cannot choose between the overloads for a TypeVar, hence the cast of the function.
    compile_ = cast(Callable[..., Callable[..., Any]], torch.compile)
    fast = compile_(formula, fullgraph=True, dynamic=False, isolate_recompiles=True)

    def call(*operands: Tensor | None) -> Any:
        for operand in operands:
            if operand is not None and operand.dim():
                torch._dynamo.maybe_mark_dynamic(operand, 0)
        return fast(*operands)

    return cast(_Formula, call)


@functools.cache
def can_compile() -> bool:
    """Tell whether this host can build CPU kernels: it has `g++` and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which("g++") and headers.exists():
        return True
    logger.info("codecs code large vectors eagerly and slower: no g++ or no %s", headers)
    return False
