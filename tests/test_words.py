"""Words that the product does not use any more, and what is written in their place.

Identifiers, comments, docstrings, messages and pages are searched. A word is added here once the
tree has none of it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Pattern, within words of an identifier too -> what to write.
WORDS = {
    r"desks?": "service, handler",
    r"board": "run status",
    r"tapes?": "audit log",
    r"performers?": "injector",
    r"crushed|poured|sand": "divisible",
    r"eight_bits": "float8",
    r"spoilers?": "faults of training",
    r"orphaned": "unreachable",
    r"surroundings": "environment",
    r"insist_on": "check, require",
    r"peer_texts": "bounded_text",
    r"gifts?|donations?": "state transfer",
    r"stop_lines?|stop lines?": "graceful stop",
    r"whoever": "anyone who, the one that",
    r"anew": "again",
    r"beside": "next to, during, in addition to",
    r"(?:come|comes|came) to nothing": "is aborted, expires",
    r"(?:take|takes|took|taken|taking) note": "record",
    r"obey|obeys|obeyed": "apply, set",
    r"truth log": "fault log",
    r"heard_of": "set_roster, set_orders",
}
SUFFIXES = {".py", ".md", ".toml", ".proto", ".yaml", ".sh"}
#: Words of other projects, which are not ours to choose.
ALLOWED = re.compile(r"tensorboard|keyboard|dashboard", re.IGNORECASE)


def pages() -> dict[str, str]:
    """Every tracked text but this file and what protoc has generated."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        name: ALLOWED.sub("", (ROOT / name).read_text(encoding="utf-8"))
        for name in filter(None, listed.stdout.split("\0"))
        if Path(name).suffix in SUFFIXES
        and (ROOT / name).is_file()
        and not name.endswith(("_pb2.py", "tests/test_words.py"))
    }


def test_words_that_are_gone_stay_away() -> None:
    # Parts of an identifier are words, too: `_read_tape`, `SyncerDesk`.
    camel = re.compile(r"(?<=[a-z])(?=[A-Z])")
    either = re.compile(rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)
    found = []
    for name, text in pages().items():
        for number, line in enumerate(camel.sub("_", text).splitlines(), 1):
            if match := either.search(line):
                word = match[0].lower()
                (instead,) = {new for old, new in WORDS.items() if re.fullmatch(old, word)}
                found.append(f"{name}:{number}: {word}; write {instead}: {line.strip()}")

    assert not found, "\n".join(found[:20])
