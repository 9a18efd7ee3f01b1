"""Priority over ordinary processes, for what must not be late when the machine is busy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def be_realtime() -> bool:
    """Give this thread the lowest real-time priority; false where that is not allowed."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        return True
    return False


@contextlib.contextmanager
def realtime() -> Iterator[None]:
    """Have real-time priority in this thread, where that is allowed, while the context lasts."""
    is_realtime = be_realtime()
    try:
        yield
    finally:
        if is_realtime:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
