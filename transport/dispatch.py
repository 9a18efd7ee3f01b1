"""From an incoming call to its handler, alike for every kind of server."""

from __future__ import annotations

import logging

from transport.contracts import Handlers, IncomingCall, Reply
from transport.errors import (
    ChecksumMismatch,
    FrameError,
    HandlerFailed,
    MessageTooLarge,
    NotYet,
    Overloaded,
    TransportError,
    Unauthorised,
    VersionMismatch,
)
from transport.framing import check_header

_log = logging.getLogger(__name__)

#: The caller's own fault: no trace of ours explains it.
_REFUSALS = (
    FrameError | ChecksumMismatch | MessageTooLarge | VersionMismatch | Unauthorised | Overloaded
)
_SHOWN = 100


async def dispatch(handlers: Handlers, call: IncomingCall) -> Reply:
    """Run the handler of `call`; log what goes wrong and say it as the caller shall hear it.

    Raises:
        TransportError: `HandlerFailed` for whatever the handler raised, a failed call that it
            made to somebody else included; what is wrong with the frames of this call or its
            reply keeps its class.
    """
    try:
        handler = handlers.get(call.method)
        if handler is None:
            method = call.method[:_SHOWN]
            raise HandlerFailed(f"no method {method!r} here, only {sorted(handlers)}")
        reply = await handler(call)
        check_header(len(reply.header))
        return reply
    except Exception as error:
        refused = isinstance(error, _REFUSALS)
        _log.log(
            logging.DEBUG if isinstance(error, NotYet) else logging.WARNING,
            "%s method=%s peer=%s: %s",
            "call refused" if refused else "handler failed",
            call.method[:_SHOWN],
            call.caller.uri if call.caller else call.peer,
            error,
            exc_info=None if refused else error,
        )
        raise as_peer_error(error) from error


def as_peer_error(error: Exception) -> TransportError:
    """Turn what went wrong here into what the caller is told."""
    if isinstance(error, _REFUSALS | HandlerFailed):
        return type(error)(str(error))
    return HandlerFailed(f"{type(error).__name__}: {error}")
