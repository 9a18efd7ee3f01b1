"""Rows of `diloco sim check`: a published claim, ours next to it, and whether they agree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One claim.

    Attributes:
        target: Its name, such as A5.
        what: What is compared, with its inputs.
        published: The published figure, or the condition.
        ours: What the simulators say.
        allowed: How far off ours may be.
        is_met: Whether it is not.
        source: Of the claim.
        missed: Why ours is known not to reach the published figure, where ours is what it has been;
            empty: nothing is known, and not to reach it is a defect.
    """

    target: str
    what: str
    published: str
    ours: str
    allowed: str
    is_met: bool
    source: str
    missed: str = ""

    @property
    def verdict(self) -> Literal["pass", "miss", "FAIL"]:
        """Say whether it is met; if not, whether that is known, or a defect."""
        if self.is_met:
            return "pass"
        return "miss" if self.missed else "FAIL"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, hence `Any`."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Miss:
    """A published figure that ours does not reach: what ours is instead, and why."""

    ours: float
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of a paper and ours: `within` is what is allowed, absolute or of the target.

    Attributes:
        name: Which of the targets.
        what: The figure in words.
        target: As published.
        ours: As computed.
        within: Largest difference allowed.
        is_relative: Whether `within` is a share of the target.
        unit: Of both.
        source: Paper and table.
        holds: Whether what else must be true for the figure to mean anything is; `what` names it.
        miss: Known figure of ours, where it does not reach the target; another one is a defect.
    """

    name: str
    what: str
    target: float
    ours: float
    within: float
    is_relative: bool
    unit: str
    source: str
    holds: bool = True
    miss: Miss | None = None

    @property
    def is_met(self) -> bool:
        """Whether ours is near enough."""
        return self.holds and self._is_near(self.target)

    @property
    def row(self) -> CheckRow:
        """The same in words."""
        unit = f" {self.unit}" if self.unit else ""
        off = f"+-{self.within:.0%}" if self.is_relative else f"+-{self.within:.3g}"
        is_known = self.miss is not None and self.holds and self._is_near(self.miss.ours)
        return CheckRow(
            self.name,
            self.what,
            f"{self.target:g}{unit}",
            f"{self.ours:.4g}{unit}",
            off if self.within > 1e-3 else "none",
            self.is_met,
            self.source,
            self.miss.why if self.miss is not None and is_known else "",
        )

    def _is_near(self, figure: float) -> bool:
        allowed = self.within * (abs(figure) if self.is_relative else 1.0)
        return abs(self.ours - figure) <= allowed * (1 + 1e-9)
