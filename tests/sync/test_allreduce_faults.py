"""Faults of an all-reduce that are nobody's death: what is told late, wrongly, or not written."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import pytest

from diloco.coordinator.round_journal import JournalUnwritable
from diloco.outer.optimizer import OuterOptimizer
from tests.sync.test_allreduce_deaths import Living, descend, insist_on_one_truth, living
from tests.virtual_allreduce import AllReduceRun
from tests.virtual_run import Setting
from transport.loopback import run_virtual


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(
        {name: [16.0] * 5 for name in "tuvw"},
        descend,
        tmp_path,
        inner_steps=12,
        islands=("a", "b", "c"),
        num_fragments=2,
        overlap_steps=1,
        flush=True,
        optimizer=OuterOptimizer("nesterov", 0.7, 0.9, 2),
        uplink_codec="int4",
        downlink_codec="int4",
        round_deadline_s=20.0,
    )


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power loss, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# -- the journal -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_expiry", [False, True], ids=["commit", "expiry"])
def test_a_coordinator_that_cannot_write_ends_and_its_next_start_goes_on(
    setting: Setting, is_expiry: bool
) -> None:
    run = AllReduceRun(setting)

    async def scenario() -> Living:
        islands = await living(run)
        write = run.journal.write

        def full(
            entries: Iterable[tuple[str, str]], rounds: Iterable[tuple[int, int, int, str]] = ()
        ) -> None:
            entries = list(entries)
            value = json.loads(dict(entries).get("round/0", "{}"))
            if value.get("attempt") if is_expiry else value and value["record"]["version"] == 2:
                raise sqlite3.OperationalError("database or disk is full")
            write(entries, rounds)

        run.journal.write = full  # type: ignore[method-assign]
        if is_expiry:
            await asyncio.sleep(2.0)
            await islands.kill("b")
        with pytest.raises(JournalUnwritable, match=r"disk is full.*diloco coordinator RUN\.toml"):
            await run.decider.watch()
        await run.kill_decider()
        await run.start_decider()
        if is_expiry:
            await islands.begin("b")
        await islands.end()
        return islands

    islands = run_virtual(scenario())

    insist_on_one_truth(run, islands)
