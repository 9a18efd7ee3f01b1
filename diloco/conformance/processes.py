"""Conformance through real processes: golden traces, byte vectors, and a run that is broken.

Every function makes its processes, waits for them with a deadline, ends all of them, and raises
`NotConforming` with what is not as it should be.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL
from typing import Any

from diloco.bench.run_values import run_values
from diloco.bench.syncer.control_plane import control_plane
from diloco.config.load import config_of
from diloco.config.schema import Config
from diloco.conformance.codecs import ByteVector, byte_vectors
from diloco.conformance.golden import History, Trace
from diloco.errors import DilocoError
from diloco.launch.local import LocalRun, find_resume_step
from diloco.launch.process.children import end_all, how_ended, last_words, spawn
from diloco.launch.process.ending import StopRequest
from diloco.report.summary import read_events
from diloco.security.run_ca import RunCa

#: Between two processes: gRPC in plain text, gRPC with certificates of both ends, libp2p.
CERTIFICATES = "mtls"
TRANSPORTS = ("grpc", CERTIFICATES, "hivemind")
_ISLANDS = ("a", "b")
_INNER_STEPS = 48
#: On it a round takes long enough for a stop to come before the end.
_LINK = "ocean-100M-150ms"
_CHECKPOINT_STEPS = 4
#: Seconds until a process that says nothing has failed, however busy the machine is.
_PATIENCE_S = 300.0
_END_S = 10.0
_LOOK_S = 0.1
_DAYS = 2

Look = Callable[[], None]


class NotConforming(DilocoError):
    """What came out is not what it should be; the message says both."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check runs.

    Attributes:
        transport: One of `TRANSPORTS`.
        device: Of all tensors: cpu or cuda.
        directory: Empty; for everything that processes write.
        look: Called several times a second while there is nothing to do but wait; what it raises
            ends the check, and every process of it.
    """

    transport: str
    device: str
    directory: Path
    look: Look

    def transport_section(self, run: str) -> dict[str, Any]:
        """Write section [transport] of a run file, JSON values; make the certificates, if any."""
        if self.transport == CERTIFICATES:
            return {"certs": str(self.certificates(run))}
        return {"kind": self.transport}

    def certificates(self, run: str) -> Path:
        """Make the certificates of a run's coordinator and islands; returns their directory."""
        certs = self.directory / "certs"
        ca = RunCa(certs, lambda: datetime.datetime.now(datetime.UTC))
        ca.create(run, _DAYS)
        for name in ("coordinator", *(f"island/{island}" for island in _ISLANDS)):
            ca.issue(name, _DAYS, again=False)
        return certs


# -- golden traces ----------------------------------------------------------------------------


def golden_trace(trace: Trace, place: Place) -> str:
    """Run a trace: coordinator, syncer and two loops of their own; returns what was compared.

    Raises:
        NotConforming: If a value or a digest differs.
        DilocoError: If a process fails.
    """
    config = trace.config(place.directory / "run", transport=place.transport_section("golden"))
    with control_plane(config) as run_file:
        orders = [
            {
                "run_file": str(run_file),
                "island": island,
                "device": place.device,
                "trace": trace.name,
            }
            for island in trace.islands
        ]
        said = _said_by("diloco.conformance.island", orders, place)
    histories = {
        island: History(**each["history"]) for island, each in zip(trace.islands, said, strict=True)
    }
    if difference := trace.difference(histories):
        raise NotConforming(difference)
    digests = [tuple(each["digests"]) for each in said]
    _check_digests(dict(zip(trace.islands, digests, strict=True)))
    return f"{trace.name}; digest {digests[0][0][:12]}"


# -- byte vectors -----------------------------------------------------------------------------


def codec_bytes(place: Place) -> str:
    """Have two processes encode, send and decode the byte vectors; returns what was compared.

    Raises:
        NotConforming: Naming every codec whose bytes or values differ, and how.
        DilocoError: If a process fails.
    """
    order = {
        "transport": place.transport,
        "device": place.device,
        "certs": str(place.certificates("codecs")) if place.transport == CERTIFICATES else "",
        "key": str(place.directory / "server.p2p-key"),
    }
    with _served({"do": "serve", **order}, place) as address:
        call = {"do": "call", **order, "address": address}
        call["key"] = str(place.directory / "caller.p2p-key")
        (found,) = _said_by("diloco.conformance.codec_end", [call], place)
    if differing := codec_differences(found):
        raise NotConforming("; ".join(differing))
    return f"{len(found)} codecs, both ways"


def codec_differences(found: Mapping[str, Any]) -> list[str]:
    """Say what is wrong with what `codec_end` found; JSON values, hence `Any`."""
    differing = []
    for name, expected in byte_vectors().items():
        if isinstance(found[name], str):
            differing.append(f"{name}: {found[name]}")
            continue
        for where, vector in zip(("sent", "came back"), found[name], strict=True):
            if difference := expected.difference(ByteVector(**vector)):
                differing.append(f"{name}, as it {where}: {difference}")
                break
    return differing


