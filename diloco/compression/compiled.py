"""Formulas compiled for large vectors, where this host has a compiler.

Eager and compiled formulas give the same bytes, so each host chooses for itself. Compiling takes
seconds, so that no call compiles: `prepare` does, before an island takes part in a run and during
the first rounds of a syncer, and what was not prepared stays eager.
"""

from __future__ import annotations

import functools
import logging
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._triton import has_triton

logger = logging.getLogger(__name__)

#: From this many values on, vectors are coded by the compiled formula: on one CPU it is faster for
#: every codec, both ways (`diloco bench codec`).
COMPILE_NUMEL = 128 << 10

_Formula = TypeVar("_Formula", bound=Callable[..., Any])

#: Formula and kind of device -> the formula compiled for it.
_prepared: dict[tuple[Callable[..., Any], str], Callable[..., Any]] = {}


def chosen(formula: _Formula, operand: Tensor, numel: int) -> _Formula:
    """Return `formula`, or what `prepare` made of it if `numel` is worth it; never compiles."""
    if numel < COMPILE_NUMEL:
        return formula
    return cast(_Formula, _prepared.get((formula, operand.device.type), formula))


def prepare(formula: Callable[..., Any], *operands: Tensor | None) -> bool:
    """Compile a formula for operands like these, of any length; `chosen` then gives it.

    Returns:
        Whether it is compiled. If a compiler fails, a warning says so, and the formula stays eager
        as long as this process lives.
    """
    device = next(operand.device.type for operand in operands if operand is not None)
    if (formula, device) not in _prepared:
        fast = compiled(formula)
        try:
            fast(*operands)
        except (RuntimeError, OSError) as error:  # dynamo's and inductor's are RuntimeErrors
            logger.warning(
                "large vectors are coded eagerly and slower, compiling failed: %s; mend the "
                "compiler, or empty inductor's cache (TORCHINDUCTOR_CACHE_DIR)",
                str(error).partition("\n")[0],
            )
            fast = formula
        _prepared[formula, device] = fast
    return _prepared[formula, device] != formula


def is_prepared(formula: Callable[..., Any], device: str) -> bool:
    """Tell whether `prepare` was called for a formula and a kind of device."""
    return (formula, device) in _prepared


@functools.cache
def compiled(formula: _Formula) -> _Formula:
    """Return `formula` compiled by inductor for any number of blocks; the first call compiles.

    The first dimension of every operand is dynamic and nothing else: `dynamic=True` would make
    variables of a codec's constants, too. Codecs share a formula's code object, and dynamo gives up
    at eight compilations of one; isolated, each formula has its own count.

    On a CPU it runs on the calling thread alone: kernels for several crash in a thread for which
    torch has another number of them, which would have to be compiled for, too. Lanes can be coded
    side by side instead. Hence not `fullgraph`: dynamo counts for it, in one place of the process,
    whether a call ran a compiled frame, and calls of several threads take the count from each other
    (RuntimeError "found no compiled frames").
    """
    # mypy cannot choose between the overloads for a TypeVar, hence the cast of the function.
    compile_ = cast(Callable[..., Callable[..., Any]], torch.compile)
    fast = compile_(
        formula,
        dynamic=False,
        isolate_recompiles=True,
        options={"guard_filter_fn": _is_of_operands, "cpp.threads": 1},
    )

    def call(*operands: Tensor | None) -> Any:
        for operand in operands:
            if operand is not None and operand.dim():
                torch._dynamo.maybe_mark_dynamic(operand, 0)
        return fast(*operands)

    return cast(_Formula, call)


# Entries have a type private to dynamo, hence `Any`.
def _is_of_operands(guards: Sequence[Any]) -> list[bool]:
    """Keep what depends on operands and constants.

    Dropped is the state of the calling thread, such as the number of its threads, gradient mode and
    default device: these change nothing here, and another thread would compile again.
    """
    return [bool(guard.name) or guard.guard_type == "SHAPE_ENV" for guard in guards]


@functools.cache
def can_compile(device: str = "cpu") -> bool:
    """Tell whether this host can build kernels, and say it once if not.

    For CPUs that takes `g++` and Python's headers; for CUDA triton, which has a C compiler and the
    same headers build what launches its kernels.
    """
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if device == "cuda":
        needed = f"triton, no C compiler or no {headers}"
        is_there = any(map(shutil.which, ("gcc", "clang"))) and has_triton()
    else:
        needed = f"g++ or no {headers}"
        is_there = shutil.which("g++") is not None
    is_there = is_there and headers.exists()
    if not is_there:
        logger.info("codecs code large vectors eagerly and slower on %s: no %s", device, needed)
    return is_there
