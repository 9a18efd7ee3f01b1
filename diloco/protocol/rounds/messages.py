"""Messages of the data plane as the values that the machines know, and back.

Used at both ends: by the syncer and by an island's exchange. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from diloco.protocol.rounds.terms import Admission, LaneArrival, Outcome, OutcomeKind, RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.transport.errors import FrameError

#: Round keys that one question may name for each fragment; an island has one outstanding of each.
MOST_KEYS = 16
#: Whole models move in so many lanes at once, of one rank: each of hundreds would get too little of
#: a thin link.
MOST_UPLOADS = 16

_OUTCOME_KIND = {
    OutcomeKind.INCLUDED: wire.OUTCOME_KIND_INCLUDED,
    OutcomeKind.NOT_INCLUDED: wire.OUTCOME_KIND_NOT_INCLUDED,
    OutcomeKind.EXPIRED: wire.OUTCOME_KIND_EXPIRED,
    OutcomeKind.REFUSED: wire.OUTCOME_KIND_REFUSED,
}
_KIND_OF_OUTCOME = {number: kind for kind, number in _OUTCOME_KIND.items()}

SUBMIT_STATUS: Mapping[Admission, wire.SubmitStatus] = {
    Admission.ACCEPTED: wire.SUBMIT_STATUS_RECEIVED,
    Admission.REPEAT: wire.SUBMIT_STATUS_REPEAT,
    Admission.OVER: wire.SUBMIT_STATUS_OUTCOME,
    Admission.CONFLICT: wire.SUBMIT_STATUS_CONFLICT,
    Admission.FENCED: wire.SUBMIT_STATUS_FENCED,
    Admission.NOT_OPEN: wire.SUBMIT_STATUS_NOT_OPEN,
    Admission.INVALID: wire.SUBMIT_STATUS_INVALID,
}


def key_message(key: RoundKey) -> wire.RoundKey:
    """Return a round key as it travels."""
    return wire.RoundKey(**asdict(key))


def key_of(message: wire.RoundKey) -> RoundKey:
    """Return the round key that arrived."""
    return RoundKey(message.timeline, message.fragment_id, message.version, message.attempt)


def keys_of(messages: Sequence[wire.RoundKey], num_fragments: int) -> list[RoundKey]:
    """Return the distinct keys that a question names.

    Raises:
        FrameError: If they are more than an island of this run can ask about.
    """
    if len(messages) > (most := MOST_KEYS * num_fragments):
        raise FrameError(
            f"{len(messages)} round keys in one question; {most} are allowed: {MOST_KEYS} for "
            f"each of the {num_fragments} fragments"
        )
    return list(dict.fromkeys(map(key_of, messages)))


def outcome_message(outcome: Outcome) -> wire.Outcome:
    """Return an outcome as it travels."""
    return wire.Outcome(
        key=key_message(outcome.key), kind=_OUTCOME_KIND[outcome.kind], reason=outcome.reason
    )


def outcome_of(message: wire.Outcome) -> Outcome:
    """Return the outcome that arrived."""
    return Outcome(key_of(message.key), _KIND_OF_OUTCOME[message.kind], message.reason)


def arrival_of(header: wire.SubmitHeader) -> LaneArrival:
    """Return the lane that a header declares."""
    return LaneArrival(
        key=key_of(header.key),
        island=header.grant.island,
        incarnation=header.grant.incarnation,
        lane_id=header.lane_id,
        digest=header.digest,
        weight_tokens=header.weight_tokens,
        weight_steps=header.weight_steps,
        sent_at_inner_step=header.sent_at_inner_step,
        is_flush=header.is_flush,
        step_tokens=header.grant.tokens_per_inner_step,
    )
