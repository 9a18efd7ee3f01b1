"""A real run in which nobody waits: cut, stopped by a signal, resumed on other hardware.

Two islands on real text, one of two FSDP2 ranks; the resumed run has it on one rank, restores the
cut of the stop and ends by its tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGINT

import pytest

from diloco.checkpoint.checkpoints import MANIFEST, step_directory, valid_steps
from diloco.checkpoint.run_checkpoints import membership_of
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.faults.process import STEP_VARIABLE
from diloco.launch.local import LocalRun, find_resume_step
from diloco.report.summary import read_events
from diloco.versions.pins import pinned_steps
from tests.data.text_files import write_stdlib
from tests.run_files import FinishedRun, all_logs, with_text, write_run

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ISLANDS = {"fsdp": "dp_shard = 2", "one": ""}
DECOUPLED = [
    "outer.preset=decoupled",
    "outer.grace=200ms",
    "data.handover_samples=64",
    "checkpoint.every_tokens=4096",
]
INNER_STEPS = 200
#: Seconds of an inner step, at least: the run ends by tokens, and without that a fast island would
#: train them all before a slow one has started. Now it needs 40 s for that.
PACE = {STEP_VARIABLE: "0.1"}


def config_of(directory: Path, *overrides: str) -> Config:
    run_file = directory / "run.toml"
    if not run_file.exists():
        write_run(directory, ISLANDS, inner_steps=INNER_STEPS, inner_steps_per_round=8)
        with_text(run_file, write_stdlib(directory / "text.jsonl"))
    return load_config(run_file, [*DECOUPLED, *overrides])


def run_until_stopped(config: Config) -> None:
    with LocalRun(config, environment=PACE) as run:

        def look() -> None:
            events = read_events(config.telemetry_dir, config.islands)
            steps = [sum(e["kind"] == "inner_step" for e in of) for of in events.values()]
            if not run.request.number and pinned_steps(run.state.store) and min(steps) > 20:
                run.request.note(SIGINT)

        run.start()
        code = run.wait(look)
        run.wait_for_coordinator()
        assert code == 0, f"exit code {code}\n{all_logs(run.state.root)}"
        assert run.is_stopped


def test_a_run_in_which_nobody_waits_is_stopped_with_a_cut_and_resumed(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_until_stopped(config)

    membership = membership_of(config)
    assert membership is not None and membership.is_stopped
    number = membership.checkpoints[-1]
    cut = membership.cuts[number]
    assert (cut.is_last, sorted(cut.parts)) == (True, ["fsdp", "one"])
    assert 2 <= len(membership.checkpoints) <= 3, "those before are by tokens, two good ones"
    for island, part in cut.parts.items():
        assert number in valid_steps(config.checkpoint_dir, island)
        path = step_directory(config.checkpoint_dir, island, number, is_cut=True)
        manifest = json.loads((path / MANIFEST).read_text())
        assert (manifest["inner_step"], manifest["cut"]) == (part.inner_step, number)
        assert tuple(manifest["versions"]) == part.versions

    other = ["islands.fsdp.ranks=1", "islands.fsdp.mesh={}"]
    resumed = config_of(tmp_path, *other)
    lines: list[str] = []
    assert find_resume_step(resumed, None, lines.append, start="diloco local") == number
    assert any(f"resuming from the checkpoint of cut {number}" in line for line in lines)
    with LocalRun(resumed, resume_step=number, environment=PACE) as run:
        run.start()
        code = run.wait(lambda: None)
        run.wait_for_coordinator()
        assert code == 0, f"exit code {code}\n{all_logs(run.state.root)}"
        ended = FinishedRun(run)

    assert len(ended.ending_digests()) == 1
    assert ended.ending_digests() == {tuple(r.digest.hex() for r in ended.last_records())}
    total = resumed.total_tokens
    assert all(record.merged_tokens >= total for record in ended.last_records())
    for island, part in cut.parts.items():
        (begun,) = ended.of_kind(island, "island_resumed")
        assert (begun["inner_step"], begun["timeline"]) == (part.inner_step, 1)
        steps = {event["inner_step"] for event in ended.of_kind(island, "inner_step")}
        assert steps == set(range(1, max(steps) + 1)), "no step is left out"
        returns = ended.of_kind(island, "island_rejoined")
        assert all(event["timeline"] == 0 for event in returns), "it goes on from its part"
