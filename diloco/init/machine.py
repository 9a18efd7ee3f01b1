"""Looks at the machine on which a run is written: accelerators, cores, memory, what starts jobs."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diloco.checkpoint.host_memory import available_bytes
from diloco.init.answers import Launcher
from diloco.system import usable_cpus
from diloco.transport.units import format_bytes

_COMMANDS: dict[Launcher, str] = {"slurm": "sbatch", "kubernetes": "kubectl", "ssh": "ssh"}
_SYSTEMD = Path("/run/systemd/system")


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found.

    Attributes:
        host: Name of this machine.
        devices: Names of its accelerators.
        cores: That this process may use.
        memory_bytes: That are free; 0: the system does not say.
        launchers: What is here to start jobs.
    """

    host: str
    devices: tuple[str, ...]
    cores: int
    memory_bytes: int
    launchers: tuple[Launcher, ...]

    def lines(self) -> list[str]:
        """Say it for people."""
        names = sorted(set(self.devices))
        shown = ", ".join(f"{self.devices.count(name)} x {name}" for name in names)
        free = format_bytes(self.memory_bytes) if self.memory_bytes else "an unknown amount"
        return [
            f"this machine, {self.host}: {shown or 'no accelerator'}; {self.cores} cores, "
            f"{free} of memory free",
            f"jobs are started here with: {', '.join(self.launchers) or 'nothing that is known'}",
        ]


def cuda_devices() -> tuple[str, ...]:
    """Name the devices that ranks would find, as they look for them."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def look_around(devices: Callable[[], tuple[str, ...]] = cuda_devices) -> Machine:
    """Find out; `devices` names the accelerators."""
    launchers: list[Launcher] = [name for name, tool in _COMMANDS.items() if shutil.which(tool)]
    if _SYSTEMD.is_dir():
        launchers.append("systemd")
    return Machine(
        socket.gethostname(),
        devices(),
        usable_cpus(),
        available_bytes() or 0,
        tuple(sorted(launchers)),
    )
