"""Imports of a process that holds tensors: seconds of torch, most of what its start takes.

What they make lives as long as the process: looking for garbage in it, again and again while it
grows, takes a sixth of them.
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def import_for_good(name: str) -> ModuleType:
    """Import a module, and let the garbage collector pass by all that there is afterwards.

    Args:
        name: Whole name of the module.

    Returns:
        The module; imported before, it is just returned.
    """
    gc.disable()
    try:
        module = importlib.import_module(name)
        gc.freeze()
    finally:
        gc.enable()
    return module
