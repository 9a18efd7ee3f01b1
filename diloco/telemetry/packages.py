"""Packages that only some settings need: a missing one is an error that names the command."""

from __future__ import annotations

import importlib
from types import ModuleType

from diloco.errors import ConfigError


def import_for(setting: str, module: str, requirement: str) -> ModuleType:
    """Import what a setting needs.

    Args:
        setting: The setting and its value, for the message.
        module: Dotted name of the module.
        requirement: What `pip install` is to be given.

    Raises:
        ConfigError: If the module, or one that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{setting} needs the package {error.name}, which is not installed: type "
            f"pip install '{requirement}', or turn the setting off"
        ) from error
