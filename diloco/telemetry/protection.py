"""What a scrape of metrics must show, and what it is shown; needs nothing of what serves them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Protection:
    """Nothing of both on loopback.

    Attributes:
        token: Bearer token; empty: none is asked for.
        certificate: PEM file with certificate and key; None: plain HTTP.
    """

    token: str = field(default="", repr=False)
    certificate: Path | None = None
