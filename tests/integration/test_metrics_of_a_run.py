"""A short run with every sink on: metrics over HTTP while it lasts, files and plots after it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diloco.report.summary import read_events
from diloco.telemetry.plots import flights_of, write_plots
from tests.run_files import write_run
from tests.telemetry.wandb_files import offline_files, read_wandb
from tests.waiting import Patience, exit_code, wait_until, written

pytestmark = pytest.mark.timeout(300)

RUN_S = 150.0
SERVED = re.compile(r"metrics are served, address=(http://\S+)")
ISLANDS = ("east", "west")
MONITORING = Path(__file__).resolve().parents[2] / "configs/monitoring"


@contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "diloco", "--log-level", "info", *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


class Scraper:
    """Reads one endpoint as often as it is asked, once its process has said where it is."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.url = ""
        self.samples: dict[tuple[str, ...], float] = {}

    def look(self) -> None:
        if not self.url and self._log.exists():
            found = SERVED.search(self._log.read_text())
            self.url = found[1] if found else ""
        if not self.url:
            return
        try:
            with urllib.request.urlopen(self.url, timeout=5) as reply:
                text = reply.read().decode()
        except (urllib.error.URLError, ConnectionError):
            return  # it ends with the run
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples[(sample.name, *sample.labels.values())] = sample.value


def wait_for_log(log: Path, text: str) -> str:
    wait_until(lambda: text in log.read_text(), what=log.read_text)
    return log.read_text()


def train(run_file: Path, root: Path, *overrides: str) -> tuple[Scraper, Scraper]:
    """Make a whole run; returns what coordinator and syncer said of it."""
    settings = [argument for override in overrides for argument in ("--set", override)]
    coordinator_log = root / "coordinator.log"
    scrapers = Scraper(coordinator_log), Scraper(root / "state" / "syncer.log")
    with processes() as started:
        started.append(start(coordinator_log, "coordinator", str(run_file), *settings))
        wait_for_log(coordinator_log, "listens on")
        for island in ISLANDS:
            arguments = ("island", str(run_file), "--island", island, *settings)
            started.append(start(root / f"{island}.log", *arguments))
        patience = Patience(RUN_S, written(root))
        while any(process.poll() is None for process in started):
            assert patience.left_s() > 0, coordinator_log.read_text()
            for scraper in scrapers:
                scraper.look()
            time.sleep(0.1)
        codes = [process.returncode for process in started]
    said = "\n".join(path.read_text() for path in sorted(root.glob("*.log")))
    assert codes == [0, 0, 0], said
    return scrapers


