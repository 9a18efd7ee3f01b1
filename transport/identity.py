"""Identities of the processes of a run, as text in certificates and tokens.

    diloco://RUN/coordinator   diloco://RUN/syncer   diloco://RUN/operator
    diloco://RUN/island/NAME   diloco://RUN/ca (the run's own authority)

Pure; what an identity may do is not decided here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_RUN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_WHO = r"(?:(?P<role>coordinator|syncer|operator|ca)|island/(?P<name>[a-z0-9-]+))"
_URI = re.compile(rf"diloco://(?P<run>{_RUN})/{_WHO}")
_SHORT = re.compile(_WHO)


class Role(StrEnum):
    """What a process is for."""

    COORDINATOR = "coordinator"
    SYNCER = "syncer"
    ISLAND = "island"
    OPERATOR = "operator"
    CA = "ca"


#: Roles with the issuer at their site. A client insists on the role of whom it calls, not on an
#: address.
SERVERS = frozenset({Role.COORDINATOR, Role.SYNCER})


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, or one site's processes: all ranks of an island are the same identity."""

    run: str
    role: Role
    name: str = ""

    @classmethod
    def from_uri(cls, uri: str) -> Identity:
        """Read what `uri` wrote.

        Raises:
            ValueError: If it is no identity of a run.
        """
        match = _URI.fullmatch(uri)
        if match is None:
            raise ValueError(f"{uri!r} is no identity, such as diloco://RUN/island/NAME")
        return cls(match["run"], Role(match["role"] or Role.ISLAND), match["name"] or "")

    @classmethod
    def from_short(cls, run: str, short: str) -> Identity:
        """Read what `short` wrote: a role, or ``island/NAME``.

        Raises:
            ValueError: If it is neither.
        """
        match = _SHORT.fullmatch(short)
        if match is None or match["role"] == Role.CA:
            raise ValueError(f"{short!r}: write coordinator, syncer, operator or island/NAME")
        return cls(run, Role(match["role"] or Role.ISLAND), match["name"] or "")

    @property
    def short(self) -> str:
        """Without the run: ``island/eu-west``, ``coordinator``."""
        return f"{self.role}/{self.name}" if self.name else str(self.role)

    @property
    def uri(self) -> str:
        """The whole of it, as certificates carry it."""
        return f"diloco://{self.run}/{self.short}"

    @property
    def file_stem(self) -> str:
        """Name of its files: ``island-eu-west``, ``coordinator``."""
        return self.short.replace("/", "-")


def server_name(role: Role) -> str:
    """Name in a server's certificate that clients insist on, wherever the server is reached."""
    return f"{role}.diloco"
