"""What a run is resumed from: complete, whole, the newest; everything else is named."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import pytest

from diloco.checkpoint.checkpoints import FORMAT, rank_file
from diloco.checkpoint.mirror import Mirror
from diloco.checkpoint.run_checkpoints import (
    check_run,
    check_same_run,
    choose_checkpoint,
    membership_of,
    open_journal,
)
from diloco.config.classes import fingerprint
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.coordinator.journal import Journal
from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.launch.local import find_resume_step
from diloco.launch.syncer_store import take_to_timeline
from diloco.outer.fragments import Plan
from diloco.protocol.run.members import Member, member_entry
from diloco.protocol.run.membership import Membership
from diloco.state_dir import StateDir, Timeline, read_timeline
from diloco.trainer.models.model import LlamaShape
from diloco.versions import pins
from diloco.versions.pins import pin_directory
from diloco.versions.record import fragment_directory, versions_in
from diloco.versions.store import FragmentStore
from tests.launch.stored_run import ISLANDS, random_parameters, store_run, tiny_run
from tests.run_files import write_run


@dataclass
class Stored:
    """A stopped run whose checkpoints of inner steps 10, 20, 30 are pinned."""

    config: Config
    state: StateDir
    plan: Plan
    told: list[str] = field(default_factory=list)

    def membership(self, complete: Sequence[int]) -> Membership:
        membership = Membership("test", ISLANDS, "{}", lambda a, b: [], 100, num_checkpoints=3)
        membership.plan_json = self.plan.to_json()
        membership.checkpoints = tuple(complete)
        return membership

    def choose(self, complete: Sequence[int], at_step: int | None = None) -> int | None:
        membership = self.membership(complete)
        return choose_checkpoint(self.config, self.state, membership, at_step, self.told.append)

    def tear(self, step: int) -> None:
        directory = fragment_directory(pin_directory(self.state.store, step), 1)
        (path,) = directory.glob("*.record")
        data = path.read_bytes()
        path.unlink()  # a link to the store's record: leave that alone
        path.write_bytes(data[: len(data) // 2])

    def keep(self, island: str, step: int) -> Path:
        """Write an island's part of a checkpoint."""
        path = self.config.checkpoint_dir / island / f"step-{step:012d}"
        (path / "parts-0001").mkdir(parents=True, exist_ok=True)
        files = {}
        for name, data in (("plan.json", self.plan.to_json().encode()), (rank_file(0, 1), b"0")):
            (path / "parts-0001" / name).write_bytes(data)
            files[name] = {"bytes": len(data), "blake3": blake3.blake3(data).hexdigest()}
        manifest = {"format": FORMAT, "parts": "parts-0001", "files": files, "inner_step": step}
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    run_file = tiny_run(tmp_path)
    config = load_config(run_file)
    state = store_run(run_file, random_parameters(LlamaShape.from_config(config.model), 0))
    plan = Plan.from_json(state.plan.read_text())
    for step in (10, 20, 30):
        for fragment, version in zip(plan.fragments, (3, 2), strict=True):
            FragmentStore(state.store, fragment, 4).pin(step, version)
    return Stored(config, state, plan)


# -- choosing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("complete", "torn", "at_step", "chosen"),
    [
        ([10, 20, 30], [], None, 30),
        ([10, 20], [], None, 20),
        ([10, 20, 30], [30], None, 20),
        ([10, 20, 30], [20, 30], None, 10),
        ([10, 20, 30], [20], None, 30),
        ([10, 20, 30], [30], 10, 10),
    ],
    ids=["newest", "complete", "newest-torn", "two-torn", "other-torn", "asked"],
)
def test_the_newest_complete_checkpoint_that_is_whole_is_taken(
    stored: Stored, complete: list[int], torn: list[int], at_step: int | None, chosen: int
) -> None:
    for step in torn:
        stored.tear(step)

    assert stored.choose(complete, at_step) == chosen

    text = "\n".join(stored.told)
    assert f"complete checkpoints of inner steps {', '.join(map(str, complete))}" in text
    assert f"resuming from the checkpoint of inner step {chosen}, now timeline 1" in text
    for step in torn:
        is_skipped = at_step is None and step > chosen
        assert (f"checkpoint of inner step {step} is torn, skipped" in text) is is_skipped


def test_checkpoints_that_not_every_island_keeps_are_named_and_not_taken(stored: Stored) -> None:
    assert stored.choose([20]) == 20
    assert "begun, but not complete on every island: 10, 30" in stored.told[0]


