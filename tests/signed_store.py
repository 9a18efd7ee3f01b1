"""A store of objects behind signed addresses, over HTTP on this machine, with faults on demand.

It honours what presigned addresses of S3 do: a method and a path, for a time, ranges, and nothing
without the right signature.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from diloco.transport.bucket.server import PayloadLacking, joined
from diloco.transport.contracts import Buffer

_KEY = b"of the store"


class SignedStore:
    """A shelf (`transport.bucket.server.Shelf`) of objects in memory.

    Attributes:
        objects: What it holds.
        requests: Method and path of each request, in order.
        statuses: To be answered to the next requests in place of what they ask for.
        cut_after: Bytes after which each body that is sent breaks off; 0: none does.
        valid_s: Seconds for which an address is valid.
        is_away: Whether the server's own way to it fails.
        num_bytes_in: Bytes of bodies that were taken.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.statuses: list[int] = []
        self.cut_after = 0
        self.is_away = False
        self.num_bytes_in = 0
        self.valid_s = 3600.0
        self.num_written = 0
        self.port = 0

    @contextlib.contextmanager
    def serving(self) -> Iterator[SignedStore]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def put_urls(self, names: Sequence[str]) -> list[str]:
        return [self._signed("PUT", name) for name in names]

    def get_url(self, name: str) -> str:
        return self._signed("GET", name)

    def _signed(self, method: str, name: str) -> str:
        self._check()
        until = str(time.monotonic() + self.valid_s)
        signed = signature(method, name, until)
        return f"http://127.0.0.1:{self.port}/{name}?until={until}&signature={signed}"

    def write(self, name: str, payload: Buffer) -> None:
        self._check()
        self.objects[name] = bytes(payload)
        self.num_written += len(self.objects[name])

    def take(self, method: str, objects: Mapping[str, int], digest: bytes) -> Buffer:
        self._check()
        if lacking := [name for name, size in objects.items() if self.size(name) != size]:
            raise PayloadLacking(f"{lacking} are not there")
        found = [self.objects[name] for name in objects]
        return joined(found, sum(objects.values()), digest)

    def size(self, name: str) -> int | None:
        self._check()
        found = self.objects.get(name)
        return None if found is None else len(found)

    def delete(self, names: Sequence[str]) -> None:
        self._check()
        for name in names:
            self.objects.pop(name, None)

    def clear(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.is_away:
            raise OSError("the store is away")


def signature(method: str, name: str, until: str) -> str:
    return hmac.new(_KEY, f"{method} {name} {until}".encode(), hashlib.sha256).hexdigest()


def _handler(store: SignedStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if (name := self._allowed()) is not None:
                store.objects[name] = body
                store.num_bytes_in += len(body)
                self._answer(200, b"")

        def do_GET(self) -> None:
            if (name := self._allowed()) is None:
                return
            if (found := store.objects.get(name)) is None:
                self._answer(404, b"<Code>NoSuchKey</Code>")
                return
            first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups()  # type: ignore[union-attr]
            self._answer(206, found[int(first) : int(last) + 1])

        def _allowed(self) -> str | None:
            parts = urlsplit(self.path)
            said = parse_qs(parts.query)
            name = parts.path.removeprefix("/")
            store.requests.append((self.command, name))
            if store.statuses:
                self._answer(store.statuses.pop(0), b"<Code>Told</Code><Message>so</Message>")
            elif said["signature"] != [signature(self.command, name, said["until"][0])]:
                self._answer(403, b"<Code>SignatureDoesNotMatch</Code>")
            elif float(said["until"][0]) < time.monotonic():
                self._answer(
                    403, b"<Code>AccessDenied</Code><Message>Request has expired</Message>"
                )
            else:
                return name
            return None

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if 200 < status < 300 and 0 < store.cut_after < len(body):
                self.wfile.write(body[: store.cut_after])
                self.close_connection = True
            else:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
