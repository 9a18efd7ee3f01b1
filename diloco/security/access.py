"""Decides who may call a method: one role each, and an island only in its own name.

Stands before every handler of coordinator and syncer. Where callers are known (certificates
or tokens) it compares them with the method's role and with the island that the header names; where
they are not, what is for the operator alone is told on this machine only. Known or not, a header
that is no message, of another protocol version, or that says what cannot be in this run
(`diloco.protocol.run.peer_bounds`), goes no further. Grants (`diloco.coordinator.grants`) are
checked behind it. A method without a rule is served to nobody.

Source: PROTOCOL.md, "Certificates and access".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from google.protobuf.message import DecodeError, Message

from diloco.protocol.run.peer_bounds import RunLimits, problem_of, surplus_of
from diloco.protos.baseline_pb2 import VectorHeader
from diloco.protos.control_pb2 import (
    ClockRequest,
    JoinRequest,
    LeaveRequest,
    OperateRequest,
    ReportRequest,
    RoundReport,
    RunStateRequest,
    StatusRequest,
    SyncerHelloRequest,
)
from diloco.protos.fragment_pb2 import (
    DeclineRequest,
    FetchHeader,
    PinRequest,
    PollRequest,
    StateGetHeader,
    StatePutHeader,
    SubmitHeader,
    UploadHeader,
)
from diloco.protos.payload_pb2 import ObjectCall
from diloco.refusals import Cause
from diloco.transport.contracts import PROTOCOL_VERSION, Handler, Handlers, IncomingCall, Reply
from diloco.transport.errors import FrameError, OutOfRange, Unauthorised, VersionMismatch
from diloco.transport.identity import Identity, Role

#: Of a message, hence any: which island it speaks for.
_IslandOf: TypeAlias = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """What one method asks of its caller.

    Attributes:
        role: What the caller must be; None: anything of the run.
        message: Of the header.
        island_of: The island that a message speaks for, which must be the caller; None: none.
        is_private: Whether strangers hear nothing even where callers are not known, because
            plaintext was declared: beyond this machine the method then answers nobody.
    """

    role: Role | None
    message: type[Message]
    island_of: _IslandOf | None = None
    is_private: bool = False


def _granted(message: Any) -> str:
    return str(message.grant.island)


def _named(message: Any) -> str:
    return str(message.island)


RULES: Mapping[str, Rule] = {
    "control.join": Rule(Role.ISLAND, JoinRequest, _named),
    "control.report": Rule(Role.ISLAND, ReportRequest, _granted),
    "control.leave": Rule(Role.ISLAND, LeaveRequest, _granted),
    "control.status": Rule(Role.OPERATOR, StatusRequest, is_private=True),
    "control.operate": Rule(Role.OPERATOR, OperateRequest, is_private=True),
    "control.standing": Rule(Role.ISLAND, RunStateRequest, _named),
    "control.clock": Rule(None, ClockRequest),
    "control.syncer_hello": Rule(Role.SYNCER, SyncerHelloRequest),
    "control.round_report": Rule(Role.SYNCER, RoundReport),
    "fragment.submit": Rule(Role.ISLAND, SubmitHeader, _granted),
    "fragment.decline": Rule(Role.ISLAND, DeclineRequest, _granted),
    "fragment.upload": Rule(Role.ISLAND, UploadHeader, _granted),
    "fragment.poll": Rule(Role.ISLAND, PollRequest, _granted),
    "fragment.fetch": Rule(Role.ISLAND, FetchHeader, _granted),
    "fragment.pin": Rule(Role.ISLAND, PinRequest, _granted),
    "heal.put": Rule(Role.ISLAND, StatePutHeader, _granted),
    "heal.get": Rule(Role.ISLAND, StateGetHeader, _granted),
    # The call that is in it has its own rule.
    "payload.call": Rule(Role.ISLAND, ObjectCall),
    "baseline.vector": Rule(Role.ISLAND, VectorHeader, _named),
}
#: Its handler answers other versions itself, in a reply that says what to install.
_ANSWERS_VERSIONS = "control.join"


def _uncounted(island: str, cause: Cause) -> None:
    """Count nothing: there is nobody to show it to."""


def guarded(
    handlers: Handlers,
    limits: RunLimits | None = None,
    on_refused: Callable[[str, Cause], None] = _uncounted,
) -> Handlers:
    """Put its rule before each handler.

    Args:
        handlers: Coroutines by method name.
        limits: What there can be in the run; None: in any.
        on_refused: Counts a message that says what cannot be, by island (empty where nobody has
            proved whose it was) and cause.

    Raises:
        KeyError: If a method has none.
    """
    of_run = limits or RunLimits()

    def refuse(caller: Identity | None, method: str, problem: str) -> NoReturn:
        is_known = caller is not None and caller.role is Role.ISLAND
        on_refused(caller.name if caller is not None and is_known else "", Cause.BOUNDS)
        raise OutOfRange(f"{method} is refused, and has changed nothing: {problem}")

    return {
        method: _guarded(method, RULES[method], handlers[method], of_run, refuse)
        for method in handlers
    }


def _guarded(
    method: str,
    rule: Rule,
    handler: Handler,
    limits: RunLimits,
    refuse: Callable[[Identity | None, str, str], NoReturn],
) -> Handler:
    kind: Any = rule.message.DESCRIPTOR  # upb's own has the same face

    async def handle(call: IncomingCall) -> Reply:
        message: Any
        if problem := surplus_of(call.header, kind, limits):
            refuse(call.caller, method, problem)
        try:
            message = rule.message.FromString(call.header)
        except DecodeError as error:
            raise FrameError(
                f"the header of {method} is no {rule.message.DESCRIPTOR.name}"
            ) from error
        if message.protocol_version != PROTOCOL_VERSION and method != _ANSWERS_VERSIONS:
            raise VersionMismatch(
                f"the caller speaks protocol version {message.protocol_version}, this process "
                f"{PROTOCOL_VERSION}: run the same release at both ends"
            )
        if call.caller is not None:
            _insist(call.caller, method, rule, message)
        elif rule.is_private and not call.is_local:
            raise Unauthorised(
                f"{method} is answered beyond the coordinator's machine only to callers that are "
                f"known, and this run asks nobody who he is: type it there (diloco status "
                f"127.0.0.1:PORT), or make certificates (diloco certs init RUN.toml, "
                f"transport.certs, --certs), or tokens (diloco certs token operator, "
                f"transport.tokens, --tokens)"
            )
        if problem := problem_of(message, limits):
            refuse(call.caller, method, problem)
        return await handler(call)

    return handle


def _insist(caller: Identity, method: str, rule: Rule, message: Message) -> None:
    if rule.role is not None and caller.role is not rule.role:
        raise Unauthorised(f"{caller.uri} may not call {method}, which is for role {rule.role}")
    if rule.island_of is not None and rule.island_of(message) != caller.name:
        raise Unauthorised(
            f"{caller.uri} may not speak for island {rule.island_of(message)[:100]!r}"
        )