@pytest.mark.parametrize(
    ("complete", "torn", "at_step", "words"),
    [
        ([], [], 10, ["no complete checkpoint", "not complete on every island: 10, 20, 30"]),
        ([10, 20], [], 30, ["--at 30", "--resume --at 10 or", "--resume --at 20"]),
        ([10, 20], [20], 20, ["step 20 is torn", "fragment-0001", "--resume --at 10"]),
        ([20], [20], None, ["step 20 is torn", "diloco repair", "empty coordinator.state_dir"]),
    ],
    ids=["none", "no-such", "asked-is-torn", "all-torn"],
)
def test_what_cannot_be_resumed_is_refused_with_the_next_command(
    stored: Stored, complete: list[int], torn: list[int], at_step: int | None, words: list[str]
) -> None:
    for step in torn:
        stored.tear(step)

    with pytest.raises(ConfigError) as caught:
        stored.choose(complete, at_step)

    assert all(word in str(caught.value) for word in words), caught.value


def test_a_run_without_a_checkpoint_goes_on_or_says_what_begins_with_what_it_published(
    stored: Stored,
) -> None:
    assert stored.choose([]) is None
    assert stored.told == [
        "no checkpoint is complete yet: the run goes on from what it has published"
    ]

    failed = stored.membership([])
    failed.apply([("fatal", json.dumps(["quorum lost", 50]))])
    with pytest.raises(
        ConfigError, match=rf"\(diloco export {stored.state.root}\), .*run.warm_start"
    ):
        choose_checkpoint(stored.config, stored.state, failed, None, print)


def test_parts_of_islands_on_this_machine_are_looked_at_too(stored: Stored) -> None:
    for island in ISLANDS:
        for step in (10, 20):
            stored.keep(island, step)
    path = stored.keep("west", 30)  # east has none of it: killed while it wrote
    assert path.exists()

    assert stored.choose([10, 20, 30]) == 20
    (stored.keep("east", 20) / "parts-0001" / "plan.json").write_text("{}")
    assert stored.choose([10, 20, 30]) == 10

    assert "checkpoint of inner step 20 is torn, skipped: island east" in "\n".join(stored.told)


def test_a_part_that_is_in_its_islands_mirror_is_not_missing(
    stored: Stored, tmp_path: Path
) -> None:
    for island in ISLANDS:
        stored.keep(island, 20)
    path = stored.keep("west", 30)
    Mirror(f"file://{tmp_path}/far", "west").put(path)
    shutil.rmtree(path)
    stored.keep("east", 30)

    assert stored.choose([20, 30]) == 20
    checkpoint = stored.config.checkpoint.model_copy(update={"mirror": f"file://{tmp_path}/far"})
    stored.config = stored.config.model_copy(update={"checkpoint": checkpoint})
    assert stored.choose([20, 30]) == 30

    assert "island west: " in "\n".join(stored.told)
    assert "it will be taken from its mirror" in "\n".join(stored.told)
    (tmp_path / "far" / "west" / path.name / "manifest.json").write_text("{")
    assert stored.choose([20, 30]) == 20, "nor is that one whole"


@pytest.mark.parametrize("at_step", [None, 10])
def test_a_finished_run_is_resumed_only_where_asked(stored: Stored, at_step: int | None) -> None:
    membership = stored.membership([10])
    for island in ISLANDS:
        membership.apply([member_entry(island, Member(0, {"a": 1}, exit_code=0))])
    arguments = (stored.config, stored.state, membership, at_step, stored.told.append)

    if at_step is not None:
        assert choose_checkpoint(*arguments) == 10
        return
    with pytest.raises(ConfigError) as caught:
        choose_checkpoint(*arguments)
    assert "has finished" in str(caught.value)
    assert "diloco export" in str(caught.value)
    assert "--resume --at 10" in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"[run", b"[1, 2]"])
def test_a_damaged_configuration_is_made_again_from_a_file_of_the_same_run(
    tmp_path: Path, damage: bytes
) -> None:
    directory = tmp_path / "run"
    config = load_config(write_run(directory, dict.fromkeys(("east", "west"), "")))
    state = StateDir(directory / "state")
    state.create()
    for store in state.syncers:
        store.syncer_epoch.write_text("1")
    state.fingerprint.write_text(fingerprint(config))
    state.resolved.write_bytes(damage)
    other = load_config(directory / "run.toml", ["model.ffn_dim=128"])
    more = load_config(directory / "run.toml", ["coordinator.num_syncers=2"])

    for wrong in (other, more):
        with pytest.raises(ConfigError, match=r"give this run another coordinator\.state_dir"):
            check_same_run(wrong, state, "")
        assert state.resolved.read_bytes() == damage
    check_same_run(config, state, "")

    assert load_config(state.resolved) == config
    state.resolved.write_bytes(damage)
    state.fingerprint.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="does not say that it is the run of this file"):
        check_same_run(config, state, "")


def test_where_no_run_was_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run in .* diloco coordinator RUN.toml, or"):
        check_run(StateDir(tmp_path / "state"))

    config = load_config(tiny_run(tmp_path))
    with pytest.raises(ConfigError, match=r"Start one with diloco local my.toml, or give"):
        find_resume_step(config, None, print, start="diloco local my.toml")