@contextlib.contextmanager
def _served(order: Mapping[str, Any], place: Place) -> Iterator[str]:
    log = place.directory / "server.log"
    process = spawn(
        [sys.executable, "-m", "diloco.conformance.codec_end", json.dumps(order)],
        log,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        line = process.stdout.readline()
        if not line:
            process.wait(_END_S)
            raise DilocoError(f"the process that serves {how_ended(process)}; {last_words(log)}")
        yield json.loads(line)["address"]
    finally:
        process.stdin.close()
        end_all([process], _END_S)
        process.stdout.close()


# -- a run that is broken ----------------------------------------------------------------------


def whole_run(place: Place) -> tuple[str, ...]:
    """Train a small model on two islands, undisturbed.

    Returns:
        Digests of what is published at the end, one a fragment, the same on both islands.

    Raises:
        NotConforming: If they differ.
        DilocoError: If the run fails.
    """
    config = _training(place)
    with LocalRun(config) as run:
        _finish(run, place)
    return _ending(config)


def killed_run(place: Place) -> str:
    """Make the same run, kill an island and start it again, stop all, and resume; what it did.

    An island that returns takes what is published, so that the digests are not those of a run
    without a kill; they are the same on both islands.

    Raises:
        NotConforming: If the islands hold different published parameters at the end.
        DilocoError: If the run fails otherwise.
    """
    config = _training(place)
    request = StopRequest(num_graceful=1)
    killed_at = _Kill(config, request)
    with LocalRun(config, request) as run:
        _finish(run, place, lambda: killed_at.look(run))
        if not run.is_stopped:
            raise DilocoError(f"the run ended before it was stopped; {_logs(run)}")
    step = find_resume_step(config, None, lambda _: None, start="diloco conformance")
    with LocalRun(config, resume_step=step) as run:
        _finish(run, place)
    digests = _ending(config)
    return f"killed after checkpoint {killed_at.step}, resumed at {step}; digest {digests[0][:12]}"


class _Kill:
    """Kills island b after its first checkpoint, starts it again, and then stops the run."""

    def __init__(self, config: Config, request: StopRequest) -> None:
        self.step = 0
        self._config = config
        self._request = request
        self._is_back = False

    def look(self, run: LocalRun) -> None:
        if not self.step:
            written = sorted(self._config.checkpoint_dir.glob("b/step-*/manifest.json"))
            if written:
                self.step = int(written[-1].parent.name.rpartition("-")[2])
                run.take_down("b", SIGKILL)
        elif not self._is_back:
            self._is_back = run.bring_back("b")
        elif not self._request.number and self._has_trained_since():
            self._request.note(SIGINT)

    def _has_trained_since(self) -> bool:
        events = read_events(self._config.telemetry_dir, ["b"])["b"]
        return any(e["kind"] == "inner_step" and e["incarnation"] > 1 for e in events)


def _training(place: Place) -> Config:
    island = {
        "ranks": 1,
        "tokens_per_inner_step": 64,
        "device": place.device,
        "restart_wait": "100ms",
    }
    values = run_values(
        "conformance",
        {"preset": "tiny", "ffn_dim": 96},
        {
            "preset": "streaming",
            "inner_steps_per_round": 4,
            "num_fragments": 2,
            "round_deadline": "120s",
        },
        inner_steps=_INNER_STEPS,
        islands=_ISLANDS,
        island=island,
        state_dir=place.directory / "run",
        transport={**place.transport_section("conformance"), "link": _LINK},
        checkpoint={"every_inner_steps": _CHECKPOINT_STEPS},
    )
    return config_of(values, "the run of diloco conformance")


def _finish(run: LocalRun, place: Place, on_look: Look = lambda: None) -> None:
    def look() -> None:
        place.look()
        if time.monotonic() > until:
            raise DilocoError(f"the run did not end within {_PATIENCE_S:g} s; {_logs(run)}")
        on_look()

    until = time.monotonic() + _PATIENCE_S
    run.start()
    code = run.wait(look)
    run.wait_for_coordinator()
    if code:
        raise DilocoError(f"an island ended with code {code}; {_logs(run)}")


def _logs(run: LocalRun) -> str:
    return "; ".join(last_words(log) for log in sorted(run.state.root.glob("island-*.log")))


def _ending(config: Config) -> tuple[str, ...]:
    events = read_events(config.telemetry_dir, config.islands)
    endings = {
        island: tuple(e["digests"])
        for island, of_island in events.items()
        for e in of_island
        if e["kind"] == "island_ended"
    }
    _check_digests(endings)
    return endings[_ISLANDS[0]]


def _check_digests(by_island: Mapping[str, Sequence[str]]) -> None:
    if len({tuple(digests) for digests in by_island.values()}) != 1:
        said = ", ".join(f"{island} {_short(digests)}" for island, digests in by_island.items())
        raise NotConforming(f"the islands hold different published parameters: {said}")


def _short(digests: Sequence[str]) -> str:
    return "/".join(digest[:12] for digest in digests)


# -- processes ---------------------------------------------------------------------------------


def _said_by(
    module: str, orders: Sequence[Mapping[str, Any]], place: Place
) -> list[dict[str, Any]]:
    """Run a module once for every order, at once; returns what each says, JSON values.

    Raises:
        DilocoError: If one of them fails, or does not end in time; quotes its log.
    """
    name = module.rpartition(".")[2]
    results = [place.directory / f"{name}-{number}.json" for number in range(len(orders))]
    processes: dict[Path, subprocess.Popen[bytes]] = {}
    until = time.monotonic() + _PATIENCE_S
    try:
        for order, result in zip(orders, results, strict=True):
            written = json.dumps({**order, "result": str(result)})
            log = result.with_suffix(".log")
            processes[log] = spawn([sys.executable, "-m", module, written], log)
        while any(process.poll() is None for process in processes.values()):
            place.look()
            if time.monotonic() > until or any(process.poll() for process in processes.values()):
                break
            time.sleep(_LOOK_S)
        for log, process in processes.items():
            if process.poll():
                raise DilocoError(f"a process of {module} {how_ended(process)}; {last_words(log)}")
        for log, process in processes.items():
            if process.poll() is None:
                raise DilocoError(
                    f"a process of {module} did not end in {_PATIENCE_S:g} s; {last_words(log)}"
                )
    finally:
        end_all(processes.values(), _END_S)
    return [json.loads(result.read_text(encoding="utf-8")) for result in results]
