"""From an incoming call to its handler, alike for every kind of server."""

from __future__ import annotations

import logging

from transport.contracts import Handlers, IncomingCall, Reply
from transport.errors import (
    ChecksumMismatch,
    FrameError,
    HandlerFailed,
    MessageTooLarge,
    TransportError,
    VersionMismatch,
)
from transport.framing import check_header

_log = logging.getLogger(__name__)


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
            raise HandlerFailed(f"no method {call.method!r} here, only {sorted(handlers)}")
        reply = await handler(call)
        check_header(len(reply.header))
        return reply
    except Exception as error:
        _log.warning("handler failed method=%s peer=%s", call.method, call.peer, exc_info=error)
        raise as_peer_error(error) from error


def as_peer_error(error: Exception) -> TransportError:
    """Turn what went wrong here into what the caller is told."""
    kept = FrameError | ChecksumMismatch | MessageTooLarge | VersionMismatch | HandlerFailed
    if isinstance(error, kept):
        return type(error)(str(error))
    return HandlerFailed(f"{type(error).__name__}: {error}")
