"""Errors of the transport.

    TransportError              .is_retryable, .peer, .method
      ConnectError              the peer cannot be reached                          retryable
      DeadlineExceeded          no answer within the deadline                       retryable
      PeerReset                 the connection broke in the middle of a call        retryable
      FrameError                a frame says what no peer of this protocol says     not
        DamagedFrame            bytes are no frame of this protocol                 retryable
      ChecksumMismatch          a message arrived damaged                           retryable
      MessageTooLarge           a declared size is over what the receiver allows    not
      VersionMismatch           the peer speaks another protocol version            not
      HandlerFailed             the peer's handler raised, or has no such method    not
      OutOfRange                a number or text of the message cannot be here       not
      Unauthorised              the peer does not know the caller, or refuses it    not
      Overloaded                the peer has too much to do for the caller now      retryable
        NotYet                  it has no room for the payload, and keeps a place   retryable
      TransportClosed           this end was closed by its owner                    not

What `is_damage` came to harm on the way, and is asked for again from the last good byte; of a peer
that sends nothing else `retry` has enough in time.

Anyone who calls a transport sees these and nothing else; `diloco.island.exchange.retried_calls`
maps them onward.
"""

from __future__ import annotations


class TransportError(Exception):
    """Any failure of a call; says which call, to whom, and whether trying again can help."""

    is_retryable = False
    is_damage = False

    def __init__(self, message: str, *, peer: str = "", method: str = "") -> None:
        """Keep where it happened; `message` says what was attempted and with which values."""
        where = f" [{method or '?'} -> {peer or '?'}]" if peer or method else ""
        super().__init__(message + where)
        self.peer = peer
        self.method = method


class ConnectError(TransportError):
    """The peer cannot be reached."""

    is_retryable = True


class DeadlineExceeded(TransportError):
    """No complete answer within the deadline of the call."""

    is_retryable = True


class PeerReset(TransportError):
    """The connection broke in the middle of a call."""

    is_retryable = True


class FrameError(TransportError):
    """A frame arrived as it was sent, and says what no peer of this protocol says."""


class DamagedFrame(FrameError):
    """The bytes are not a frame of this protocol; what was lost of one is no frame either."""

    is_retryable = True
    is_damage = True


class ChecksumMismatch(TransportError):
    """A message does not match the checksum that travelled with it."""

    is_retryable = True
    is_damage = True


class MessageTooLarge(TransportError):
    """A declared size is over what the receiver allows; nothing was allocated."""


class VersionMismatch(TransportError):
    """The peer speaks another version of the wire protocol."""


class HandlerFailed(TransportError):
    """The peer's handler raised, or does not exist; its message is carried over."""


class OutOfRange(TransportError):
    """A field of the message says what cannot be; the peer has changed nothing."""


class Unauthorised(TransportError):
    """The peer does not know the caller, or the caller may not do this."""


class Overloaded(TransportError):
    """A limit of the peer is reached; the call was not begun."""

    is_retryable = True


class NotYet(Overloaded):
    """The peer has no room for the payload yet; for some seconds it keeps the call's place.

    Anyone who waits in this way is served: the next attempt asks before it sends
    (`transfer.Transfer.asks_first`).
    """


class TransportClosed(TransportError):
    """This end was closed by its owner, before the call or during it."""
