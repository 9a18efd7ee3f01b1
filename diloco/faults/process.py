"""Faults that a process under `diloco chaos` has from within: of its links and its wall clock.

    DILOCO_CHAOS=DIR    set by `diloco chaos` for the processes of its run, by nobody else
    DIR/links.json      island -> what happens to its links, read once a second by its ranks
    DIR/clock.json      coordinator|syncer|syncer-N -> seconds by which its wall clock is wrong, the
                        same
    DIR/training.json   what happens to what islands train (`diloco.faults.training`)
    DIR/fired.WHO.PID.json    what has taken effect here so far, by fault; there from the first
                              reading of the files above on
    DILOCO_CHAOS_STEP_S=S    also set where times are judged, and by `diloco sim validate`: an
                        inner step takes S seconds at least, asleep, so that training leaves cores
                        to who comes back
    DILOCO_CHAOS_LINES=ISLAND,...    also set: islands whose connections go through a proxy
                        within each rank, which can be a bad line (`diloco.transport.shaping.line`)

Refused where a peer is beyond this machine's loopback: a run that others take part in is nothing to
play with. Without the variable nothing here does anything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco.durable import write_json
from diloco.errors import ConfigError
from diloco.transport.addresses import is_loopback, split_address
from diloco.transport.contracts import Transport
from diloco.transport.shaping.faulty import Fault, Faults, FaultScript, FaultyTransport, Gate
from diloco.transport.shaping.line import ShapedLine, Way

logger = logging.getLogger(__name__)

VARIABLE = "DILOCO_CHAOS"
STEP_VARIABLE = "DILOCO_CHAOS_STEP_S"
LINES_VARIABLE = "DILOCO_CHAOS_LINES"
#: Count of blocks that met the rate of a thin line, and of bits that flipped on it.
SLOWED, FLIPPED = "slowed blocks", "flipped bits"
_READ_S = 1.0
#: What may happen to calls that are no fragment's: a join that arrives twice is two starts.
_HARMLESS = frozenset({Fault.DELAY, Fault.SLOW_READER})


def links_path(directory: Path) -> Path:
    """File that says what happens to links."""
    return directory / "links.json"


def clock_path(directory: Path) -> Path:
    """File that says how wrong clocks are."""
    return directory / "clock.json"


def training_path(directory: Path) -> Path:
    """File that says what happens to what islands train (`diloco.faults.training`)."""
    return directory / "training.json"


def training_name(island: str) -> str:
    """Name under which an island's ranks look at that file, and tell what has taken effect."""
    return f"training-{island}"


def fired_path(directory: Path, who: str, pid: int) -> Path:
    """File in which a process tells what has taken effect in it."""
    return directory / _fired_name(who, pid)


def fired(directory: Path, who: str) -> Counter[str]:
    """Sum up what has taken effect in all processes of this name so far, by fault."""
    total: Counter[str] = Counter()
    for path in directory.glob(_fired_name(who, "*")):
        total.update(_read(path))
    return total


def is_read(directory: Path, who: str) -> bool:
    """Whether a process of this name lives that has begun to read what is to happen to it."""
    paths = directory.glob(_fired_name(who, "*"))
    return any((Path("/proc") / path.name.split(".")[-2]).exists() for path in paths)


class LinkFaults:
    """Faults on the links of one rank: none, in an ordinary run."""

    def route(self, address: str) -> str:
        """Return the address at which a peer is reached."""
        return address

    def around(self, transport: Transport, *, carries_fragments: bool) -> Transport:
        """Wrap a connection to a peer."""
        return transport


def link_faults(environment: Mapping[str, str], island: str, coordinator: str) -> LinkFaults:
    """Give the faults on the links of this process: those of `diloco chaos`, if it takes part.

    Raises:
        ConfigError: If it does, and its coordinator is beyond loopback.
    """
    directory = environment.get(VARIABLE)
    if not directory:
        return LinkFaults()
    _check_loopback(coordinator)
    lined = environment.get(LINES_VARIABLE, "").split(",")
    return ChaoticLinks(Path(directory), island, has_lines=island in lined)


