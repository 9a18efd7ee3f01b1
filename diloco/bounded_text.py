"""Bounds of what peers say in words: anyone who announces, keeps or logs such a text cuts it here.

A reason goes on to all islands, into durable headers and into logs. Without a bound, one caller
with a valid grant could fill everybody else's replies beyond what a header may hold.
"""

from __future__ import annotations

import json
import re
from typing import Any

#: Characters of a text that is shown once: in a reply, a status, a line of a log.
MOST_TEXT = 1000
#: Characters of a reason that is kept with a round and announced for each island of a fragment.
MOST_REASON = 300
#: Characters of why a run ends: it names islands, their addresses and what to type.
MOST_ENDING = 16 * MOST_TEXT
#: Islands that a text or a report names; further ones only make it longer than a message.
MOST_NAMES = 16
#: Objects and lists within each other, in what a peer says as JSON.
MOST_DEPTH = 32

_NOT_PRINTABLE = re.compile(r"[^ -~]")


def bounded_text(text: str, most: int = MOST_TEXT) -> str:
    """Return a peer's text in printable ASCII, at most `most` characters long.

    Other characters are escaped, line ends too. So it has at most `most` bytes in a message and
    twice as many, quotes excluded, as JSON; a text that was bounded before stays as it is.
    """
    shown = _NOT_PRINTABLE.sub(_escaped, text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def read_peer_json(text: str) -> Any:
    """Read JSON that a peer has sent; `Any` because anyone who reads it checks what it is.

    Raises:
        ValueError: If it is none, or nested more than `MOST_DEPTH` deep.
    """
    deep = f"JSON that is nested more than {MOST_DEPTH} deep"
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(deep) from error
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return value
    raise ValueError(deep)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
