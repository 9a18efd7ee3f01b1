"""Power lost after any call: what was durable is there, what was not never existed.

Every state that the disk may be in is built from the calls that the store made, recovered, and
written on from.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.rounds.terms import RecordExpiry, RoundKey
from diloco.versions.pins import verify_pin
from diloco.versions.record import RecordInvalid, versions_in
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord
from tests.recorded_disk import RecordedDisk, crash_states, lay_out
from tests.versions import test_store
from tests.versions.test_store import first, following, put

RETAINED = 2
PLAN = make_plan([TensorSpec("w", (300,))], num_fragments=1)
FRAGMENT = PLAN.fragments[0]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks, so that a record has few sectors."""
    monkeypatch.setattr(test_store, "FRAGMENT", FRAGMENT)


@dataclass
class Promised:
    """What had returned when the power went, after `num_done` calls of the disk."""

    num_done: int
    version: int = -1
    attempt: int = 0
    pins: dict[int, int] = field(default_factory=dict)


class Recorder:
    """A store that is written to, and what it promised after each call."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, snapshot_rounds: int) -> None:
        root.mkdir()
        self.root = root
        self.snapshot_rounds = snapshot_rounds
        self.disk = RecordedDisk(root, monkeypatch)
        self.store = self.opened(root)
        self.made: list[VersionRecord] = []
        self.promised = [Promised(0)]
        self.do(self.store.recover)

    def opened(self, root: Path) -> FragmentStore:
        return FragmentStore(
            root / "store", FRAGMENT, RETAINED, snapshot_rounds=self.snapshot_rounds
        )

    def do(self, work: Callable[[], object], **promised: object) -> None:
        with self.disk:
            work()
        last = self.promised[-1]
        self.promised.append(
            Promised(
                len(self.disk.changes),
                **{  # type: ignore[arg-type]
                    "version": last.version,
                    "attempt": last.attempt,
                    "pins": last.pins,
                    **promised,
                },
            )
        )

    def publish(self) -> None:
        attempt = self.promised[-1].attempt
        record = following(self.made[-1], attempt=attempt) if self.made else first()
        self.made.append(record)
        self.do(lambda: put(self.store, record), version=record.version, attempt=0)

    def expire(self) -> None:
        last = self.promised[-1]
        key = RoundKey(0, 0, last.version, last.attempt)
        expiry = RecordExpiry(key, "", ("b",))
        self.do(lambda: self.store.record_expiry(expiry), attempt=last.attempt + 1)

    def pin(self, step: int, version: int) -> None:
        pins = {**self.promised[-1].pins, step: version}
        self.do(lambda: self.store.pin(step, version), pins=pins)


@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(1, marks=(pytest.mark.slow, pytest.mark.timeout(600)), id="all"),
        pytest.param(7, id="some"),
    ],
)
@pytest.mark.parametrize("snapshot_rounds", [1, 3], ids=["snapshot", "log"])
def test_power_lost_at_any_moment_takes_nothing_that_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot_rounds: int, stride: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # of the states below
    recorder = Recorder(tmp_path / "run", monkeypatch, snapshot_rounds)
    for number in range(8):
        recorder.publish()
        if number in (1, 4):
            recorder.expire()
            recorder.expire()
        if number in (2, 5):
            recorder.pin(8 * number, number)
            recorder.pin(8 * number + 1, number - 1)

    seen: set[int] = set()
    for before, after in zip(recorder.promised, recorder.promised[1:], strict=False):
        for num_done in range(before.num_done, after.num_done + 1):
            promised = after if num_done == after.num_done else before
            for state in crash_states(recorder.disk.changes, num_done):
                mark = hash((promised.num_done, *sorted(state.items(), key=lambda kept: kept[0])))
                if mark in seen:
                    continue
                seen.add(mark)
                if len(seen) % stride == 0:
                    assert_kept(recorder, state, promised, after, tmp_path / "crashed")

    assert len(seen) > 400


def assert_kept(
    recorder: Recorder,
    state: dict[str, bytes | None],
    promised: Promised,
    under_way: Promised,
    root: Path,
) -> None:
    lay_out(state, root)
    store = recorder.opened(root)

    recovered = store.recover()
    assert store.lost == -1, "a crash damages nothing"

    newest = -1 if recovered is None else recovered.record.version
    assert promised.version <= newest <= max(promised.version, under_way.version)
    for version in range(max(0, newest - RETAINED), newest + 1):
        assert store.load(version).header() == recorder.made[version].header()
    for step, version in under_way.pins.items():
        try:
            verify_pin(root / "store", PLAN, step)
        except RecordInvalid:
            assert step not in promised.pins
        else:
            directory = root / "store" / "pins" / f"step-{step:012d}" / "fragment-0000"
            assert versions_in(directory) == [version]
    if recovered is not None:
        if newest == promised.version:
            assert promised.attempt <= recovered.attempt <= promised.attempt + 1
        following_one = following(recovered.record, attempt=recovered.attempt)
        put(store, following_one)
        again = recorder.opened(root).recover()
        assert again is not None
        assert again.record.header() == following_one.header()
    shutil.rmtree(root)
