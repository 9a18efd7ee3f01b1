"""Runs the handler of an incoming call, for every kind of server."""

from __future__ import annotations

import asyncio
import logging

from diloco.transport.calls.limits import Lines
from diloco.transport.contracts import Handler, Handlers, IncomingCall, Reply
from diloco.transport.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    FrameError,
    HandlerFailed,
    MessageTooLarge,
    NotYet,
    OutOfRange,
    Overloaded,
    PeerReset,
    TransportError,
    Unauthorised,
    VersionMismatch,
)
from diloco.transport.framing import check_header

_log = logging.getLogger(__name__)

#: The caller's own fault: no trace of ours explains it.
_REFUSALS = (
    FrameError
    | ChecksumMismatch
    | DeadlineExceeded
    | MessageTooLarge
    | VersionMismatch
    | OutOfRange
    | Unauthorised
    | Overloaded
)
_SHOWN = 100


async def dispatch(handlers: Handlers, call: IncomingCall, lines: Lines) -> Reply:
    """Run the handler of `call`; log what goes wrong and say it as the caller shall hear it.

    Args:
        handlers: Coroutines by method name.
        call: What came.
        lines: How much of what goes wrong is logged.

    Raises:
        TransportError: `HandlerFailed` for whatever the handler raised, a failed call that it
            made to somebody else included; what is wrong with the frames of this call or its
            reply keeps its class.
    """
    try:
        reply = await handler_of(handlers, call.method)(call)
        check_header(len(reply.header))
        return reply
    except Exception as error:
        _report(error, call, lines)
        raise as_peer_error(error) from error


def handler_of(handlers: Handlers, method: str) -> Handler:
    """Find the handler of a method.

    Raises:
        HandlerFailed: If there is none.
    """
    if (handler := handlers.get(method)) is None:
        raise HandlerFailed(f"no method {method[:_SHOWN]!r} here, only {sorted(handlers)}")
    return handler


def _report(error: Exception, call: IncomingCall, lines: Lines) -> None:
    """Log why a call failed; with its trace only where that is our own failure."""
    if isinstance(error, NotYet):
        level, what = logging.DEBUG, "call put off"
    elif isinstance(error, PeerReset):  # the next attempt goes on with it
        level, what = logging.INFO, "call broken off"
    elif isinstance(error, _REFUSALS):
        level, what = logging.WARNING, "call refused"
    else:
        level, what = logging.WARNING, "handler failed"
    if not _log.isEnabledFor(level):
        return
    if (unsaid := lines.line(asyncio.get_running_loop().time())) is None:
        return
    _log.log(
        level,
        "%s method=%s peer=%s: %s%s",
        what,
        call.method[:_SHOWN],
        call.caller.uri if call.caller else call.peer,
        error,
        f" ({unsaid} more calls failed before, unsaid)" if unsaid else "",
        exc_info=None if isinstance(error, TransportError) else error,
    )


def as_peer_error(error: Exception) -> TransportError:
    """Turn what went wrong here into what the caller is told."""
    if isinstance(error, _REFUSALS | HandlerFailed):
        return type(error)(str(error))
    return HandlerFailed(f"{type(error).__name__}: {error}")
