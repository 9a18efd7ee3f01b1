"""Asks a page over HTTP, as a browser without scripts does."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str


def connect(url: str, certificate: Path | None = None) -> http.client.HTTPConnection:
    """Connect to a page; over TLS where its address says so, which `certificate` proves."""
    parts = urlsplit(url)
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.netloc, timeout=30)
    context = ssl.create_default_context(cafile=certificate)
    return http.client.HTTPSConnection(parts.netloc, timeout=30, context=context)


def ask(
    url: str,
    path: str,
    method: str = "GET",
    body: str = "",
    certificate: Path | None = None,
    **headers: str,
) -> Answer:
    """Make one call of a page."""
    with contextlib.closing(connect(url, certificate)) as connection:
        connection.request(method, path, body or None, headers)
        reply = connection.getresponse()
        found = {name.lower(): value for name, value in reply.getheaders()}
        return Answer(reply.status, found, reply.read().decode())
