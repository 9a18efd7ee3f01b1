"""The object store breaks at each step of a move, processes die with it, and the move still ends.

Real processes, each with directories of its own; a real S3 server behind a proxy that breaks with
the very request that makes a step durable, so that the step is or is not in the store and nobody
was told which. What is published is, bit for bit, what a run comes to that nothing happens to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco.bench.network.s3_server import S3Server, free_port, s3_server, serving
from diloco.chaos.bucket import Bucket, _Request
from diloco.chaos.plan import BUCKET, Kind, Strength, TimedFault
from diloco.checkpoint.published import read_published
from diloco.config.load import load_config
from diloco.state_dir import StateDir, holder
from tests.placed_run import ISLANDS, SYNCERS, PlacedRun
from tests.run_files import indexed_headers, write_run
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STEPS, NUM_FRAGMENTS = 360, 4


@dataclass(frozen=True)
class Break:
    """What happens at one step of a move.

    Args:
        chain: Whose entry is the step; {source} and {target} are syncers.
        says: Of that entry.
        is_done: Whether it is in the store; its writer gets no answer either way.
        kind: Of what happens to all requests from then on; None: to those of this step alone.
        lasts_s: For so long.
        killed: Who is killed meanwhile: "coordinator", "source" or "target", which are started
            again by hand, "source-child" or "target-child", by their supervisors.
        of_all: Whether all fragments of the source move.
    """

    chain: str
    says: bytes
    is_done: bool
    kind: Kind | None
    lasts_s: float
    killed: str = ""
    of_all: bool = False


#: The record of the move, and each file that is copied.
COPYING = (
    Break("run", b"moves", False, Kind.CUT, 4.0, "coordinator"),
    Break("syncer-{target}", b"moved/", True, Kind.READ_ONLY, 4.0, "target-child"),
    Break("syncer-{target}", b"moved/", False, Kind.FREEZE, 20.0, "source-child"),
)
#: The mark of what is let go of, that it is, that it is taken, and that the move is done.
HANDING_OVER = (
    Break("syncer-{source}", b"let-go.json", True, Kind.ERRORS, 4.0, "source"),
    Break("syncer-{source}", b"fragments.json", False, None, 27.0, of_all=True),
    Break("syncer-{target}", b"fragments.json", True, Kind.CORRUPT, 4.0, "target"),
    Break("run", b"moves", True, Kind.CUT, 4.0, "coordinator"),
)


class BreakingBucket(Bucket):
    """A bucket that breaks with a request that was chosen before."""

    def __init__(self, server: S3Server) -> None:
        super().__init__(server.port)
        self.server = server
        self._at: tuple[str, Break] | None = None
        self.is_met = threading.Event()

    def break_at(self, chain: str, step: Break) -> None:
        self.is_met.clear()
        self._at = f"/{chain}/log/", step

    async def _done(self, request: _Request, body: bytes) -> bytes:
        at = self._at
        if at is None or at[0] not in request.name or at[1].says not in body:
            return await super()._done(request, body)
        step = at[1]
        if step.is_done:
            await super()._done(request, body)
        if step.kind is Kind.FREEZE:
            self.server.process.send_signal(signal.SIGSTOP)
        elif step.kind is not None:
            share = Strength(share=0.5 if step.kind is Kind.CORRUPT else 1.0)
            self.begin(TimedFault(0, step.kind, BUCKET, 0.0, step.lasts_s, 7, share))
        if step.kind is not None:
            self._at = None
        self.is_met.set()
        raise ConnectionResetError("on purpose")

    def mend(self) -> None:
        self._at = None
        self.server.process.send_signal(signal.SIGCONT)
        self.end()


class MovingRun(PlacedRun):
    """A run whose fragments are moved, and which another machine can coordinate, too."""

    options = "--set", "checkpoint.every_inner_steps=80"

    def __init__(self, directory: Path, bucket: BreakingBucket) -> None:
        directory.mkdir()
        super().__init__(directory, bucket, NUM_STEPS, num_fragments=NUM_FRAGMENTS)
        self.bucket = bucket
        self.address = load_config(self.run_file).coordinator.address
        self.standby_address = f"127.0.0.1:{free_port()}"
        text, said = self.run_file.read_text(), '\naddress = "{}"'
        both = f"{self.address},{self.standby_address}"
        self.run_file.write_text(text.replace(said.format(self.address), said.format(both)))
        self.at_work: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        self.at_work = self.start_all(*self.options)
        wait_until(lambda: self.num_versions("eu", "eu") >= 3, what=self.said)

    def ask(self, command: str, *arguments: str) -> Callable[[], tuple[int, str]]:
        """Begin to ask the coordinator; gives what waits for exit code and words."""
        command_line = [sys.executable, "-m", "diloco", command, self.address, *arguments]
        pipe = subprocess.PIPE
        asking = subprocess.Popen(command_line, stdout=pipe, stderr=pipe, text=True)

        def answer() -> tuple[int, str]:
            said, refused = asking.communicate(timeout=120)
            return asking.returncode, said + refused

        return answer

    def wait_for_moves(self) -> None:
        """Wait until none is under way; each fragment has one syncer then."""

        def are_done() -> bool:
            code, said = self.ask("status")()
            return code == 0 and " moves from " not in said

        wait_until(are_done, every_s=0.5, what=self.said)
        served = sorted(p for name in SYNCERS for p in self.served(name))
        assert served == list(range(NUM_FRAGMENTS)), self.said()

    def start_coordinator(self, where: str = "control", *arguments: str) -> None:
        self.at_work["coordinator"] = self.start(where, "coordinator", *self.options, *arguments)

    def kill(self, who: str, name: str) -> None:
        """Kill a party; started again at once, or by its supervisor if only the child was."""
        if who == "coordinator":
            self.at_work[who].kill()
            self.at_work[who].wait()
            self.start_coordinator()
        elif who.endswith("-child"):
            if (pid := holder(self.syncer(name, name).store_lock)) is not None:
                os.kill(pid, signal.SIGKILL)
        elif who:
            self.signal(name, name, signal.SIGKILL)
            self.at_work[name].wait()
            self.at_work[name] = self.start(name, "syncer", "--name", name, *self.options)

    def break_at(self, step: Break, source: str, target: str) -> None:
        """Move what the source has, or one fragment of it, while the step breaks."""
        own = self.served(source)
        chosen = ("--from", source) if step.of_all else ("--fragments", str(own[0]))
        order = "move", *chosen, "--to", target
        if is_last := step.chain == "run" and step.is_done:  # of two entries that say so
            asking = self.ask(*order)
            assert asking()[0] == 0, self.said()
        self.bucket.break_at(step.chain.format(source=source, target=target), step)
        if not is_last:
            asking = self.ask(*order)
        assert self.bucket.is_met.wait(90), f"{step}\n{self.said()}"
        names = {"source": source, "target": target}
        self.kill(step.killed, names.get(step.killed.removesuffix("-child"), ""))
        time.sleep(step.lasts_s)
        self.bucket.mend()
        while asking()[0] != 0:  # the coordinator was killed, or could not write it down
            asking = self.ask(*order)
        self.wait_for_moves()
        moved = set(own if step.of_all else own[:1])
        assert moved <= set(self.served(target)), self.said()

    def check_end(self, undisturbed: list[tuple[int, str]], where: str) -> None:
        """Every version once, the same digests, and no island has started again."""
        for name, process in self.at_work.items():
            assert process.wait(200) == 0, f"{name}\n{self.said()}"
        assert self.published() == undisturbed
        headers = indexed_headers(StateDir(self.directory / where))
        made = sorted((header["fragment_id"], header["version"]) for header in headers)
        due = [(p, v) for p, (last, _) in enumerate(undisturbed) for v in range(last + 1)]
        assert made == due
        assert self.num_starts(where) == [1, 1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    directory = tmp_path_factory.mktemp("one")
    islands = dict.fromkeys(ISLANDS, "")
    run_file = write_run(directory, islands, inner_steps=NUM_STEPS, num_fragments=NUM_FRAGMENTS)
    command = [sys.executable, "-m", "diloco", "local", str(run_file)]
    subprocess.run(command, check=True, capture_output=True)
    state = StateDir(Path(load_config(run_file).coordinator.state_dir))
    return [(each.version, each.digest) for each in read_published(state).fragments]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MovingRun]:
    with s3_server(tmp_path / "s3.log") as server, ExitStack() as ending:
        bucket = BreakingBucket(server)
        bucket.port = ending.enter_context(serving(bucket.join))
        for key, value in bucket.environment.items():
            monkeypatch.setenv(key, value)
        run = MovingRun(tmp_path / "placed", bucket)
        ending.callback(run.end)
        ending.callback(bucket.mend)
        run.begin()
        yield run


@pytest.mark.parametrize("breaks", [COPYING, HANDING_OVER], ids=["copying", "handing-over"])
def test_a_move_ends_whatever_the_bucket_does_at_any_step_of_it(
    run: MovingRun, undisturbed: list[tuple[int, str]], breaks: tuple[Break, ...]
) -> None:
    for number, step in enumerate(breaks):
        run.break_at(step, *(SYNCERS if number % 2 == 0 else SYNCERS[::-1]))

    run.check_end(undisturbed, "control")


def test_a_standby_takes_over_moves_that_were_asked_for_both_ways_at_once(
    run: MovingRun, undisturbed: list[tuple[int, str]]
) -> None:
    standby = ("--set", f"coordinator.listen={run.standby_address}", "--standby")
    first = run.at_work["coordinator"]
    run.start_coordinator("standby", *standby)
    p = str(run.served("eu")[0])
    for asked in (
        [("--fragments", p, "--to", "us")] * 2 + [("--fragments", p, "--to", "eu")],
        [("--from", "eu"), ("--from", "us")],
        [("--from", "us", "--to", "eu"), ("--from", "eu", "--to", "us")],
    ):
        answers = [answer() for answer in [run.ask("move", *each) for each in asked]]
        refused = [said for code, said in answers if code != 0]
        assert all("name one of these with --to" in said for said in refused), answers
    run.bucket.break_at("syncer-us", Break("", b"moved/", True, Kind.CUT, 0.0))
    asking = run.ask("move", "--from", "eu", "--to", "us")
    assert run.bucket.is_met.wait(90), run.said()

    first.kill()
    run.bucket.mend()
    asking()  # it was written down, or was to be what was asked for before
    run.address = run.standby_address
    run.wait_for_moves()

    run.check_end(undisturbed, "standby")
