"""Shows the progress of long work in lines: none in its first seconds, then one every few.

A line is as good in a log as in a terminal, and nothing moves while other lines are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from diloco.transport.units import format_bytes

#: Seconds before the first line, and between lines.
INTERVAL_S = 5.0
_WIDTH = 20


def progress_bar(
    what: str, announce: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """Begin to watch some work.

    Args:
        what: The work, in words.
        announce: Called with the lines.
        clock: Monotonic, in seconds.

    Returns:
        To be called on the way with (bytes done, bytes to do); the latter may grow.
    """
    told_s = clock()

    def show(done: int, total: int) -> None:
        nonlocal told_s
        if (now := clock()) - told_s < INTERVAL_S:
            return
        told_s = now
        share = done / max(total, 1)
        bar = "#" * round(_WIDTH * share)
        announce(
            f"{what} [{bar:-<{_WIDTH}}] {share:.0%}, {format_bytes(done)} of {format_bytes(total)}"
        )

    return show
