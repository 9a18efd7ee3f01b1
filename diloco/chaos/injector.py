"""The interface of all injectors of faults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from diloco.chaos.environment import ChaosEnvironment
from diloco.chaos.plan import TimedFault


class Injector(ABC):
    """One fault being done.

    Attributes:
        fired: Whether it took effect.
        note: What a reader of the log wants to know.
        kept_s: Seconds for which it went on beyond its time, because nobody had met it.
        is_same: Whether the process that it was done to still serves, if it should.
        had_chance: Whether it could have taken effect: its target did not end before it was met.
        place: What only one fault at a time can be done to; None: they do not meet.
    """

    place: tuple[Path, str] | None = None

    def __init__(self, environment: ChaosEnvironment, fault: TimedFault) -> None:
        """Do nothing yet."""
        self.environment = environment
        self.fault = fault
        self.fired = False
        self.note = ""
        self.kept_s = 0.0
        self.is_same = True
        self.had_chance = True

    @property
    def is_awaiting(self) -> bool:
        """Whether nobody has met it yet, and somebody may."""
        return False

    @abstractmethod
    def begin(self) -> bool:
        """Do it; false if the target is not there now."""

    @abstractmethod
    def end(self) -> bool:
        """Undo it; false if that takes longer. Called from `fault.lasts_s` after its begin on."""
