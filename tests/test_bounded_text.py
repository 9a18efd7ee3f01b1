"""What a peer says is bounded, in a message and in JSON, and stays readable."""

from __future__ import annotations

import json

import pytest

from diloco.bounded_text import MOST_REASON, bounded_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("loss is nan", "loss is nan"),
        ("C:\\run \"x\"", "C:\\run \"x\""),
        ("two\nlines", "two\\nlines"),
        ("Z\u00fcrich \U0001f600 \x01", "Z\\xfcrich \\U0001f600 \\x01"),
        ("x" * MOST_REASON, "x" * MOST_REASON),
        ("x" * (MOST_REASON + 1), "x" * (MOST_REASON - 3) + "..."),
    ],
)  # fmt: skip
def test_a_text_is_cut_and_escaped(text: str, shown: str) -> None:
    assert bounded_text(text, MOST_REASON) == shown


@pytest.mark.parametrize("character", ["x", "\x01", '"', "\\", "\n", "\U0001f600", "\ud800"])
def test_no_character_takes_more_than_its_share(character: str) -> None:
    shown = bounded_text(character * (1 << 20))

    assert len(shown.encode()) <= 1000
    assert len(json.dumps(shown)) <= 2002
    assert bounded_text(shown) == shown
