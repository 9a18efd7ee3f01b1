"""What an operator may do on the page: forms, what will follow, and the command that does the same.

    form -> preview (what follows, the command) -> confirmed -> `operate`, as the command calls it

A preview is kept here under a number that is drawn: the confirmation brings nothing but that, and
where an act cannot be undone the name of what it is about. So it does what was shown, once, for
whom it was shown, and no page of somebody else can make it up. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.errors import ConfigError

#: Seconds for which a preview can be confirmed; how many are kept, the newest.
PREVIEW_S, _MOST_PREVIEWS = 600.0, 100
_MOST_TEXT = 300


@dataclass(frozen=True, slots=True)
class Field:
    """What a form asks for.

    Args:
        name: Of the argument.
        label: In words.
        kind: "island" and "syncer": one of the run's; "text"; "check".
        is_needed: Whether it may be left out.
        before: What the command has before its value.
    """

    name: str
    label: str
    kind: str = "text"
    is_needed: bool = False
    before: str = ""


@dataclass(frozen=True, slots=True)
class Act:
    """A command of an operator.

    Args:
        command: As in `diloco COMMAND`.
        follows: What follows from it.
        fields: Its arguments.
        is_final: Whether it cannot be taken back: then the name of its island, or of the run, is
            typed.
    """

    command: str
    follows: str
    fields: tuple[Field, ...] = ()
    is_final: bool = False


_ISLAND = Field("island", "Island", "island", is_needed=True)

ACTS = (
    Act("pause", "No round opens until unpause; those that are open end as ever. Islands that "
        "merge on arrival train on, others wait at their next merge."),
    Act("unpause", "Rounds open again."),
    Act("set", "The policy is changed for all, and stays so over restarts; rounds count it from "
        "their next opening. What is no policy, or out of range, is refused.",
        (Field("key", "Key", is_needed=True), Field("value", "Value", is_needed=True))),
    Act("drain", "The island sends and merges what is outstanding, then ends well. No new round "
        "counts it; started again it is welcome. For runs that merge on arrival.",
        (_ISLAND,), is_final=True),
    Act("kick", "The island is out at once: nothing that it has not yet merged counts any more, "
        "its start ends with exit code 41, and later ones are refused until it is let in again.",
        (_ISLAND, Field("reason", "Why", before="--reason"),
         Field("undo", "Let it join again", "check", before="--undo")), is_final=True),
    Act("repair", "A damaged fragment is taken from this island, if it holds what was lost.",
        (Field("fragment", "Fragment", is_needed=True, before="--fragment"),
         Field("island", "Island", "island", is_needed=True, before="--from-island"))),
    Act("move", "Fragments move to another syncer while the run goes on: they are copied first, "
        "and both syncers start again. Of a syncer alone: all that it has, dealt over the others.",
        (Field("fragments", "Fragments, such as 3,4", before="--fragments"),
         Field("from", "From syncer", "syncer", before="--from"),
         Field("to", "To syncer", "syncer", before="--to"))),
    Act("backup", "Journal, plan, newest records and pins are copied to a directory of the "
        "coordinator's machine, which is not there yet. It answers when all of it is copied.",
        (Field("directory", "Directory", is_needed=True),)),
    Act("stop", "Every island saves and leaves, then syncer and coordinator end; diloco "
        "coordinator RUN.toml --resume goes on as if nothing had happened. Now: without a "
        "checkpoint, at once.",
        (Field("now", "Now", "check", before="--now"),), is_final=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Preview:
    """An act that waits for its confirmation.

    Args:
        act: The act.
        number: Of its run.
        run: Name of it.
        arguments: As `operate` takes them.
        line: The command that does the same.
        typed: What is to be typed to confirm it; empty: nothing.
    """

    act: Act
    number: int
    run: str
    arguments: Mapping[str, str]
    line: str
    typed: str = ""


def preview_of(form: Mapping[str, str], number: int, run: str, address: str) -> Preview:
    """Read a form.

    Args:
        form: As it was sent; everything in it may be made up.
        number: Of the run.
        run: Its name.
        address: Of its coordinator.

    Raises:
        ConfigError: If it is no form of an act, or lacks something.
    """
    act = next((each for each in ACTS if each.command == form.get("command")), None)
    if act is None:
        raise ConfigError("there is no such act")
    arguments, words = {}, ["diloco", act.command, address]
    for field in act.fields:
        value = form.get(field.name, "").strip()
        if field.kind == "check":
            value = "true" if value else ""
        if len(value) > _MOST_TEXT or re.search(r"[\x00-\x1f\x7f]", value):
            raise ConfigError(f"{field.label}: at most {_MOST_TEXT} characters, of one line")
        if field.is_needed and not value:
            raise ConfigError(f"{act.command} needs: {field.label.lower()}")
        if value:
            arguments[field.name] = value
            words += [field.before] if field.before else []
            words += [] if field.kind == "check" else [value]
    if act.command == "set":
        words[-2:] = [f"{arguments['key']}={arguments['value']}"]
    about = arguments.get("island", run) if act.is_final and "undo" not in arguments else ""
    return Preview(act, number, run, arguments, shlex.join(words), about)


class Previews:
    """Previews by the number that was drawn for each; used from one thread."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kept: dict[str, tuple[float, str, Preview]] = {}

    def keep(self, drawn: str, preview: Preview, session: str, now: float) -> None:
        """Keep one for whom it was shown."""
        while len(self._kept) >= _MOST_PREVIEWS:
            del self._kept[next(iter(self._kept))]
        self._kept[drawn] = now + PREVIEW_S, session, preview

    def take(self, drawn: str, number: int, session: str, typed: str, now: float) -> Preview:
        """Give a preview that is confirmed, once.

        Raises:
            ConfigError: If there is none, or something else was typed: then it stays.
        """
        until, of, preview = self._kept.get(drawn, (0.0, "", None))
        if preview is None or (of, preview.number) != (session, number) or now > until:
            raise ConfigError("this was done already, or shown too long ago: look again")
        if preview.typed and typed.strip() != preview.typed:
            raise ConfigError(f"type {preview.typed} to confirm it")
        del self._kept[drawn]
        return preview
