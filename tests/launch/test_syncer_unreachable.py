"""When a process ends since it reaches nobody: in virtual time, and never by a moment it missed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from diloco.errors import CoordinatorUnavailable
from diloco.launch.coordinator_contact import end_when_unreachable
from diloco.launch.syncer_process import _start
from diloco.protos.fragment_pb2 import FragmentState
from diloco.transport.calls.loopback import run_virtual


class Founding:
    """A syncer of a whole, a damaged or a missing fragment, and a coordinator that is silent."""

    num_answers = 0

    def __init__(self, **state: bool) -> None:
        self.states = [FragmentState(is_founded=True), FragmentState(**state)]

    async def start(self) -> None:
        pass

    async def learn_plan(self) -> None:
        await asyncio.Event().wait()

    def indexed(self) -> None:
        raise AssertionError("nobody has said it")


def test_a_syncer_that_has_to_found_ends_too_and_a_damaged_fragment_waits_for_nobody() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        missing: Any = Founding()
        with pytest.raises(CoordinatorUnavailable, match=r"600 s \(transport.unreachable\)"):
            await _start(missing, missing, 600.0)
        assert (began := loop.time()) == pytest.approx(600.0, abs=6.0)

        damaged: Any = Founding(is_damaged=True)
        await _start(damaged, damaged, 600.0)

        assert loop.time() == began

    run_virtual(scenario())


def test_it_ends_after_so_long_without_a_word_and_says_by_which_key() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        words = [0]
        ending = asyncio.create_task(end_when_unreachable(lambda: words[0], 600.0))
        for _ in range(5):
            await asyncio.sleep(590.0)
            words[0] += 1
        last = loop.time()

        with pytest.raises(CoordinatorUnavailable, match=r"600 s \(transport.unreachable\)"):
            await ending
        assert loop.time() - last == pytest.approx(600.0, abs=6.0)

    run_virtual(scenario())


def test_a_key_that_is_shorter_than_reports_are_apart_ends_nobody_that_is_reported_to() -> None:
    async def scenario() -> None:
        words = [0]
        ending = asyncio.create_task(end_when_unreachable(lambda: words[0], 0.1))
        for _ in range(100):
            await asyncio.sleep(2.0)
            words[0] += 1
        assert not ending.done()
        ending.cancel()

    run_virtual(scenario())


def test_what_it_slept_through_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        frozen_s = 0.0
        monkeypatch.setattr(
            "diloco.launch.coordinator_contact.loop_now", lambda: loop.time() + frozen_s
        )
        ending = asyncio.create_task(end_when_unreachable(lambda: 0, 600.0))
        await asyncio.sleep(100.0)

        frozen_s = 5000.0
        await asyncio.sleep(100.0)

        assert not ending.done()
        ending.cancel()

    run_virtual(scenario())
