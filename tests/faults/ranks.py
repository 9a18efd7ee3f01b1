"""Finding the rank processes of a supervisor, to kill them."""

import re
from pathlib import Path


def pid_of_rank(supervisor: int, island_rank: int) -> int:
    """Find a rank among the children of its supervisor."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = re.search(r"PPid:\s+(\d+)", (entry / "status").read_text())
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        is_child = parent is not None and int(parent[1]) == supervisor
        if is_child and f"RANK={island_rank}".encode() in environment:
            return int(entry.name)
    raise AssertionError(f"no rank {island_rank} below process {supervisor}")