@pytest.mark.slow
def test_every_sink_of_a_run_tells_the_same(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, dict.fromkeys(ISLANDS, ""), inner_steps=40)

    coordinator, syncer = train(
        run_file,
        tmp_path,
        "telemetry.coordinator_metrics=127.0.0.1:0",
        "telemetry.syncer_metrics=127.0.0.1:0",
        "telemetry.wandb.mode=offline",
        "telemetry.wandb.project=lab",
        "telemetry.tensorboard=true",
        "evaluation.every_inner_steps=20",
    )

    assert coordinator.samples["diloco_run_info", "test"] == 1
    assert coordinator.samples["diloco_run_inner_steps",] == 40
    for island in ISLANDS:
        assert coordinator.samples["diloco_island_incarnation", island] == 1
        assert coordinator.samples["diloco_island_inner_step", island] >= 1
        assert coordinator.samples["diloco_island_loss_nats", island] > 0
    for fragment in ("0", "1"):
        assert coordinator.samples["diloco_fragment_version", fragment] >= 1
        published = syncer.samples["diloco_syncer_rounds_published_total", fragment]
        assert published >= 1
        assert published == syncer.samples["diloco_syncer_fragment_version", fragment]
        assert syncer.samples["diloco_syncer_merge_seconds_sum", fragment] > 0
        assert syncer.samples["diloco_syncer_commit_seconds_sum", fragment] > 0
        for island in ISLANDS:
            contributions = ("diloco_syncer_contributions_total", fragment, island, "included")
            assert syncer.samples[contributions] == published
            assert syncer.samples["diloco_syncer_received_bytes_total", fragment, island] > 0
            assert syncer.samples["diloco_syncer_sent_bytes_total", fragment, island] > 0

    telemetry = tmp_path / "state" / "telemetry"
    events = read_events(telemetry, ISLANDS)
    losses = {
        island: {e["inner_step"]: e["loss"] for e in lines if e["kind"] == "inner_step"}
        for island, lines in events.items()
    }
    assert [len(by_step) for by_step in losses.values()] == [40, 40]
    lines = (telemetry / "events-syncer.jsonl").read_text().splitlines()
    closed = [event for event in map(json.loads, lines) if event["kind"] == "round_closed"]
    assert len(closed) == sum(
        value
        for (name, *_), value in syncer.samples.items()
        if name == "diloco_syncer_rounds_published_total"
    )
    assert all(event["contributors"] == sorted(ISLANDS) for event in closed)
    told = {file.run["name"]: file for file in map(read_wandb, offline_files(telemetry))}
    for island in ISLANDS:
        assert told[island].is_ended
        assert (told[island].run["group"], told[island].run["project"]) == ("test", "lab")
        name = "loss_metrics/global_avg_loss"
        rows = [row for row in told[island].rows if name in row]
        assert {row["inner_step"]: row[name] for row in rows} == losses[island]
        assert rows[-1]["n_tokens_seen"] == 40 * 128
        drawn = tensorboard_scalars(telemetry / "tensorboard" / island, name)
        assert drawn == pytest.approx(losses[island], rel=1e-6)  # kept in float32
        assert all(event["incarnation"] == 1 for event in events[island])

    paths = write_plots(events, tmp_path / "plots")
    assert [path.name for path in paths] == ["loss.png", "timeline.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)
    flights = flights_of(events["east"], origin_s=0.0)
    sent = [event for event in events["east"] if event["kind"] == "fragment_sent"]
    assert len(flights) == len(sent)
    assert {flight.how for flight in flights} == {"included", "flush"}


def tensorboard_scalars(directory: Path, tag: str) -> dict[int, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        files = EventAccumulator(str(directory))
        files.Reload()
    return {scalar.step: scalar.value for scalar in files.Scalars(tag)}


def test_coordinator_whose_metrics_port_is_taken_names_the_setting(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, dict.fromkeys(ISLANDS, ""))
    log = tmp_path / "coordinator.log"

    with socket.create_server(("127.0.0.1", 0)) as holder, processes() as started:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        setting = f"telemetry.coordinator_metrics={address}"
        started.append(start(log, "coordinator", str(run_file), "--set", setting))
        code = exit_code(started[0], 60)

    assert code == 2, log.read_text()
    assert f"telemetry.coordinator_metrics = {address}: cannot serve metrics" in log.read_text()


@pytest.mark.slow
def test_prometheus_scrapes_a_run_and_says_that_an_island_is_lost(tmp_path: Path) -> None:
    if (prometheus := shutil.which("prometheus")) is None:
        pytest.skip("no prometheus here: apt-get install prometheus")
    run_file = write_run(
        tmp_path, dict.fromkeys(ISLANDS, ""), preset="decoupled", inner_steps=100_000
    )
    ports = free_ports(3)
    settings = [
        "--set", f"telemetry.coordinator_metrics=127.0.0.1:{ports[0]}",
        "--set", f"telemetry.syncer_metrics=127.0.0.1:{ports[1]}",
    ]  # fmt: skip
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    text = (MONITORING / "prometheus.yml").read_text()
    text = text.replace("9101", str(ports[0])).replace("9102", str(ports[1]))
    (tmp_path / "prometheus.yml").write_text(text.replace("15s", "1s"))

    def ask(path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[2]}{path}", timeout=5) as reply:
                return str(reply.read().decode())
        except (urllib.error.URLError, ConnectionError):
            return ""  # it starts

    with processes() as started:
        log = tmp_path / "coordinator.log"
        started.append(start(log, "coordinator", str(run_file), *settings))
        wait_for_log(log, "listens on")
        for island in ISLANDS:
            arguments = ("island", str(run_file), "--island", island, *settings)
            started.append(start(tmp_path / f"{island}.log", *arguments))
        command = [
            prometheus,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{ports[2]}",
        ]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        for query in ("diloco_island_tokens_total%3E0", "diloco_syncer_rounds_published_total%3E0"):
            wait_until(
                lambda q=query: '"metric"' in ask(f"/api/v1/query?query={q}"), what=log.read_text
            )
        assert "DilocoIslandLapsed" not in ask("/api/v1/alerts")

        started[2].kill()  # island west's supervisor, with whom its rank ends
        wait_until(
            lambda: "DilocoIslandLapsed" in ask("/api/v1/alerts"),
            what=lambda: ask("/api/v1/alerts") + log.read_text(),
        )


def free_ports(number: int) -> list[int]:
    """Find ports that nothing listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [
            held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [each.getsockname()[1] for each in sockets]
