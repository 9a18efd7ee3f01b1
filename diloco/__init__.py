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
    from diloco.island.lanes.boxes import declare_part
    from diloco.island.session import DiLoCo
    from diloco.launch.rank.connect import connect
    from diloco.trainer.optimizers.optimizer import step_bound
    from diloco.trainer.state import mend_moments_

__version__ = "0.1.0"

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
    "DiLoCo": "diloco.island.session",
    "connect": "diloco.launch.rank.connect",
    "declare_part": "diloco.island.lanes.boxes",
    "load_config": "diloco.config.load",
    "mend_moments_": "diloco.trainer.state",
    "step_bound": "diloco.trainer.optimizers.optimizer",
}


def __getattr__(name: str) -> Any:
    """Find a public name; `Any`, since it may be a function or a class."""
    if name not in __all__:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "diloco.errors")), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
