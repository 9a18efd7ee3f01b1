"""The bench of the guard on a tiny model: who is refused, who is named, who ends itself."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from diloco.bench.outer_loop.guard import as_row, chosen_cells, guard_cost_ns, requirements_of
from diloco.bench.outer_loop.guard_cell import MODES, CellResult, GuardCell, GuardSetting, run_cell

TASK = replace(GuardSetting().task, inner_steps=48, sequence_length=16, evaluation_sequences=4)
SETTING = GuardSetting(TASK, inner_steps_per_round=6, fault_step=25)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_two_cells_and_what_is_required_of_them() -> None:
    three, two = GuardCell("scheduled", 3, "x100"), GuardCell("scheduled", 2, "signs")
    results = {cell: run_cell(SETTING, cell, 1) for cell in (three, two)}
    undisturbed = CellResult(3.0, "", {}, {}, (), is_opposed=False, left=())
    results |= {replace(cell, fault="none"): undisturbed for cell in results}

    rows = [as_row(cell, results) for cell in results]

    x100, signs, *clean = rows
    assert x100["named"] == "yes" and x100["declined"] and x100["ends"] == "island-2"
    assert signs["named"] == "yes" and signs["declined"] and not signs["false"]
    assert all(row["ratio"] == 1.0 and not row["named"] for row in clean)
    bars = {bar.what: bar for bar in requirements_of([{**row, "without": 9.0} for row in rows])}
    assert bars["loss with signs, two islands, worst cell"].is_met
    assert bars["cells in which the faulty island is not named"].is_met
    assert bars["contributions of healthy islands refused or declined"].is_met


def test_a_healthy_island_that_is_refused_misses_the_bar() -> None:
    row = {"islands": 3, "fault": "none", "refused": 0, "declined": 0, "false": 1}

    assert [bar.is_met for bar in requirements_of([row])] == [True, False]


def test_every_cell_has_what_it_is_held_against() -> None:
    for is_full in (False, True):
        cells = chosen_cells(is_full=is_full)
        assert {cell.mode for cell in cells} == set(MODES)
        for cell in cells:
            assert GuardCell(cell.mode, cell.num_islands, "none") in cells
            assert cell.num_islands > 2 or GuardCell(cell.mode, 2, "leave") in cells


def test_the_cost_is_that_of_a_merge_that_refuses_nobody() -> None:
    assert guard_cost_ns(numel=1 << 14, repeats=1) > 0
