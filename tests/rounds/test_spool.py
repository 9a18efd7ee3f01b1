"""The spool: what is in memory and what on disk, who may arrive, and what is left behind."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from pathlib import Path

import blake3
import pytest

from diloco.outer.fragments import TensorSpec, make_plan
from diloco.rounds.spool import Spool, SpooledLane


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """Ten bytes in memory, the rest on disk."""
    spool = Spool(tmp_path / "spool", 10)
    spool.start()
    return spool


def put(spool: Spool, payload: bytes) -> SpooledLane:
    return spool.put(payload, blake3.blake3(payload).digest())


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "spool").iterdir())


def test_payloads_beyond_the_limit_wait_on_disk(spool: Spool, tmp_path: Path) -> None:
    payloads = [b"123456", b"7890", b"x", b"yz"]

    lanes = [put(spool, payload) for payload in payloads]

    assert [path.read_bytes() for path in files(tmp_path)] == [b"x", b"yz"]
    assert [bytes(lane.read()) for lane in lanes] == payloads
    assert [lane.num_bytes for lane in lanes] == [6, 4, 1, 2]


def test_what_is_dropped_makes_room_and_leaves_no_file(spool: Spool, tmp_path: Path) -> None:
    held, stored = put(spool, b"1234567890"), put(spool, b"abc")

    for lane in (held, stored, held, stored):
        lane.drop()

    assert files(tmp_path) == []
    assert put(spool, b"0987654321").read() == b"0987654321"
    assert files(tmp_path) == [], "ten bytes again, not twenty"


def test_a_start_removes_what_an_earlier_one_left(spool: Spool, tmp_path: Path) -> None:
    put(spool, b"larger than the limit")

    Spool(tmp_path / "spool", 10).start()

    assert files(tmp_path) == []


def test_a_file_that_rotted_is_not_merged(spool: Spool, tmp_path: Path) -> None:
    lane = put(spool, b"larger than the limit")
    files(tmp_path)[0].write_bytes(b"larger than the limix")

    with pytest.raises(OSError, match="is not what was written into it"):
        lane.read()


def test_all_contributions_fit_or_the_initial_parameters_do_not(tmp_path: Path) -> None:
    fragments = make_plan([TensorSpec("w", (1 << 16,))], num_fragments=2).fragments
    initial = 4 * sum(fragment.padded_numel for fragment in fragments)

    assert Spool(tmp_path, initial).holds(fragments, "float32", 1)
    assert not Spool(tmp_path, initial).holds(fragments, "float32", 2)
    assert Spool(tmp_path, initial).holds(fragments, "int4", 7)
    assert not Spool(tmp_path, initial - 1).holds(fragments, "int4", 1)


_LETS_GO = """
import sys
from pathlib import Path
from diloco.allocator import keep_freed_memory
from diloco.rounds.spool import Spool

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

keep_freed_memory()
spool, between = Spool(Path(sys.argv[1]), 1 << 30), []
lanes = []
for _ in range(256):
    lanes.append(spool.put(bytearray(b"x" * (512 << 10)), b""))
    between.append(bytearray(8 << 10))
before = resident()
for lane in lanes:
    lane.drop()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator")
def test_what_lay_between_things_in_use_is_given_back(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LETS_GO, str(tmp_path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    assert int(told) > 100 << 20, "of 128 MiB"


# -- arrivals --------------------------------------------------------------------------------------


class Arrivals:
    """Payloads on their way, each until it is told to end."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(self, name: str, num_bytes: int) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._arrive(name, num_bytes))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()

    async def _arrive(self, name: str, num_bytes: int) -> None:
        async with self.spool.arrival(num_bytes):
            self.inside.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.inside.remove(name)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_no_more_than_the_limit_arrives_at_once_and_in_order(spool: Spool) -> None:
    async def scenario() -> None:
        arrivals = Arrivals(spool)
        for name, num_bytes in (("a", 6), ("b", 4), ("c", 5), ("d", 1)):
            await arrivals.begin(name, num_bytes)
        assert arrivals.inside == ["a", "b"]

        await arrivals.end("b")
        assert arrivals.inside == ["a"], "d has room, and comes after c"
        await arrivals.end("a")
        assert arrivals.inside == ["c", "d"]

    asyncio.run(scenario())


def test_a_payload_over_the_limit_arrives_alone(spool: Spool) -> None:
    async def scenario() -> None:
        arrivals = Arrivals(spool)
        await arrivals.begin("small", 1)
        await arrivals.begin("large", 99)
        assert arrivals.inside == ["small"]

        await arrivals.end("small")
        await arrivals.begin("next", 1)
        assert arrivals.inside == ["large"]
        await arrivals.end("large")
        assert arrivals.inside == ["next"]

    asyncio.run(scenario())


def test_who_goes_away_frees_its_room_and_its_turn(spool: Spool) -> None:
    async def scenario() -> None:
        arrivals = Arrivals(spool)
        for name, num_bytes in (("a", 6), ("b", 9), ("c", 4), ("d", 9)):
            await arrivals.begin(name, num_bytes)
        assert arrivals.inside == ["a"]

        await arrivals.cancel("b")
        assert arrivals.inside == ["a", "c"]
        await arrivals.cancel("a")
        await arrivals.cancel("c")
        assert arrivals.inside == ["d"]

    asyncio.run(scenario())


def test_who_goes_away_as_it_is_let_in_takes_nothing_with_it(spool: Spool) -> None:
    async def scenario() -> None:
        arrivals = Arrivals(spool)
        for name in "abc":
            await arrivals.begin(name, 10)
        arrivals._ends["a"].set()
        await asyncio.sleep(0)  # b has its turn, and has not run yet
        await arrivals.cancel("b")

        assert arrivals.inside == ["c"]

    asyncio.run(scenario())


def test_who_goes_away_in_the_step_in_which_room_comes_takes_nothing_with_it(spool: Spool) -> None:
    async def scenario() -> None:
        arrivals = Arrivals(spool)
        for name in "abc":
            await arrivals.begin(name, 10)
        arrivals.tasks["a"].cancel()
        arrivals.tasks["b"].cancel()  # does not wait any more when a's end asks who is next
        await settle()

        assert arrivals.tasks["b"].cancelled()
        assert arrivals.inside == ["c"]

    asyncio.run(scenario())
