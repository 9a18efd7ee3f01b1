"""Three sites, a machine each for coordinator, standby, syncers and islands, lost one by one.

Called inside an emulated network, whose nodes are the machines; an S3 server is at its core, and
payloads travel by it. A machine is lost with its disk: all its processes are killed, its directory
is removed, and it comes back empty.

    diloco emulate WAN.toml -- python -m tests.three_sites DIRECTORY
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from diloco.bench.network.s3_server import BUCKET, s3_server
from diloco.launch.process.emulated import Emulated
from diloco.report.summary import event_lines

SITES = ("asia", "eu", "us")
SYNCERS = {f"{site}-syncer": site for site in SITES}
CONTROL = ("first", "second")
MACHINES = (*CONTROL, *SYNCERS, *SITES)
_PORT = 29400
_ROUNDS = 3
_PATIENCE_S = 150.0
_RUN = """
[run]
name = "three-sites"
seed = 3
inner_steps = {steps}
state = "s3://{bucket}/three-sites"
[model]
preset = "tiny"
ffn_dim = 1024
[data]
sequence_length = 32
[inner.optimizer]
lr = 1e-3
warmup_steps = 2
[outer]
preset = "decoupled"
inner_steps_per_round = 16
num_fragments = 3
num_lanes = 1
uplink_codec = "float32"
downlink_codec = "float32"
grace = "1s"
snapshot_rounds = 8
[coordinator]
address = "{addresses}"
state_dir = "{place}/nowhere"
[transport]
payloads = "bucket"
insecure = true
[checkpoint]
every_tokens = 100000
[evaluation]
num_sequences = 4
"""


class ThreeSites:
    """The run, and its machines."""

    def __init__(self, place: Path, emulated: Emulated, environment: Mapping[str, str]) -> None:
        self.place, self.environment = place, environment
        self._nodes = emulated.description["islands"]
        at = {name: self._nodes[name]["address"] for name in MACHINES}
        self.addresses = {name: f"{at[name]}:{_PORT}" for name in CONTROL}
        self.run_file = place / "run.toml"
        text = _RUN.format(
            bucket=BUCKET, place=place, steps=900, addresses=",".join(self.addresses.values())
        )
        for machine, site in SYNCERS.items():
            text += f'[syncers.{site}]\nlisten = "{at[machine]}:{_PORT}"\n'
        for site in SITES:
            text += f"[islands.{site}]\nranks = 1\ntokens_per_inner_step = 128\n"
        self.run_file.write_text(text)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, machine: str, *options: str) -> None:
        """Start what a machine is for."""
        if machine in CONTROL:
            words = ["coordinator", "--set", f"coordinator.listen={self.addresses[machine]}"]
        elif machine in SYNCERS:
            words = ["syncer", "--name", SYNCERS[machine]]
        else:
            words = ["island", "--island", machine]
        words[1:1] = [str(self.run_file), "--set", f"coordinator.state_dir={self.disk(machine)}"]
        command = [*self._nodes[machine]["enter"], sys.executable, "-m", "diloco", *words, *options]
        environment = {**os.environ, **(self.environment if machine not in SITES else {})}
        with (self.place / f"{machine}.log").open("ab") as log:
            self.running[machine] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment
            )

    def disk(self, machine: str) -> Path:
        return self.place / "disks" / machine

    def lose(self, machine: str) -> None:
        """Kill whatever runs on a machine, and remove its disk."""
        namespace = self._nodes[machine]["enter"][3]
        while pids := subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True
        ).stdout.split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        self.running[machine].wait()
        shutil.rmtree(self.disk(machine))

    def num_merged(self, site: str) -> int:
        """Count what an island has merged since its disk is there."""
        directory = self.disk(site) / "telemetry"
        files = directory.glob("**/events-*.jsonl") if directory.exists() else ()
        kinds = (event["kind"] for path in files for event in event_lines(path))
        return sum(kind == "fragment_merged" for kind in kinds)

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + _PATIENCE_S
        while not is_so():
            if time.monotonic() > until:
                raise TimeoutError(f"{what} did not come within {_PATIENCE_S:g} s")
            time.sleep(0.2)

    def wait_for_rounds(self, what: str) -> None:
        """Wait until every island has merged some more versions of each fragment."""
        before = {site: self.num_merged(site) for site in SITES}
        more = _ROUNDS * len(SYNCERS)
        for site in SITES:
            self.wait_for(
                f"after {what}: {more} merges of {site}",
                lambda site=site: self.num_merged(site) >= before[site] + more,  # type: ignore[misc]
            )


def main(place: Path) -> None:
    """Lose each machine once, and let the run end."""
    emulated = Emulated.surrounding(os.environ)
    assert emulated is not None
    host = emulated.description["coordinator"]
    story_path = place / "story.txt"
    with s3_server(place / "s3.log", host) as server, story_path.open("w") as story:
        run = ThreeSites(place, emulated, server.environment)
        run.start("first")
        run.wait_for("a coordinator", lambda: (run.disk("first") / "coordinator.json").exists())
        run.start("second", "--standby")
        for machine in (*SYNCERS, *SITES):
            run.start(machine)
        run.wait_for_rounds("the start")
        for machine in MACHINES:
            began = time.monotonic()
            run.lose(machine)
            is_standby = machine in CONTROL or machine in SYNCERS
            run.start(machine, *(["--standby"] if is_standby else []))
            if machine in CONTROL:
                (other,) = set(CONTROL) - {machine}
                address = run.disk(other) / "coordinator.json"
                run.wait_for(f"{other} in the place of {machine}", address.exists)
            run.wait_for_rounds(f"the loss of {machine}")
            said = f"{machine} lost and back, rounds after {time.monotonic() - began:.1f} s\n"
            story.write(said)
            story.flush()
        for site in SITES:
            code = run.running[site].wait(600)
            assert code == 0, f"{site} ended with {code}"
        for machine in SYNCERS:
            assert run.running[machine].wait(60) == 0, machine
        ends = []
        for name in CONTROL:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.running[name].wait(60)
            ends.append(run.running[name].poll())
        story.write(f"coordinators ended: {ends}\n")
        command = [sys.executable, "-m", "diloco", "fetch", str(run.run_file)]
        copy = ["--set", f"coordinator.state_dir={place / 'copy'}"]
        environment = {**os.environ, **server.environment}
        subprocess.run([*command, *copy], check=True, env=environment)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
