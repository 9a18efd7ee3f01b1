"""Asks a page over HTTP, as a browser without scripts does."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str


def ask(url: str, path: str, method: str = "GET", body: str = "", **headers: str) -> Answer:
    """Make one call of a page without TLS."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body or None, headers)
        reply = connection.getresponse()
        found = {name.lower(): value for name, value in reply.getheaders()}
        return Answer(reply.status, found, reply.read().decode())
