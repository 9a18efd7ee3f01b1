"""The clock of the running event loop: monotonic, and virtual where the loop is."""

from __future__ import annotations

import asyncio


def loop_now() -> float:
    """Return the seconds since some moment."""
    return asyncio.get_running_loop().time()
