"""A fault being done: how it is begun and ended, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from diloco.chaos.environment import ChaosEnvironment
from diloco.chaos.plan import TimedFault

#: Does a fault: returns at once if its target is not there; else yields when the fault has begun,
#: goes on when it is to end, yields as long as that takes, and returns.
Doing: TypeAlias = "Callable[[Injector], Iterator[None]]"


@dataclass(slots=True)
class Injector:
    """One fault being done.

    Attributes:
        environment: The run.
        fault: The fault.
        doing: What does it.
        place: What only one fault at a time can be done to; None: they do not meet.
        fired: Whether it took effect.
        note: What a reader of the log wants to know.
        kept_s: Seconds for which it went on beyond its time, because nobody had met it.
        is_same: Whether the process that it was done to still serves, if it should.
        is_told: Whether `diloco status` had an alarm of it, if it should.
        had_chance: Whether it could have taken effect: its target did not end before it was met.
        is_unmet: Tells whether nobody has met it yet, and somebody may.
    """

    environment: ChaosEnvironment
    fault: TimedFault
    doing: Doing
    place: tuple[Path, str] | None = None
    fired: bool = False
    note: str = ""
    kept_s: float = 0.0
    is_same: bool = True
    is_told: bool = True
    had_chance: bool = True
    is_unmet: Callable[[], bool] = lambda: False
    _steps: Iterator[None] = field(default_factory=lambda: iter(()))

    def begin(self) -> bool:
        """Do it; false if the target is not there now."""
        self._steps = self.doing(self)
        return not self.end()

    def end(self) -> bool:
        """Undo it; false if that takes longer. Called from `fault.lasts_s` after its begin on."""
        for _ in self._steps:
            return False
        return True
