"""Packages that only some work needs, and the extra of `pip install 'diloco[EXTRA]'` for each.

None of them is imported before that work begins: a rank that trains does without all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from diloco.errors import ConfigError

#: Package, by the name that is imported -> extra of pyproject.toml that installs it.
EXTRA_OF = {
    "accelerate": "hf",
    "datasets": "data",
    "hivemind": "hivemind",
    "httpx": "state",
    "huggingface_hub": "hf",
    "lightning": "lightning",
    "matplotlib": "plots",
    "megatron": "megatron",
    "obstore": "state",
    "opentelemetry": "otel",
    "prometheus_client": "prometheus",
    "simpy": "sim",
    "starlette": "page",
    "tensorboard": "tensorboard",
    "textual": "watch",
    "tokenizers": "hf",
    "torchao": "float8",
    "transformers": "hf",
    "uvicorn": "page",
    "wandb": "wandb",
}


def missing(what: str, package: str, otherwise: str = "") -> ConfigError:
    """Make the error of a package that is not installed.

    Args:
        what: What needs it: a setting with its value, an option, a command.
        package: Dotted name of what cannot be imported.
        otherwise: What else can be done; empty: nothing.
    """
    top = package.partition(".")[0]
    wanted = f"diloco[{EXTRA_OF[top]}]" if top in EXTRA_OF else top
    instead = f", or {otherwise}" if otherwise else ""
    return ConfigError(
        f"{what} needs the package {top}, which is not installed: type pip install '{wanted}'"
        f"{instead}"
    )


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    return importlib.util.find_spec(package) is not None


def require(what: str, package: str, otherwise: str = "") -> None:
    """Refuse, before the work begins, what needs a package that is not installed.

    Args:
        what: As `missing` takes it.
        package: A name in `EXTRA_OF`.
        otherwise: As `missing` takes it.

    Raises:
        ConfigError: If it is not installed.
    """
    if not is_installed(package):
        raise missing(what, package, otherwise)


def import_for(what: str, module: str, otherwise: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        what: As `missing` takes it.
        module: Dotted name of the module.
        otherwise: As `missing` takes it.

    Raises:
        ConfigError: If the package, or one that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing(what, error.name or module, otherwise) from error
