"""Serves the page of runs over HTTP: starlette for routes, uvicorn for connections.

Everything that is asked for passes `_Guard` first. Acts alone change a run, where the page was
started with them: forms of signed-in callers, from this page, each confirmed (`acts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from diloco.errors import ConfigError, CoordinatorUnavailable
from diloco.page.access import HEADERS, SESSION_S, Access, own_page
from diloco.page.acts import Previews, preview_of
from diloco.page.rendering import (
    COMPARE,
    VIEWS,
    Frame,
    Query,
    acts_page,
    asset,
    login_page,
    page_of,
    problem_page,
    sections_of,
)
from diloco.page.run_view import RunView
from diloco.page.sources import LOOK_S, Source

_ASSETS = {
    "page.css": "text/css",
    "live.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
#: Seconds after which a live stream ends; the browser opens another one, which is checked again.
_STREAM_S = 900.0
_MOST_STREAMS = 100
_MOST_CONNECTIONS = 400
#: Connections that have asked for nothing yet; of more the oldest is closed.
_MOST_SILENT = 100
_MOST_FORM_BYTES = 4096
#: Answers to wrong tokens that wait at once, at most.
_MOST_WAITING = 50
_END_S = 1
#: Seconds that a caller has for what it sends; and after which one that reads nothing is let go.
_CALL_S, _UNREAD_S = 5.0, 20.0


class Page:
    """The page of some runs.

    Args:
        sources: The runs; this page's from now on.
        access: Who may look.
        port: That it listens at; part of the cookie's name, as cookies know no ports.
        is_encrypted: Whether it is served over TLS.
        may_act: Whether live runs may be acted on; `access` must ask for a token then.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        access: Access,
        *,
        port: int,
        is_encrypted: bool,
        may_act: bool = False,
    ) -> None:
        """Make the routes."""
        assert access.asks_for_token or not may_act, "anyone could act"
        self._frame = Frame(can_sign_out=access.asks_for_token, may_act=may_act)
        self._previews = Previews()
        self._sources = tuple(sources)
        self._access = access
        self._is_encrypted = is_encrypted
        self._cookie = f"{'__Host-' if is_encrypted else ''}diloco-page-{port}"
        self._num_streams = 0
        self._ends = asyncio.Event()
        self._rendered: tuple[list[RunView], dict[tuple[object, ...], dict[str, str]]] = ([], {})
        routes = [
            Route("/", self._first),
            Route(f"/{COMPARE}", self._shown),
            Route(f"/{COMPARE}/live", self._live),
            Route("/run/{number}/acts", self._acts, methods=["GET", "POST"]),
            Route("/run/{number}/acts/done", self._act, methods=["POST"]),
            Route("/run/{number}/{view}", self._shown),
            Route("/run/{number}/{view}/live", self._live),
            Route("/asset/{name}", self._asset),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
        self._wrong_tokens = _WrongTokens(access)
        self.app: ASGIApp = _Guard(app, access, self._cookie, self._wrong_tokens)

    def end_streams(self) -> None:
        """Let live streams end now."""
        self._ends.set()

    async def close(self) -> None:
        """Release the runs."""
        for source in self._sources:
            await source.close()

    async def _first(self, _: Request) -> Response:
        return RedirectResponse(f"/{COMPARE}" if len(self._sources) > 1 else "/run/0/overview", 303)

    async def _shown(self, request: Request) -> Response:
        view, number = self._asked(request)
        runs = await self.look()
        query = Query.of(request.query_params)
        return HTMLResponse(page_of(view, runs, number, query, self._frame))

    async def _acts(self, request: Request) -> Response:
        """Show the acts of a run; of a form that was filled in, what would follow."""
        number = self._acted_on(request)
        runs = await self.look()
        if not runs[number].is_live:
            raise HTTPException(404, "Nothing can be done to a run that is read from files.")
        if request.method == "GET":
            return HTMLResponse(acts_page("acts", runs, number, {}, self._frame))
        try:
            run = runs[number]
            preview = preview_of(await _form(request), number, run.name, run.origin)
        except ConfigError as error:
            raise HTTPException(400, str(error)) from error
        drawn = secrets.token_urlsafe(32)
        self._previews.keep(drawn, preview, self._session(request), time.monotonic())
        values = {"preview": preview, "drawn": drawn, "problem": ""}
        return HTMLResponse(acts_page("preview", runs, number, values, self._frame))

    async def _act(self, request: Request) -> Response:
        """Do what was shown and is confirmed, and show the coordinator's answer."""
        number = self._acted_on(request)
        form, tone = await _form(request), "good"
        drawn, typed = form.get("drawn", ""), form.get("typed", "")
        try:
            preview = self._previews.take(
                drawn, number, self._session(request), typed, time.monotonic()
            )
        except ConfigError as error:
            raise HTTPException(400, str(error)) from error
        try:
            if (now := (await self.look())[number].name) != preview.run:
                raise ConfigError(f"not done: run {now} has the address now, not {preview.run}")
            said = await self._sources[number].act(preview.act.command, preview.arguments)
        except (ConfigError, CoordinatorUnavailable) as error:
            said, tone = str(error), "bad"
        values = {"preview": preview, "said": said, "tone": tone}
        return HTMLResponse(
            acts_page("answered", await self.look(), number, values, self._frame),
            200 if tone == "good" else 409,
        )

    def _acted_on(self, request: Request) -> int:
        """Give the number of the run that a caller may act on."""
        number = self._number(request)
        if not self._frame.may_act:
            raise HTTPException(404, "There is no such page.")
        is_from_here = "origin" in request.headers or "authorization" in request.headers
        if request.method == "POST" and not is_from_here:
            raise HTTPException(403, "Only pages of this server may do that.")
        return number

    def _session(self, request: Request) -> str:
        return _cookie(request.headers.get("cookie", ""), self._cookie)

    async def _live(self, request: Request) -> Response:
        view, number = self._asked(request)
        if request.method == "HEAD":  # nothing would be sent, and nobody would end it
            return Response(media_type="text/event-stream")
        if self._num_streams >= _MOST_STREAMS:
            raise HTTPException(503, f"{_MOST_STREAMS} pages are live already; load it again later")
        stream = self._changes(view, number, Query.of(request.query_params))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _changes(self, view: str, number: int, query: Query) -> AsyncIterator[str]:
        """Yield the sections that changed, about every `LOOK_S`, as server-sent events."""
        self._num_streams += 1
        try:
            shown: dict[str, str] = {}
            until = time.monotonic() + _STREAM_S
            while time.monotonic() < until and not self._ends.is_set():
                sections = self._sections(view, await self.look(), number, query)
                changed = {i: html for i, html in sections.items() if shown.get(i) != html}
                shown = sections
                # An empty object is sent, too: a reader that is gone is found so.
                yield f"data: {json.dumps(changed)}\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ends.wait(), LOOK_S)
        finally:
            self._num_streams -= 1

    def _sections(
        self, view: str, runs: list[RunView], number: int, query: Query
    ) -> dict[str, str]:
        """Render a view once for all who look at the same."""
        of, rendered = self._rendered
        if len(of) != len(runs) or any(a is not b for a, b in zip(of, runs, strict=True)):
            rendered = {}
            self._rendered = runs, rendered
        key = view, number, query
        if key not in rendered:
            rendered[key] = sections_of(view, runs, number, query)
        return rendered[key]

    async def look(self) -> list[RunView]:
        """Give all runs as they are.

        Raises:
            CoordinatorUnavailable: If the coordinator of a live run has never answered.
        """
        return list(await asyncio.gather(*(source.look() for source in self._sources)))

    def _asked(self, request: Request) -> tuple[str, int]:
        """Give the view that is asked for, and the number of its run."""
        if "view" not in request.path_params:
            return COMPARE, 0
        view, number = request.path_params["view"], self._number(request)
        if view not in VIEWS:
            raise HTTPException(404, "There is no such page.")
        return view, number

    def _number(self, request: Request) -> int:
        """Give the number of the run that is asked for."""
        number = request.path_params["number"]
        if number not in map(str, range(len(self._sources))):
            raise HTTPException(404, "There is no such page.")
        return int(number)

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            raise HTTPException(404, "There is no such file.")
        headers = {"cache-control": "no-cache"}
        return Response(asset(name), media_type=_ASSETS[name], headers=headers)

    async def _login(self, request: Request) -> Response:
        to = own_page(request.query_params.get("to", "/"))
        if not self._access.asks_for_token:
            return RedirectResponse(to, 303)
        if request.method == "GET":
            return HTMLResponse(login_page("", to))
        form = await _form(request)
        if not self._access.is_token(form.get("token", "").strip()):
            await self._wrong_tokens.wait(request.scope)
            return HTMLResponse(login_page("That is not the token of this page.", to), 401)
        session = secrets.token_urlsafe(32)
        self._access.sign_in(session, time.monotonic())
        answer = RedirectResponse(to, 303)
        answer.set_cookie(
            self._cookie,
            session,
            max_age=int(SESSION_S),
            secure=self._is_encrypted,
            httponly=True,
            samesite="strict",
        )
        return answer

    async def _logout(self, request: Request) -> Response:
        self._access.sign_out(_cookie(request.headers.get("cookie", ""), self._cookie))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(
            self._cookie, secure=self._is_encrypted, httponly=True, samesite="strict"
        )
        return answer


class _WrongTokens:
    """Lets the answers to wrong tokens wait, but no more of them than leave connections free."""

    def __init__(self, access: Access) -> None:
        """Assign only."""
        self._access = access
        self._num_waiting = 0

    async def wait(self, scope: Scope) -> None:
        """Wait as long as the answer to a caller whose token is wrong has to."""
        client = scope.get("client")
        delay_s = self._access.wrong_token(str(client[0]) if client else "", time.monotonic())
        if self._num_waiting < _MOST_WAITING:
            self._num_waiting += 1
            try:
                await asyncio.sleep(delay_s)
            finally:
                self._num_waiting -= 1


class _Guard:
    """Lets calls pass that `Access` allows, and adds the headers to every answer."""

    def __init__(
        self, app: ASGIApp, access: Access, cookie: str, wrong_tokens: _WrongTokens
    ) -> None:
        """Assign only."""
        self._app = app
        self._access = access
        self._cookie = cookie
        self._wrong_tokens = wrong_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call."""
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None and refusal.status_code == 401 and _has_token(scope):
            await self._wrong_tokens.wait(scope)
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), str(scope["path"])
        host = headers.get("host", "")
        if not self._access.is_host(host):
            text = (
                "This page is not served under that name. Call it by the address that diloco page "
                "printed, or by a name in its certificate."
            )
            return HTMLResponse(problem_page("Unknown host", text), 421)
        origin = headers.get("origin", "")
        if scope["method"] not in ("GET", "HEAD") and not self._access.is_own_origin(origin, host):
            return PlainTextResponse("only pages of this server may do that\n", 403)
        if path == "/login" or path.startswith("/asset/"):
            return None
        session = _cookie(headers.get("cookie", ""), self._cookie)
        if self._access.is_allowed(headers, session, time.monotonic()):
            return None
        if "text/html" in headers.get("accept", "") and not _has_token(scope):
            query = scope["query_string"].decode("ascii", "replace")
            to = own_page(f"{path}?{query}" if query else path)
            return RedirectResponse(f"/login?to={quote(to, safe='')}", 303)
        said = "show the token of this page: Authorization: Bearer TOKEN\n"
        return PlainTextResponse(said, 401, {"www-authenticate": "Bearer"})


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _has_token(scope: Scope) -> bool:
    return "authorization" in Headers(scope=scope)


async def _form(request: Request) -> dict[str, str]:
    """Read a form; one that is too long, comes too slowly, or not to its end, is empty."""
    body = b""
    try:
        async with asyncio.timeout(_CALL_S):
            async for piece in request.stream():
                body += piece
                if len(body) > _MOST_FORM_BYTES:
                    return {}
    except (TimeoutError, ClientDisconnect):
        return {}
    return {name: values[0] for name, values in parse_qs(body.decode("ascii", "replace")).items()}


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = problem_page(str(error.status_code), str(error.detail))
    return HTMLResponse(text, error.status_code, error.headers)


async def serve(
    page: Page,
    listening: socket.socket,
    announce: Callable[[], None],
    *,
    certificate: str = "",
    key: str = "",
) -> None:
    """Serve a page until the process is asked to end.

    Args:
        page: The page; closed in the end.
        listening: Where, bound; closed in the end.
        announce: Called once calls are answered.
        certificate: File of the chain; empty: without TLS.
        key: File of its key.

    Raises:
        ConfigError: If certificate and key cannot be used.
        CoordinatorUnavailable: If the coordinator of a live run does not answer at the start.
    """
    config = uvicorn.Config(
        page.app,
        loop="asyncio",
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=_END_S,
        ssl_certfile=certificate or None,
        ssl_keyfile=key or None,
    )
    try:
        _load(config, certificate, key)
        await page.look()
        listening.listen()
        announce()
        await _Server(config, page).serve(sockets=[listening])
    finally:
        await page.close()


class _Connection(H11Protocol):
    """Closes a connection whose caller takes longer than `_CALL_S` to say what it asks for.

    And one whose caller reads nothing of its answers for `_UNREAD_S`, and the oldest of more than
    `_MOST_SILENT` that have asked for nothing. Without it, anyone who trickles headers, or never
    reads, holds one of `_MOST_CONNECTIONS`, token or not.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look."""
        super().connection_made(transport)
        self._unread, self._unread_s, self._began = 0, 0.0, self.loop.time()
        silent = [
            each
            for each in self.connections
            if isinstance(each, _Connection)
            and each.cycle is None
            and not each.transport.is_closing()
        ]
        if len(silent) > _MOST_SILENT:
            min(silent, key=lambda each: each._began).transport.abort()
        self._looks = self.loop.call_later(_CALL_S, self._look, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        self._looks.cancel()
        super().connection_lost(exc)

    def _look(self, last: object) -> None:
        """Close where nothing was asked since the `last` call that was, and none is at work."""
        unread = self.transport.get_write_buffer_size()
        self._unread_s = self._unread_s + _CALL_S if unread and unread == self._unread else 0.0
        self._unread = unread
        is_at_work = self.cycle is not None and not self.cycle.response_complete
        if self._unread_s >= _UNREAD_S:
            self.transport.abort()
        elif last is self.cycle and not is_at_work:
            self.transport.close()  # once what is buffered was sent: it is looked at until then
        self._looks = self.loop.call_later(_CALL_S, self._look, self.cycle)


class _Server(uvicorn.Server):
    """Ends the streams of a page before it waits for calls to be answered."""

    def __init__(self, config: uvicorn.Config, page: Page) -> None:
        """Assign only."""
        super().__init__(config)
        self._page = page

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        self._page.end_streams()
        await super().shutdown(sockets)


def _load(config: uvicorn.Config, certificate: str, key: str) -> None:
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"cannot serve with --certificate {certificate} --key {key}: {error}. Give the PEM "
            f"file of a certificate chain and that of its key, without a password"
        ) from error
