"""The emulated network that a process is in: `diloco emulate WAN.toml -- diloco local RUN.toml`.

The command runs where coordinator and syncer are; each island enters the namespace that bears its
name, and so does a syncer on a machine of its own that bears an island's. Nothing else of a run
knows of it: the network is the kernel's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.transport.addresses import split_address

#: Variable of the environment: file that says what is where.
VARIABLE = "DILOCO_EMULATION"


@dataclass(frozen=True, slots=True)
class Emulated:
    """The surrounding network.

    Args:
        description: What `diloco emulate` wrote: the file it was made from, the coordinator's
            address, how to enter each island, and what was measured beforehand, if it was.
    """

    description: Mapping[str, Any]  # JSON values

    @classmethod
    def surrounding(cls, environment: Mapping[str, str]) -> Emulated | None:
        """Find the network that this process is in; None: the machine's own.

        Raises:
            ConfigError: If the environment names one that is gone.
        """
        path = environment.get(VARIABLE)
        if not path:
            return None
        try:
            return cls(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{VARIABLE} = {path}, which cannot be read ({error}): that emulation has ended; "
                f"leave its shell, or unset {VARIABLE}"
            ) from error

    def prefix(self, island: str) -> list[str]:
        """Words before a command that is to run in an island's namespace."""
        return list(self.description["islands"][island]["enter"])

    def interface(self, island: str) -> list[str]:
        """Words behind `prefix`, for a command whose process groups reach other islands."""
        device = self.description["islands"][island]["interface"]
        return ["env", f"GLOO_SOCKET_IFNAME={device}"]

    def placed(self, config: Config) -> Config:
        """Make a run on this machine one of this network.

        Coordinator and syncer listen on the address that islands reach, without encryption unless
        there are certificates: no packet leaves the machine. Traffic is shaped by the network
        alone.

        Raises:
            ConfigError: If the run has islands that the network has not.
        """
        known = self.description["islands"]
        if missing := sorted((config.islands.keys() | config.syncers.keys()) - known.keys()):
            raise ConfigError(
                f"the emulated network {self.description['wan']} has no island "
                f"{' and no island '.join(missing)}; it has {', '.join(sorted(known))}: give both "
                f"files the same names"
            )
        here = self.description["coordinator"]
        coordinator, transport = config.coordinator, config.transport
        at = {"listen": f"{here}:{split_address(coordinator.listen)[1]}", "address": ""}
        if not config.syncers:
            port = split_address(coordinator.syncer_listen)[1]
            at |= {"syncer_listen": f"{here}:{port}", "syncer_address": ""}
        syncers = {
            name: each.model_copy(
                update={
                    "listen": f"{known[name]['address']}:{split_address(each.listen)[1]}",
                    "address": "",
                }
            )
            for name, each in config.syncers.items()
        }
        return config.model_copy(
            update={
                "coordinator": coordinator.model_copy(update=at),
                "syncers": syncers,
                "transport": transport.model_copy(
                    update={"link": "", "insecure": not transport.certs}
                ),
            }
        )
