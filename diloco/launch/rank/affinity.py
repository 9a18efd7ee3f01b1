"""Binds a rank to the CPUs next to its device: memory of another socket is slower to copy from.

Linux says which NUMA node a PCI device hangs on. CPUs that this process was not given (taskset,
cgroups, Slurm's binding) stay out; where none is left, or the node is not known, nothing changes.
`torchrun --numa-binding node` does so as well.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_SYSTEM = Path("/sys")


def bind_next_to(device: torch.device) -> None:
    """Bind this process, and threads that it starts from now on, to the CPUs next to a device.

    Args:
        device: Of this rank; on a CPU nothing changes.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    at: Any = torch.cuda.get_device_properties(device)  # its type does not say all that it has
    address = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    if near := cpus_next_to(address, _SYSTEM) & allowed:
        os.sched_setaffinity(0, near)
    logger.info("device=%s at=%s cpus=%d of %d", device, address, len(near), len(allowed))


def cpus_next_to(address: str, system: Path) -> set[int]:
    """Return the CPUs of the NUMA node of a PCI device; empty: it is not known.

    Args:
        address: DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal digits.
        system: Where sysfs is mounted.
    """
    try:
        node = int((system / f"bus/pci/devices/{address}/numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text()
        ranges = [part.partition("-") for part in listed.strip().split(",") if part]
        return {
            cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)
        }
    except (OSError, ValueError):  # no such node: -1 of a machine with one
        return set()
