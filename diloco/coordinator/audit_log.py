"""What the audit log holds besides the versions: who took part, and by which policy.

    members/GENERATION   islands that changed: {island: {lease, incarnation, fenced_below, reason}};
                         empty where a pause began or ended
    policy/REVISION      {key, value}, as the records name the revision that they were made by
    operation/NUMBER     what an operator did, who it was, in words, and when
    timeline/NUMBER      a resume, from which inner step
    expiry/KEY           an attempt that expired: who was missing, and why
    repair/WHAT          a part of the store that was made again
    alarm/REPORTER/...   an alarm that began to hold (`diloco.coordinator.reported_alarms`)
    conflict/VERSION     a version that was published as two things: the digest that was indexed
                         first, and the one that was reported later

Each is written in the same transaction as the fact, so that neither is there without the other; an
expiry, whose fact is the syncer's, once it is reported: those of a syncer that was killed before
may be missing here, and the attempt in a record's header counts them all.

Source: PROTOCOL.md, "Audit log".
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from diloco.coordinator.journal import AuditEntry
from diloco.protocol.rounds.terms import RoundKey
from diloco.protocol.run.admission import Entries

_OF_MEMBERS = ("lease", "incarnation", "fenced_below", "reason")


def audit_entries_of(entries: Entries) -> list[AuditEntry]:
    """Return what the audit log keeps of entries of the membership; of most of them nothing."""
    told = []
    for key, value in entries:
        kind, _, name = key.partition("/")
        match kind:
            case "generation":
                told.append(AuditEntry("members", value, json.dumps(_members(entries))))
            case "policy":
                told.append(AuditEntry("policy", name, value))
            case "operation":
                told.append(AuditEntry("operation", str(json.loads(value)["number"]), value))
            case "timeline":
                told.append(AuditEntry("timeline", str(json.loads(value)["timeline"]), value))
    return told


def _members(entries: Entries) -> dict[str, dict[str, object]]:
    members = {}
    for key, value in entries:
        kind, _, name = key.partition("/")
        if kind == "island":
            saved = json.loads(value)
            saved["incarnation"] = max(saved["incarnations"].values(), default=0)
            members[name] = {field: saved[field] for field in _OF_MEMBERS}
    return members


def repair_entry(record_json: str) -> AuditEntry | None:
    """Return the entry of a version that was taken back from an island; None: it was merged."""
    header = json.loads(record_json)
    if not (island := header.get("repaired")):
        return None
    what = {name: header.get(name) for name in ("timeline", "fragment_id", "version", "digest")}
    key = f"t{what['timeline']}/f{what['fragment_id']}/v{what['version']}"
    return AuditEntry("repair", key, json.dumps({**what, "from_island": island}))


def expiry_entry(key: RoundKey, missing: Sequence[str], reason: str) -> AuditEntry:
    """Return the entry of an attempt that expired."""
    content = {"missing": list(missing), "reason": reason}
    return AuditEntry("expiry", str(key), json.dumps(content))
