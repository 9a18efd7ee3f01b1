"""Who may look at a page: by which host, from which origin, with which token. Pure.

A page beyond loopback asks for a token. It is sent as a bearer's, or typed once: then a cookie
says who looks, whose value is drawn and of no use elsewhere. Host names are checked, so that a
name of somebody else that is pointed at this machine (DNS rebinding) is refused; the port is not,
since tunnels have their own.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import deque
from collections.abc import Collection, Mapping

#: Characters of a token at the least: nobody guesses it.
LEAST_TOKEN = 32
#: Seconds for which a cookie is good; and how many are, the newest.
SESSION_S = 12 * 3600.0
_MOST_SESSIONS = 1000
#: Seconds for which wrong tokens are counted, how many of all addresses: the newest; and by how
#: much each lets the answer to the next wrong one of its address wait, up to the most.
_WRONG_S, _MOST_WRONG, _DELAY_S, _MOST_DELAY_S = 60.0, 500, 0.25, 4.0
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
#: Pages of this server to which a login may lead back.
_OWN_PAGE = re.compile(r"/(?:compare|run/\d{1,4}/[a-z]{1,20})?(?:\?[A-Za-z0-9_=&%.+-]{0,300})?")

#: Sent with every answer. Pictures are SVG in the page itself, coloured by the style sheet.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "same-origin",  # with less, browsers hide the origin of forms from us, too
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Access:
    """Decides about calls; used from one thread.

    Args:
        token: That a caller shows; empty: none is asked for.
        hosts: By which the page may be called, besides those of loopback.
    """

    def __init__(self, token: str = "", hosts: Collection[str] = ()) -> None:
        """Begin with nobody signed in."""
        self._digest = hashlib.sha256(token.encode()).digest() if token else b""
        self._hosts = frozenset(host.lower() for host in (*_LOOPBACK, *hosts))
        self._sessions: dict[str, float] = {}
        self._wrong: deque[tuple[float, str]] = deque(maxlen=_MOST_WRONG)

    @property
    def asks_for_token(self) -> bool:
        """Whether a token is asked for."""
        return bool(self._digest)

    def is_host(self, header: str) -> bool:
        """Whether a call's Host header names this page."""
        host = re.sub(r":\d{1,5}$", "", header.lower())
        wildcard = "*." + host.partition(".")[2]
        return host in self._hosts or ("." in host and wildcard in self._hosts)

    def is_own_origin(self, origin: str, host: str) -> bool:
        """Whether a call that changes something comes from a page of this server."""
        return origin.lower().partition("://")[2] == host.lower() if origin else True

    def is_allowed(self, headers: Mapping[str, str], session: str, now: float) -> bool:
        """Whether a caller may look: by its cookie, or by a bearer's token."""
        if not self._digest:
            return True
        if self._sessions.get(session, 0.0) > now:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.is_token(token.strip())

    def is_token(self, token: str) -> bool:
        """Whether a token is the page's, however many wrong ones there were."""
        return hmac.compare_digest(hashlib.sha256(token.encode()).digest(), self._digest)

    def wrong_token(self, peer: str, now: float) -> float:
        """Count a wrong token of an address; returns the seconds that its answer is to wait.

        Who shows the right one waits for nothing: callers behind one proxy have one address.
        """
        while self._wrong and self._wrong[0][0] < now - _WRONG_S:
            self._wrong.popleft()
        before = sum(each == peer for _, each in self._wrong)
        self._wrong.append((now, peer))
        return min(_DELAY_S * before, _MOST_DELAY_S)

    def sign_in(self, session: str, now: float) -> None:
        """Let a new session look; the oldest ends where there are too many."""
        self._sessions = {s: until for s, until in self._sessions.items() if until > now}
        if len(self._sessions) >= _MOST_SESSIONS:
            del self._sessions[min(self._sessions, key=lambda s: self._sessions[s])]
        self._sessions[session] = now + SESSION_S

    def sign_out(self, session: str) -> None:
        """End a session; harmless if it is none."""
        self._sessions.pop(session, None)


def own_page(path: str) -> str:
    """Give a page of this server to which a login leads; any other path: the first page."""
    return path if _OWN_PAGE.fullmatch(path) else "/"