class ChaoticLinks(LinkFaults):
    """Faults on the links of one rank, as `links.json` says."""

    def __init__(self, directory: Path, island: str, *, has_lines: bool = False) -> None:
        """Assign only."""
        self._directory = directory
        self._island = island
        self._lines = _RankLines() if has_lines else None
        # All ways to syncers are one link, on which calls of one way may overtake those of another.
        self._fragments = Faults(FaultScript(seed=0), f"{island}/fragments")
        self._control = Faults(FaultScript(seed=0), f"{island}/control")
        self._thread: threading.Thread | None = None

    def route(self, address: str) -> str:
        """Return where a peer is reached: through this rank's line, if it has one.

        Raises:
            ConfigError: If the peer is beyond loopback.
        """
        _check_loopback(address)
        return address if self._lines is None else self._lines.route(address)

    def around(self, transport: Transport, *, carries_fragments: bool) -> Transport:
        """Wrap a connection to a peer."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="chaos", daemon=True)
            self._thread.start()
        return FaultyTransport(transport, self._fragments if carries_fragments else self._control)

    def _follow(self) -> None:
        told: Counter[str] | None = None
        while True:
            script = _read(links_path(self._directory)).get(self._island, {})
            self._fragments.script = script_of(script, carries_fragments=True)
            self._control.script = script_of(script, carries_fragments=False)
            if self._lines is not None:
                self._lines.play(script)
            if (counts := self._counts()) != told:
                told = counts
                write_json(fired_path(self._directory, self._island, os.getpid()), dict(told))
            time.sleep(_READ_S)

    def _counts(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for faults in (self._fragments, self._control):
            total.update({fault.value: count for fault, count in tuple(faults.fired.items())})
            total["held"] += faults.num_held
        for way in self._lines.ways if self._lines else ():
            total.update({SLOWED: way.num_slowed, FLIPPED: way.num_flips})
        return total


class _RankLines:
    """The lines of one rank, one to each peer, with both ways in common; in a thread of theirs."""

    def __init__(self) -> None:
        self._lines: dict[str, ShapedLine] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._script: tuple[float, float] = (0.0, 0.0)

    def route(self, address: str) -> str:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="lines", daemon=True).start()
        if address not in self._lines:
            line = ShapedLine(
                split_address(address), besides=next(iter(self._lines.values()), None)
            )
            entered = asyncio.run_coroutine_threadsafe(line.__aenter__(), self._loop)
            self._lines[address] = entered.result()
        return f"127.0.0.1:{self._lines[address].port}"

    def play(self, script: Mapping[str, Any]) -> None:
        told = float(script.get("rate_bps", 0.0)), float(script.get("damage_every_bytes", 0.0))
        if told != self._script and self._loop is not None:
            self._script = told
            for way in self.ways:
                self._loop.call_soon_threadsafe(way.change, *told)

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(way for line in [*self._lines.values()][:1] for way in (line.up, line.down))


def script_of(values: Mapping[str, Any], *, carries_fragments: bool) -> FaultScript:
    """Read an island's entry of `links.json`; an empty one: nothing happens."""
    rates = {Fault(name): float(rate) for name, rate in values.get("rates", {}).items()}
    return FaultScript(
        seed=int(values.get("seed", 0)),
        rates=rates if carries_fragments else {f: r for f, r in rates.items() if f in _HARMLESS},
        methods=frozenset(values.get("methods", ())),
        delay_s=float(values.get("delay_s", 0.05)),
        slow_bps=float(values.get("slow_bps", 1e6)),
        gate=Gate(values.get("gate", Gate.OPEN)),
    )


def wall_clock(environment: Mapping[str, str], who: str) -> Callable[[], float]:
    """Give the wall clock of a coordinator or syncer, in seconds since 1970."""
    directory = environment.get(VARIABLE)
    return _WrongClock(Path(directory), who) if directory else time.time


class _WrongClock:
    """Wrong by what the file says; it is read once a second."""

    def __init__(self, directory: Path, who: str) -> None:
        self._directory = directory
        self._who = who
        self._offset_s = 0.0
        threading.Thread(target=self._follow, name="chaos", daemon=True).start()

    def __call__(self) -> float:
        return time.time() + self._offset_s

    def _follow(self) -> None:
        num_jumps = 0
        own = fired_path(self._directory, self._who, os.getpid())
        write_json(own, {"clock": num_jumps})
        while True:
            offset_s = float(_read(clock_path(self._directory)).get(self._who, 0.0))
            if offset_s != self._offset_s:
                self._offset_s = offset_s
                num_jumps += 1
                write_json(own, {"clock": num_jumps})
                logger.warning("wall clock jumps on purpose, offset_s=%g", offset_s)
            time.sleep(_READ_S)


def _fired_name(who: str, pid: int | str) -> str:
    return f"fired.{who}.{pid}.json"


def _check_loopback(peer: str) -> None:
    try:
        host = split_address(peer)[0]
    except ValueError:  # a libp2p address
        host = peer
    if not is_loopback(host):
        raise ConfigError(
            f"{VARIABLE} is set, and {peer} is beyond this machine's loopback: faults on purpose "
            f"are for runs of `diloco chaos` alone; unset it"
        )


def _read(path: Path) -> dict[str, Any]:
    """Read a file that is replaced whole; nothing where there is none yet."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return {}
