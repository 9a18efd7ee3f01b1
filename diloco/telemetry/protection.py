"""The token and the certificate of a metrics server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Protection:
    """Nothing of both on loopback.

    Attributes:
        token: Bearer token; empty: none is asked for.
        certificate: Gives certificates and key of this moment as PEM; None: plain HTTP.
    """

    token: str = field(default="", repr=False)
    certificate: Callable[[], bytes] | None = None
