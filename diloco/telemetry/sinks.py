"""Writes events: to a file of JSON lines, which is the reference, and to other sinks.

No sink stops a training: what cannot be written is counted, the first loss is a warning, and the
sum is said when the sink is closed. What goes wrong in `open` is an error: an option that cannot be
had is refused at the start.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from diloco.telemetry.events import Event

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes events; `open` and `close` bracket its life."""

    def open(self) -> None:
        """Acquire what the sink needs; raises when it cannot be had."""

    def add_context(self, context: Mapping[str, Any]) -> None:
        """Add to every later event: JSON values by name, such as timeline and incarnation."""

    def write(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Let everything arrive and release it."""


class FanOut:
    """Several sinks that look like one; each takes every event, in the order given."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        """Assign only."""
        self.sinks = tuple(sinks)

    def open(self) -> None:
        """Open all; what was opened is closed again when one cannot be."""
        with contextlib.ExitStack() as opened:
            for sink in self.sinks:
                sink.open()
                opened.callback(sink.close)
            opened.pop_all()

    def add_context(self, context: Mapping[str, Any]) -> None:
        """Add to every later event of all sinks."""
        for sink in self.sinks:
            sink.add_context(context)

    def write(self, event: Event) -> None:
        """Give an event to all."""
        for sink in self.sinks:
            sink.write(event)

    def close(self) -> None:
        """Close all."""
        for sink in self.sinks:
            sink.close()


class LostWrites:
    """Counts what a sink could not write: one warning at the first, one at the end."""

    def __init__(self, name: str) -> None:
        """Begin with nothing lost; `name` says in messages which sink it is."""
        self._name = name
        self.num_lost = 0

    def count(self, problem: object) -> None:
        """Count one write that failed."""
        self.num_lost += 1
        if self.num_lost == 1:
            logger.warning("a sink of events fails, training goes on, %s: %r", self._name, problem)

    def warn(self) -> None:
        """Say how many were lost, if any were."""
        if self.num_lost:
            logger.warning("writes that failed, %s num_lost=%d", self._name, self.num_lost)


class JsonlSink:
    """A file to which events are appended, one JSON object a line, whole lines only.

    A line has the event's own values and, before them, when it was written (`unix_s`) and by whom.
    Numbers that are not finite become null, which JSON has no other word for. Events may come from
    several threads. A line is flushed as soon as it is written, so that what happened before a
    process was killed is there.
    """

    def __init__(
        self, path: Path, context: Mapping[str, Any], unix_clock: Callable[[], float]
    ) -> None:
        """Assign only. `context` is repeated in every line: run, island, rank."""
        self.path = path
        self.losses = LostWrites(f"path={path}")
        self._context = dict(context)
        self._unix_clock = unix_clock
        self._lock = threading.Lock()
        self._file: TextIO | None = None

    def open(self) -> None:
        """Open the file for appending; its directory is made when it is missing.

        A line that a killed writer tore is ended, so that the next event has a line of its own.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        if not _ends_a_line(self.path):
            self._file.write("\n")

    def add_context(self, context: Mapping[str, Any]) -> None:
        """Repeat `context`, too, in every line from now on."""
        with self._lock:
            self._context = {**self._context, **context}

    def write(self, event: Event) -> None:
        """Append one event; after `close` it is dropped."""
        with self._lock:
            if self._file is None:
                return
            values = {"unix_s": self._unix_clock(), **self._context, **event.as_dict()}
            line = json.dumps({name: _json_value(value) for name, value in values.items()})
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except OSError as error:  # a full disk; the lines that wait in the buffer stay whole
                self.losses.count(error)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        with self._lock:
            file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            self.losses.count(error)
        self.losses.warn()


class BackgroundSink:
    """Runs another sink in a thread of its own, so that it can neither fail nor delay a training.

    A sink that hangs costs a queue of `capacity` events; later ones are lost and counted.
    """

    def __init__(self, name: str, sink: Sink, *, capacity: int = 10_000, close_s: float = 30.0):
        """Assign only.

        Args:
            name: Of the sink, for messages.
            sink: Opened by anyone who opens this, then touched by the thread alone.
            capacity: Events that may wait.
            close_s: Seconds that `close` gives the sink to take what waits; then it is left alone.
        """
        self.losses = LostWrites(f"sink={name}")
        self._name = name
        self._sink = sink
        self._close_s = close_s
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(capacity)
        # A daemon: a process whose sink hangs must end all the same.
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)

    def open(self) -> None:
        """Open the sink here, where its error is an error of the start, and begin."""
        self._sink.open()
        self._thread.start()

    def add_context(self, context: Mapping[str, Any]) -> None:
        """Have the sink told, after what was written before."""
        self._put(functools.partial(self._sink.add_context, context))

    def write(self, event: Event) -> None:
        """Have the sink take an event."""
        self._put(functools.partial(self._sink.write, event))

    def close(self) -> None:
        """Let the sink take what waits and close it; closing twice is harmless."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=self._close_s)
            self._thread.join(self._close_s)
            if self._thread.is_alive():
                self.losses.count(f"not closed within {self._close_s:g} s, left alone")
            self.losses.warn()

    def _put(self, action: Callable[[], None]) -> None:
        try:
            self._waiting.put_nowait(action)
        except queue.Full:
            self.losses.count("the sink does not take its events")

    def _run(self) -> None:
        while (action := self._waiting.get()) is not None:
            self._attempt(action)
        self._attempt(self._sink.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever another package raises: no training ends for it
            self.losses.count(error)


def _ends_a_line(path: Path) -> bool:
    """Whether a file is empty or its last line is whole; true of what has no end, a device."""
    with path.open("rb") as file:
        if not path.is_file() or not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _json_value(each) for name, each in value.items()}
    is_undefined = isinstance(value, float) and not math.isfinite(value)
    return None if is_undefined else value
