"""A process that nobody speaks to any more: it ends by itself, since nobody else would end it.

Silence is counted by looking: what this process slept through, frozen or starved, is nobody's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diloco.errors import CoordinatorUnavailable
from diloco.loop_clock import loop_now
from diloco.syncer.reporter import HELLO_INTERVAL_S

_LEAST_REPORTS = 3
_LOOKS = 20
_MOST_LOOK_S = 5.0


async def end_once_orphaned(num_words: Callable[[], int], unreachable_s: float) -> None:
    """Raise once nobody has said a word for `unreachable_s` seconds; else go on for ever.

    Args:
        num_words: Counts what was heard, of whoever counts.
        unreachable_s: `transport.unreachable`; shorter than reports are apart it would end one
            whose coordinator lives, so some of these are waited for in any case.

    Raises:
        CoordinatorUnavailable: Then.
    """
    unreachable_s = max(unreachable_s, _LEAST_REPORTS * HELLO_INTERVAL_S)
    look_s = min(unreachable_s / _LOOKS, _MOST_LOOK_S)
    heard, silent_s, looked = num_words(), 0.0, loop_now()
    while silent_s < unreachable_s:
        await asyncio.sleep(look_s)
        now = loop_now()
        silent_s += min(now - looked, 2 * look_s)
        looked = now
        if (words := num_words()) != heard:
            heard, silent_s = words, 0.0
    raise CoordinatorUnavailable(
        f"for {unreachable_s:g} s (transport.unreachable) neither the coordinator has answered nor "
        "any island called: this syncer ends. All that it has published is durable, and the "
        "coordinator starts it again: diloco coordinator RUN.toml"
    )