def test_the_command_that_was_typed_is_the_one_to_type_next(stored: Stored) -> None:
    for complete, at_step, words in [
        ([], 10, "nor has failed, so it goes on where it was: diloco local my.toml --resume"),
        ([10], 20, "to go back: diloco local my.toml --resume --at 10"),
    ]:
        membership = stored.membership(complete)
        with pytest.raises(ConfigError, match=words):
            choose_checkpoint(
                stored.config,
                stored.state,
                membership,
                at_step,
                print,
                start="diloco local my.toml",
            )


@pytest.mark.parametrize("damage", ["no-database", "rotten-page", "rotten-entry"])
def test_a_damaged_journal_is_named_with_the_next_command(stored: Stored, damage: str) -> None:
    path = stored.state.journal
    text = "{" if damage == "rotten-entry" else json.dumps([10] * 20_000)
    with open_journal(path) as journal:
        journal.write([("checkpoint", text)])
    if damage == "no-database":
        path.write_bytes(b"not a database, much longer than a header of SQLite is" * 100)
    elif damage == "rotten-page":
        data = path.read_bytes()
        path.write_bytes(data[:8192] + bytes(b ^ 0xFF for b in data[8192:]))

    for find in (
        lambda: find_resume_step(stored.config, None, print, start="diloco local my.toml"),
        lambda: membership_of(stored.config),
    ):
        with pytest.raises(ConfigError) as caught:
            find()
        assert f"cannot read the journal {path}" in str(caught.value)
        assert "diloco coordinator RUN.toml --set coordinator.state_dir=" in str(caught.value)


def test_on_a_full_disk_a_command_ends_and_says_what_to_do(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(journal: Journal) -> None:
        raise DiskFull(errno.ENOSPC, "database or disk is full")

    stored.state.journal.touch()
    monkeypatch.setattr(Journal, "open", full)

    with pytest.raises(ConfigError, match=r"disk is full\. Make room on its disk"):
        membership_of(stored.config)


def test_verification_that_takes_long_says_how_far_it_is(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.launch.process.progress.INTERVAL_S", 0.0)
    stored.keep("east", 30)
    stored.keep("west", 30)

    stored.choose([30])

    part = "verifying the checkpoint of inner step 30, "
    lines = [line for line in stored.told if line.startswith(part)]
    assert [line.removeprefix(part).split(" [")[0] for line in lines] == [
        "the syncer's part", "the syncer's part",
        "island east", "island east", "island west", "island west",
    ]  # fmt: skip
    assert "[####################] 100%" in lines[-1]


# -- taking the store back ---------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", ["restore", "unlink", "write", "nowhere"])
def test_the_store_says_its_timeline_last(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    timeline = Timeline(1, 20)
    state = stored.state
    state.incarnations.write_text('{"east": 3}')
    for fragment, store in [(f, FragmentStore(state.store, f, 4)) for f in stored.plan.fragments]:
        later = store.load(store.newest().version)  # type: ignore[union-attr]
        path = fragment_directory(state.store, fragment.fragment_id)
        (path / f"v{later.version + 1:012d}.record").write_bytes(b"of what is abandoned")

    def die(*_: object, **__: object) -> None:
        raise Killed

    if at != "nowhere":
        with monkeypatch.context() as patch:
            if at == "restore":
                patch.setattr(pins, "_restore_fragment", die)
            elif at == "unlink":
                patch.setattr("diloco.launch.syncer_store.unlink", die)
            else:
                patch.setattr(Timeline, "write", die)
            with pytest.raises(Killed):
                take_to_timeline(state, stored.plan, timeline)
        assert read_timeline(state.store_timeline) == Timeline()

    take_to_timeline(state, stored.plan, timeline)
    take_to_timeline(state, stored.plan, timeline)

    assert read_timeline(state.store_timeline) == timeline
    assert not state.incarnations.exists()
    assert [versions_in(fragment_directory(state.store, p))[-1] for p in (0, 1)] == [3, 2]


def test_a_store_that_serves_its_timeline_is_left_alone(stored: Stored) -> None:
    Timeline(1, 20).write(stored.state.store_timeline)
    stored.tear(20)

    take_to_timeline(stored.state, stored.plan, Timeline(1, 20))


def test_a_damaged_pin_names_the_older_one_and_the_command(
    stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    stored.tear(20)
    stored.tear(30)

    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as caught:
        take_to_timeline(stored.state, stored.plan, Timeline(1, 30))

    message = str(caught.value)
    assert "inner step 30 cannot be restored" in message
    assert message.endswith("diloco coordinator RUN.toml --resume --at 10")
    assert read_timeline(stored.state.store_timeline) == Timeline()

    stored.tear(10)
    with pytest.raises(ConfigError, match=r"no older one; .* empty coordinator.state_dir"):
        take_to_timeline(stored.state, stored.plan, Timeline(1, 30))


def test_a_store_ahead_of_its_run_is_not_served(stored: Stored) -> None:
    Timeline(2, 20).write(stored.state.store_timeline)

    with pytest.raises(ConfigError, match=r"says timeline 2, .* says 1"):
        take_to_timeline(stored.state, stored.plan, Timeline(1, 20))
