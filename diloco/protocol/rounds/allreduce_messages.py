"""Messages of the all-reduce exchange as the values that its machines know, and back."""

from __future__ import annotations

from dataclasses import asdict

from diloco.protocol.rounds.allreduce import Announced, Assignment
from diloco.protocol.rounds.messages import key_message, key_of
from diloco.protocol.rounds.terms import Contributor, LaneArrival
from diloco.protos import allreduce_pb2 as wire


def assignment_message(assignment: Assignment) -> wire.Assignment:
    """Return an assignment as it travels."""
    return wire.Assignment(
        key=key_message(assignment.key),
        members=assignment.members,
        contributors=[wire.Contributor(**asdict(c)) for c in assignment.contributors],
        is_flush=assignment.is_flush,
        refused=dict(assignment.refused),
        generation=assignment.generation,
    )


def assignment_of(message: wire.Assignment) -> Assignment:
    """Return the assignment that arrived."""
    return Assignment(
        key_of(message.key),
        tuple(message.members),
        tuple(
            Contributor(
                c.island,
                c.incarnation,
                c.weight_tokens,
                c.weight_steps,
                c.sent_at_inner_step,
                tuple(c.lane_digests),
            )
            for c in message.contributors
        ),
        message.is_flush,
        dict(message.refused),
        message.generation,
    )


def announced_of(message: wire.Announcement) -> Announced:
    """Return what the decider announced of a fragment."""
    return Announced(
        message.version if message.is_founded else -1,
        message.state_digest,
        message.attempt,
        assignment_of(message.assignment) if message.HasField("assignment") else None,
    )


def arrivals_of(request: wire.DeclareRequest) -> list[LaneArrival]:
    """Return the lanes that a declaration is about."""
    return [
        LaneArrival(
            key=key_of(request.key),
            island=request.grant.island,
            incarnation=request.grant.incarnation,
            lane_id=lane_id,
            digest=digest,
            weight_tokens=request.weight_tokens,
            weight_steps=request.weight_steps,
            sent_at_inner_step=request.sent_at_inner_step,
            is_flush=request.is_flush,
            step_tokens=request.grant.tokens_per_inner_step,
        )
        for lane_id, digest in enumerate(request.lane_digests)
    ]
