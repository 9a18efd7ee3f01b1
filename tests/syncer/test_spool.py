"""The spool: what is in memory and what on disk, who may arrive, and what is left behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import blake3
import pytest

from diloco.syncer import spool as spool_module
from diloco.syncer.merge import drop
from diloco.syncer.spool import LEAST_ARRIVING_BYTES, Spool, SpooledLane
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.errors import NotYet


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
    with pytest.raises(OSError, match="is not what was written into it"):
        lane.parts()


@pytest.mark.parametrize("payload", [b"memory", b"larger than the limit"])
def test_parts_are_those_of_the_payload_in_memory_and_on_disk(
    spool: Spool, tmp_path: Path, payload: bytes
) -> None:
    lane = put(spool, payload)
    part = lane.parts()

    assert (part(slice(0, 2)), part(slice(3, 6))) == (payload[:2], payload[3:6])
    for file in files(tmp_path):
        file.write_bytes(payload[:4])
        with pytest.raises(OSError, match="ends before what was written into it"):
            part(slice(3, 6))


def test_a_lane_may_be_collected_while_its_spool_is_locked_in_the_same_thread(
    spool: Spool, tmp_path: Path
) -> None:
    def collect() -> None:
        cycle: list[object] = [put(spool, b"12345678")]
        cycle.append(cycle)
        with spool._lock:
            del cycle
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(20.0)

    assert not thread.is_alive(), "the collector waits for a lock that its own thread holds"
    put(spool, b"87654321")
    assert files(tmp_path) == [], "the collected lane made room in memory"


_LETS_GO = """
import sys
from pathlib import Path
from diloco.allocator import keep_freed_memory
from diloco.syncer.merge import drop
from diloco.syncer.spool import Spool

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
drop({"a": dict(enumerate(lanes))})
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator")
def test_what_lay_between_things_in_use_is_given_back(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LETS_GO, str(tmp_path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert int(told) > 100 << 20, "of 128 MiB"


def test_memory_is_let_go_of_before_it_is_given_back_and_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Watched(bytearray):
        pass

    alive: list[int] = []
    payloads = [Watched(b"12"), Watched(b"345")]
    watched = [weakref.ref(payload) for payload in payloads]
    monkeypatch.setattr(spool_module, "_GIVEN_BACK_BYTES", 3)
    monkeypatch.setattr(
        spool_module, "give_back_holes", lambda: alive.append(sum(w() is not None for w in watched))
    )
    spool = Spool(tmp_path, 10)
    lanes = {i: spool.put(payload, b"") for i, payload in enumerate(payloads)}
    payloads.clear()
    alive.clear()

    lanes[1].drop()
    assert alive == [], "an event loop may be where it was dropped"
    drop({"a": lanes})

    assert alive == [0]


def test_what_goes_through_memory_to_the_disk_and_back_is_given_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(spool_module, "_GIVEN_BACK_BYTES", 4)
    monkeypatch.setattr(spool_module, "give_back_holes", lambda: given_back.append(1))
    spool = Spool(tmp_path / "spool", 0)
    spool.start()

    lanes = {i: spool.put(b"12", b"") for i in range(4)}
    assert len(given_back) == 2, "while they arrive, not when the round has closed"
    drop({"a": lanes})

    assert len(given_back) == 3


# -- arrivals --------------------------------------------------------------------------------------

#: Ten of them may arrive at once.
UNIT = LEAST_ARRIVING_BYTES // 10


class Arrivals:
    """Payloads on their way, each until it is told to end; their sizes are in `UNIT`."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(self, name: str, num_bytes: int) -> None:
        self._ends[name] = asyncio.Event()
        task = self.tasks[name] = asyncio.create_task(self._arrive(name, num_bytes))
        # What nobody looks at is logged when it is collected, in the middle of some other test.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()

    async def _arrive(self, name: str, num_bytes: int) -> None:
        async with self.spool.arrival(name, num_bytes * UNIT, has_asked=True):
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


def test_who_did_not_ask_is_sent_away_and_keeps_its_place(spool: Spool) -> None:
    async def scenario() -> None:
        arrivals = Arrivals(spool)
        async with spool.arrival("asked for nothing", 6 * UNIT, has_asked=False):
            with pytest.raises(NotYet, match="call again, and ask before sending"):
                async with spool.arrival("b", 6 * UNIT, has_asked=False):
                    pytest.fail("there is no room")
            await arrivals.begin("c", 6)
            await arrivals.begin("b", 6)
        await settle()
        assert arrivals.inside == ["b"], "b came before c"

        await arrivals.end("b")
        assert arrivals.inside == ["c"]

    asyncio.run(scenario())


def test_a_payload_arrives_and_waits_but_once(spool: Spool) -> None:
    async def scenario() -> None:
        arrivals = Arrivals(spool)
        calls = [Arrivals(spool) for _ in range(3)]
        for arrivals in calls:
            await arrivals.begin("a", 1)
        await calls[0].begin("b", 1)

        assert [arrivals.inside for arrivals in calls] == [["a", "b"], [], []]
        with pytest.raises(NotYet, match="a newer call for the same lane"):
            await calls[1].tasks["a"]
        await calls[0].end("a")
        assert calls[2].inside == ["a"]

    asyncio.run(scenario())


def test_a_place_is_kept_for_a_while(spool: Spool) -> None:
    async def scenario() -> None:
        arrivals = Arrivals(spool)
        await arrivals.begin("a", 10)
        for name in "bcd":
            await arrivals.begin(name, 10)
            await asyncio.sleep(0.1)
        await asyncio.sleep(5.0)
        for name in "bcd":
            with pytest.raises(NotYet):
                await arrivals.tasks[name]

        await asyncio.sleep(5.0)
        for name in "dc":
            await arrivals.begin(name, 10)
        await arrivals.end("a")
        assert arrivals.inside == ["c"], "b is away"
        await asyncio.sleep(10.0)
        assert list(spool._waiting) == ["b", "d"]
        await arrivals.end("c")
        assert list(spool._waiting) == ["d"], "b was away for too long, and d is for less"

    run_virtual(scenario())


def test_a_small_spool_has_room_for_more_than_a_lane_at_once(tmp_path: Path) -> None:
    assert Spool(tmp_path, 10).lets_in(64 << 20)
    assert not Spool(tmp_path, 10).lets_in((64 << 20) + 1)
    assert Spool(tmp_path, 1 << 30).lets_in(1 << 30)
