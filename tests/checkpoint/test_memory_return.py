"""An island that returns takes its inner state from memory or storage, whichever is newer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.checkpoint.checkpoints import MANIFEST, step_directory
from diloco.checkpoint.island_checkpoints import IslandCheckpoints
from diloco.island.exchange.state_transfer import NotTransferred
from diloco.protocol.rounds.transfer_manifest import TransferManifest
from diloco.telemetry.events import Event, InnerStateTaken
from diloco.trainer.state import optimizer_step
from tests.checkpoint.small_checkpoint import ISLAND, Trained

#: Where the island goes on, and how old the optimizer is that its checkpoints hold.
START_STEP, AGE = 6, 2


class Memory:
    """Copies of which the newest is known; None: there is none."""

    def __init__(self, newest: int | None) -> None:
        self.newest = newest
        self.search_s = 100.0
        self.has_loaded = False

    def load_(self) -> tuple[dict[str, Any], int]:
        self.has_loaded = True
        return {"inner_step": self.newest}, 77


class Batches:
    """Notes where it was sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sent.append(state["inner_step"])

    def seek(self, inner_step: int) -> None:
        self.sent.append(inner_step)


class Other:
    """Another island, which gives an inner optimizer or says why not."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.was_asked = False

    def take_(self, model: Any, optimizer: Any) -> TransferManifest:
        self.was_asked = True
        if self.refusal:
            raise NotTransferred(self.refusal)
        return TransferManifest("run", 0, "west", 12, 5, "adamw", 5, (3,), "", {})


def take_up(
    directory: Path,
    trained: Any,
    batches: Any,
    memory: Any,
    told: list[Event],
    *,
    on_arrival: bool,
    other: Any = None,
) -> None:
    """Return at `START_STEP`."""
    site: Any = SimpleNamespace(
        config=SimpleNamespace(
            checkpoint_dir=directory,
            island_id=ISLAND,
            run=SimpleNamespace(name="tiny"),
            outer=SimpleNamespace(is_on_arrival=on_arrival),
        ),
        report_checkpoints=lambda steps: None,
    )
    outer: Any = SimpleNamespace(
        plan=trained.plan(), versions=[1], resume_step=None, start_step=START_STEP
    )
    checkpoints = IslandCheckpoints(
        site, outer, trained, batches, memory=memory, receiver=other, on_event=told.append
    )
    checkpoints.take_up(None)


@pytest.mark.parametrize(
    ("written", "damaged", "newest", "expected", "sent"),
    [
        pytest.param([], [], 4, ("memory", 4), [4, 6], id="no-storage"),
        pytest.param([], [], 8, ("memory", 8), [6], id="copy-ahead-of-the-start"),
        pytest.param([2], [], 4, ("memory", 4), [4, 6], id="memory-is-newer"),
        pytest.param([2, 4], [], 4, ("memory", 4), [4, 6], id="equally-new"),
        pytest.param([2, 5], [], 4, ("checkpoint", 5), [6], id="storage-is-newer"),
        pytest.param([5], [5], 4, ("memory", 4), [4, 6], id="newer-storage-is-damaged"),
        pytest.param([2, 5], [5], None, ("checkpoint", 2), [6], id="no-copy"),
        pytest.param([5], [5], None, ("fresh", 0), [6], id="neither"),
    ],
)
def test_the_newer_of_memory_and_storage_is_taken(
    tmp_path: Path,
    written: list[int],
    damaged: list[int],
    newest: int | None,
    expected: tuple[str, int],
    sent: list[int],
) -> None:
    source = Trained(num_steps=AGE)
    for step in written:
        source.write(tmp_path, step)
    for step in damaged:
        (step_directory(tmp_path, ISLAND, step) / MANIFEST).write_text("{}")
    trained, memory, batches = Trained(seed=2, num_steps=0), Memory(newest), Batches()
    told: list[Event] = []

    take_up(tmp_path, trained, batches, memory, told, on_arrival=False)

    taken = [event for event in told if isinstance(event, InnerStateTaken)]
    assert [(event.source, event.taken_step) for event in taken] == [expected]
    assert all(event.inner_step == START_STEP for event in taken)
    assert all(event.seconds >= 100.0 for event in taken), "the search is part of it"
    assert batches.sent == sent
    assert memory.has_loaded == (expected[0] == "memory")
    is_from_storage = expected[0] == "checkpoint"
    assert optimizer_step(trained.optimizer) == (AGE if is_from_storage else 0)


@pytest.mark.parametrize(
    ("memory", "other", "unset"),
    [
        (None, None, ["memory_checkpoint_steps", "heal_optimizer"]),
        (Memory(None), Other("it is away"), []),
    ],
)
def test_who_begins_again_hears_what_it_has_not_set(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    memory: Memory | None,
    other: Other | None,
    unset: list[str],
) -> None:
    take_up(
        tmp_path, Trained(num_steps=0), Batches(), memory, [], on_arrival=False, other=other
    )  # fmt: skip

    settings = ["checkpoint.every_inner_steps", *(f"islands.{ISLAND}.{name}" for name in unset)]
    assert f"(set {' or '.join(settings)} to keep it" in caplog.text


@pytest.mark.parametrize(
    ("copied", "expected"), [(None, ("checkpoint", 4)), (5, ("memory", 5)), (3, ("checkpoint", 4))]
)
def test_where_nobody_waits_an_island_returns_with_the_optimizer_of_its_newest_cut(
    tmp_path: Path, copied: int | None, expected: tuple[str, int]
) -> None:
    source = Trained(num_steps=AGE)
    for step, cut in ((2, 11), (4, 12)):  # numbers of cuts say nothing of inner steps
        source.write(tmp_path, step, cut)
    trained, told = Trained(seed=2, num_steps=0), list[Event]()

    take_up(tmp_path, trained, Batches(), Memory(copied), told, on_arrival=True)

    (taken,) = [event for event in told if isinstance(event, InnerStateTaken)]
    assert (taken.source, taken.taken_step) == expected
    assert optimizer_step(trained.optimizer) == (AGE if expected[0] == "checkpoint" else 0)


@pytest.mark.parametrize(
    ("written", "copied", "refusal", "expected"),
    [
        pytest.param(True, None, "", ("checkpoint", 2, "", 0, ""), id="own-checkpoint"),
        pytest.param(False, 4, "", ("memory", 4, "", 0, ""), id="own-memory"),
        pytest.param(False, None, "", ("island", 5, "west", 12, ""), id="neither"),
        pytest.param(False, None, "it is away", ("fresh", 0, "", 0, "it is away"), id="nobody"),
    ],
)
def test_another_island_is_asked_by_who_has_nothing_of_its_own(
    tmp_path: Path,
    written: bool,
    copied: int | None,
    refusal: str,
    expected: tuple[str, int, str, int, str],
) -> None:
    if written:
        Trained(num_steps=AGE).write(tmp_path, 2, cut=11)
    told, other, batches = list[Event](), Other(refusal), Batches()

    take_up(
        tmp_path, Trained(seed=2, num_steps=0), batches, Memory(copied), told,
        on_arrival=True, other=other,
    )  # fmt: skip

    (taken,) = [event for event in told if isinstance(event, InnerStateTaken)]
    said = taken.source, taken.taken_step, taken.from_island, taken.checkpoint, taken.reason
    assert said == expected
    assert other.was_asked == (expected[0] in ("island", "fresh"))
