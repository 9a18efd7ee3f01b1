"""Train one language model across datacenters that are far apart.

The public names are found when they are first used, so that `import diloco` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.config.load import load_config
    from diloco.errors import (
        AggregationError,
        ConfigError,
        CoordinatorUnavailable,
        DilocoError,
        FingerprintMismatch,
        IslandFailed,
        PlanMismatch,
        QuorumLost,
    )
    from diloco.inner.optimizer import step_bound
    from diloco.inner.state import mend_moments_
    from diloco.launch.connect import connect
    from diloco.sync.boxes import declare_part
    from diloco.sync.session import DiLoCo

__all__ = [
    "AggregationError",
    "ConfigError",
    "CoordinatorUnavailable",
    "DiLoCo",
    "DilocoError",
    "FingerprintMismatch",
    "IslandFailed",
    "PlanMismatch",
    "QuorumLost",
    "RunHalted",
    "connect",
    "declare_part",
    "load_config",
    "mend_moments_",
    "step_bound",
]

_MODULES = {
    "DiLoCo": "diloco.sync.session",
    "connect": "diloco.launch.connect",
    "declare_part": "diloco.sync.boxes",
    "load_config": "diloco.config.load",
    "mend_moments_": "diloco.inner.state",
    "step_bound": "diloco.inner.optimizer",
}


def __getattr__(name: str) -> Any:
    """Find a public name; `Any`, since it may be a function or a class."""
    if name not in __all__:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "diloco.errors")), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
