"""What `diloco conformance` checks, in which order, and the report of it."""

from __future__ import annotations

import functools
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import diloco
from diloco.conformance.golden import Trace, golden_traces, run_in_one_process
from diloco.conformance.processes import (
    CERTIFICATES,
    TRANSPORTS,
    Look,
    NotConforming,
    Place,
    codec_bytes,
    golden_trace,
    killed_run,
    whole_run,
)
from diloco.errors import DilocoError
from diloco.extras import is_installed
from diloco.report.rows import Column, Report, Requirement, Watch

logger = logging.getLogger(__name__)

PASS, FAIL, NOT_HERE = "pass", "fail", "not here"
#: Runs through processes: an overlap, a mix and a momentum.
_TRACE = "tau 1, alpha 0.5"
_NONE = "-"
_COLUMNS = (
    Column("check", "check"),
    Column("transport", "transport"),
    Column("device", "device"),
    Column("result", "result"),
    Column("seconds", "s", ".1f"),
    Column("said", "compared; or why not"),
)
#: Versions that a question is answered by.
_PACKAGES = ("torch", "numpy", "grpcio", "protobuf", "blake3", "xxhash", "hivemind")
#: By which name those are imported that have another one.
_MODULES = {"grpcio": "grpc", "protobuf": "google.protobuf"}

#: Checks something; returns what was compared. Raises `NotConforming` with the difference.
Check = Callable[[], str]
#: A check, with its name, transport, device; in the place of one that cannot be made here: why.
Row = tuple[str, str, str, Check | str]


def run(watch: Watch, numbers: Check | str, *, transports: Sequence[str] = TRANSPORTS) -> Report:
    """Make every check that can be made here.

    Args:
        watch: Told which check is under way.
        numbers: Compares the published numeric cases; or why it cannot be done.
        transports: Those that are checked.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="diloco-conformance-") as scratch:
        directory = Path(scratch)

        def look() -> None:
            watch(planned[len(rows)][0], len(rows), len(planned))

        planned = list(_planned(directory, look, numbers, transports))
        for name, transport, device, check in planned:
            look()
            began = time.monotonic()
            result, said = _judged(check)
            rows.append(
                {
                    "check": name,
                    "transport": transport,
                    "device": device,
                    "result": result,
                    "seconds": time.monotonic() - began,
                    "said": _without_names(said, directory),
                }
            )
    failed = [row for row in rows if row["result"] == FAIL]
    where = ", ".join(f"{r['check']} ({r['transport']}, {r['device']})" for r in failed)
    what = f"checks that fail{': ' if where else ''}{where}"
    required = [Requirement(what, float(len(failed)), 0.0, "rows")]
    return Report("conformance", {"versions": _versions()}, _COLUMNS, rows, required)


def _planned(
    directory: Path, look: Look, numbers: Check | str, transports: Sequence[str]
) -> Iterator[Row]:
    yield "golden traces", "in memory", "cpu", functools.partial(_golden, directory, look)
    yield "published numbers", _NONE, "cpu", numbers
    for device in ("cpu", "cuda"):
        for transport in transports:
            checks: dict[str, Callable[[Place], str]] = {
                "golden trace": lambda place: golden_trace(_trace(), place),
                "codecs' bytes": codec_bytes,
            }
            if transport == transports[0]:
                checks["two islands"] = _whole
            if transport != CERTIFICATES:
                checks["SIGKILL, stop, resume"] = killed_run
            if missing := _missing(transport, device):
                yield "all", transport, device, missing
                continue
            for name, check in checks.items():
                own = directory / f"{transport}-{device}-{name[:2]}"
                place = Place(transport, device, own, look)
                yield name, transport, device, functools.partial(_made, check, place)


def _golden(directory: Path, look: Look) -> str:
    differing = []
    for number, trace in enumerate(golden_traces()):
        look()
        place = directory / f"golden-{number}"
        place.mkdir()
        if difference := trace.difference(run_in_one_process(trace, place)):
            differing.append(difference)
    if differing:
        raise NotConforming("; ".join(differing))
    return f"{len(golden_traces())} runs, bit for bit"


def _trace() -> Trace:
    (trace,) = (each for each in golden_traces() if each.name == _TRACE)
    return trace


def _whole(place: Place) -> str:
    digests = whole_run(place)
    return f"{len(digests)} fragments, the same on both; digest {digests[0][:12]}"


def _made(check: Callable[[Place], str], place: Place) -> str:
    place.directory.mkdir()
    return check(place)


def _missing(transport: str, device: str) -> str:
    """Say why something cannot be checked here; empty: it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    if transport == "hivemind" and not is_installed("hivemind"):
        return "not installed: type pip install 'diloco[hivemind]'"
    return ""


def _judged(check: Check | str) -> tuple[str, str]:
    """Make a check; returns its result and what there is to say.

    Whatever goes wrong is the result of that check: the others are made all the same.
    """
    if isinstance(check, str):
        return NOT_HERE, check
    try:
        return PASS, check()
    except DilocoError as error:
        return FAIL, str(error)
    except Exception as error:
        logger.exception("a check failed")
        return FAIL, f"{type(error).__name__}: {error}"


def _without_names(said: str, directory: Path) -> str:
    """Take out of a text what only this machine is called: the file is for others to read."""
    for name, instead in (
        (str(directory), "DIR"),
        (str(Path.home()), "HOME"),
        (socket.gethostname(), "HOST"),
    ):
        said = said.replace(name, instead) if len(name) > 1 else said
    return said


def _versions() -> dict[str, str]:
    return {"diloco": diloco.__version__} | {
        name: version(name) if is_installed(_MODULES.get(name, name)) else NOT_HERE
        for name in _PACKAGES
    }
