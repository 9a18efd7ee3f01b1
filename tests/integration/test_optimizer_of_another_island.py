"""A real run in which nobody waits, joined by islands that it had never heard of.

Each takes the inner optimizer of an island at work, bit for bit as that one's part of a cut has it;
one source is killed in the middle of giving, and another gives instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diloco.checkpoint.checkpoints import Checkpoint
from diloco.config.load import load_config
from diloco.launch.local import LocalRun
from tests.data.text_files import write_stdlib
from tests.launch.island_site import children
from tests.run_files import FFN_DIM_OF_LANES, all_logs, with_text, write_run
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]

DECOUPLED = [
    "outer.preset=decoupled",
    "outer.grace=200ms",
    "data.handover_samples=64",
    "data.sources.code.repeat=true",
    "run.open=true",
    "run.max_islands=4",
    "coordinator.lease=5s",
    "transport.snapshot_rate=8Mbit/s",
]
GUEST = """
[islands.{name}]
ranks = 1
tokens_per_inner_step = 128
heal_optimizer = true
heal_wait = "2min"
"""


class Site:
    """A run of two islands, and guests that a test starts and ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        shapes = {"fsdp": "dp_shard = 2", "one": ""}
        # Long: it ends with the test.
        self.run_file = write_run(
            directory, shapes, inner_steps=50_000, inner_steps_per_round=8, ffn_dim=FFN_DIM_OF_LANES
        )
        with_text(self.run_file, write_stdlib(directory / "text.jsonl"))
        self.config = load_config(self.run_file, DECOUPLED)
        self.run = LocalRun(self.config)
        self.guests: list[subprocess.Popen[bytes]] = []

    def join(self, name: str) -> None:
        """Start an island that is in no file of the run."""
        run_file = self.directory / f"{name}.toml"
        run_file.write_text((self.directory / "state/local.toml").read_text())
        with run_file.open("a") as file:
            file.write(GUEST.format(name=name))
        with open(self.directory / f"{name}.log", "wb") as said:
            guest = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.observed_rank",
                 "--config", str(run_file), "--island", name,
                 "--coordinator", self.run.address, "--output", str(self.output)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1",
                     "TAKEN": str(self.directory / f"{name}.taken")},
                stdout=said,
                stderr=said,
            )  # fmt: skip
        self.guests.append(guest)

    @property
    def output(self) -> Path:
        return Path(self.config.telemetry_dir)

    def events(self, island: str, kind: str) -> list[dict[str, Any]]:
        path = self.output / f"events-{island}-0.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the last one may be half written
                found.append(json.loads(line))
        return [event for event in found if event["kind"] == kind]

    def steps(self, island: str) -> int:
        return len(self.events(island, "inner_step"))

    def taken(self, island: str) -> dict[str, Any]:
        wait_until(lambda: bool(self.events(island, "inner_state_taken")), 150.0)
        (taken,) = self.events(island, "inner_state_taken")
        return taken

    def lanes_given(self) -> dict[str, int]:
        """Transfers at the syncer, and how many lanes of each are there."""
        transfers = (self.directory / "state").glob("**/transfers/*")
        return {path.name: len(list(path.glob("*.safetensors"))) for path in transfers}

    def assert_of_source(self, island: str, taken: dict[str, Any]) -> None:
        """Insist on the moments of the source's part of the cut, to the last bit."""
        checkpoint = Checkpoint.open(
            Path(self.config.checkpoint_dir), taken["from_island"], taken["checkpoint"]
        )
        assert checkpoint.inner_step == taken["taken_step"] > 0
        found = load_file(self.directory / f"{island}.taken")
        assert len(found) == 2 * len(checkpoint.plan.tensors)
        for name, values in found.items():
            assert torch.equal(values, checkpoint.read(*name.split(" "))), name
        assert any(values.any() for values in found.values())


@contextlib.contextmanager
def site(directory: Path) -> Iterator[Site]:
    here = Site(directory)
    with here.run:
        here.run.start()
        try:
            yield here
        except AssertionError as error:
            raise AssertionError(f"{error}\n{all_logs(directory)}") from error
        finally:
            for guest in here.guests:
                guest.kill()
                guest.wait()


def kill(island: subprocess.Popen[bytes]) -> None:
    """Kill a supervisor and its ranks, as a power cut would."""
    for pid in [island.pid, *children(island.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    island.wait()


def while_given(site: Site, known: set[str], act: Callable[[], None]) -> None:
    """Act while a transfer that is new is half there."""

    def is_half_there() -> bool:
        new = {name: count for name, count in site.lanes_given().items() if name not in known}
        return any(0 < count < 8 for count in new.values())  # of ten, four at a time

    wait_until(is_half_there, 150.0)
    act()


def test_islands_that_nobody_knew_take_the_inner_optimizer_of_one_at_work(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        wait_until(lambda: min(map(here.steps, ("fsdp", "one"))) > 20, 90.0)

        here.join("guest")
        taken = here.taken("guest")
        assert (taken["source"], taken["reason"]) == ("island", "")
        assert taken["from_island"] in ("fsdp", "one")
        here.assert_of_source("guest", taken)
        before = here.steps("guest")
        wait_until(lambda: here.steps("guest") > before + 10, 60.0)

        known = set(here.lanes_given())
        here.join("other")
        sources: list[str] = []

        def kill_source() -> None:
            log = (here.directory / "state").glob("**/coordinator*.log")
            said = "\n".join(path.read_text() for path in log)
            (line,) = [x for x in said.splitlines() if x.endswith("for other")]
            sources.append(line.split(" is asked")[0].split()[-1])
            kill(here.run.islands[sources[0]] if sources[0] != "guest" else here.guests[0])

        while_given(here, known, kill_source)
        taken = here.taken("other")
        assert taken["source"] == "island", taken
        assert taken["from_island"] != sources[0]
        here.assert_of_source("other", taken)
        before = here.steps("other")
        wait_until(lambda: here.steps("other") > before + 10, 60.0)
