"""Keeps the settings that operators have changed, and the list of their commands: pure.

    policy/N       {key, value}: what an operator set, in order
    operation/N    {number, ...}: what an operator did, the newest ones, for people
    revoked/SERIAL identity: a certificate that an operator took back

Source: PROTOCOL.md, "Operators and live policy".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from diloco.protocol.run.admission import Entries

#: What operators did that is remembered, the newest.
REMEMBERED_OPERATIONS = 1000


class Settings:
    """Those of one run; values are of any JSON type, hence `Any`."""

    def __init__(self) -> None:
        """Begin with none."""
        self._by_revision: dict[int, tuple[str, Any]] = {}
        self._num_operations = 0
        self._revoked: set[int] = set()

    @property
    def revision(self) -> int:
        """Counter of what was set."""
        return max(self._by_revision, default=0)

    @property
    def policy(self) -> dict[str, Any]:
        """What was set, by dotted key; the newest value of each."""
        return {key: value for _, (key, value) in sorted(self._by_revision.items())}

    @property
    def policy_json(self) -> str:
        """The same as it is told; empty: nothing was set."""
        return json.dumps(self.policy) if self._by_revision else ""

    def forked(self) -> Settings:
        """Return a copy; what is applied to it changes nothing here."""
        other = copy.copy(self)
        other._by_revision = self._by_revision.copy()
        other._revoked = self._revoked.copy()
        return other

    def apply(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take over what is durable; entries of others are passed over."""
        for key, value in entries:
            match key.partition("/"):
                case ("policy", _, revision):
                    saved = json.loads(value)
                    self._by_revision[int(revision)] = saved["key"], saved["value"]
                case ("operation", _, _):
                    self._num_operations = max(self._num_operations, json.loads(value)["number"])
                case ("revoked", _, serial):
                    self._revoked.add(int(serial, 16))

    def is_revoked(self, serial: int) -> bool:
        """Whether the certificate with this serial number was taken back."""
        return serial in self._revoked

    def revoked(self, identity: str, serials: Iterable[int]) -> Entries:
        """Note that certificates are taken back."""
        new = (serial for serial in serials if serial not in self._revoked)
        return tuple((f"revoked/{serial:x}", identity) for serial in new)

    def changed(self, key: str, value: Any) -> Entries:
        """Note what an operator has set."""
        return ((f"policy/{self.revision + 1}", json.dumps({"key": key, "value": value})),)

    def operated(self, what: Mapping[str, Any]) -> Entries:
        """Note what an operator did; of so many only the newest are kept."""
        number = self._num_operations + 1
        key = f"operation/{number % REMEMBERED_OPERATIONS}"
        return ((key, json.dumps({"number": number, **what})),)
