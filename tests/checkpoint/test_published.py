"""Published parameters are read from records alone: the right section, versions, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.checkpoint.published import read_published
from diloco.config.load import load_config, resolved_toml
from diloco.errors import ConfigError
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.state_dir import StateDir
from diloco.trainer.models.model import LlamaShape
from diloco.versions.pins import pin_directory
from diloco.versions.store import FragmentStore
from diloco.versions.stored import StoredVersions
from tests.launch.stored_run import plan_of, random_parameters, record_of, store_run, tiny_run


def parameters_of(run_file: Path, seed: int = 0) -> dict[str, Tensor]:
    return random_parameters(LlamaShape.from_config(load_config(run_file).model), seed)


def everything_in(directory: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return tiny_run(tmp_path)


@pytest.mark.parametrize("ffn_dim", [96, 2048], ids=["one-lane", "several-lanes"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_published_values_are_read_to_the_bit(tmp_path: Path, tied: bool, ffn_dim: int) -> None:
    run_file = tiny_run(tmp_path, tied=tied, ffn_dim=ffn_dim)
    parameters = parameters_of(run_file)

    published = read_published(store_run(run_file, parameters))

    assert all(torch.equal(published.read(name), parameters[name]) for name in parameters)
    assert max(len(f.lanes) for f in published.plan.fragments) > 1 or ffn_dim == 96


def test_versions_and_their_inner_steps_are_told(run_file: Path) -> None:
    state = store_run(run_file, parameters_of(run_file), versions=(3, 0))

    fragments = read_published(state).fragments

    assert [(f.fragment_id, f.version, f.inner_step) for f in fragments] == [(0, 3, 30), (1, 0, 0)]


def test_only_the_flush_of_every_fragment_makes_them_final(run_file: Path) -> None:
    parameters = parameters_of(run_file)

    half = read_published(store_run(run_file, parameters, versions=(3, 2), is_flush=False))
    whole = read_published(store_run(run_file, parameters, versions=(4, 3), is_flush=True))

    assert not half.is_final
    assert whole.is_final


def test_reading_leaves_the_directory_of_a_run_that_is_under_way_as_it_is(run_file: Path) -> None:
    state = store_run(run_file, parameters_of(run_file))
    (state.store / "fragment-0000" / "v000000000004.record.tmp").write_bytes(b"being written")
    before = everything_in(state.root)

    read_published(state)

    assert everything_in(state.root) == before


def test_a_torn_newest_record_is_passed_over_with_a_warning(
    run_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = parameters_of(run_file, 1), parameters_of(run_file, 2)
    state = store_run(run_file, older, versions=(3, 2))
    store_run(run_file, newer, versions=(4, 3))
    torn = state.store / "fragment-0000" / "v000000000004.record"
    torn.write_bytes(torn.read_bytes()[:-7])

    published = read_published(state)

    assert [fragment.version for fragment in published.fragments] == [3, 3]
    assert str(torn) in caplog.text
    of_first = [entry.name for entry in published.plan.fragments[0].entries]
    assert all(torch.equal(published.read(name), older[name]) for name in of_first)


def test_versions_of_a_checkpoint_are_read_from_its_pins(run_file: Path) -> None:
    pinned = parameters_of(run_file, 1)
    state = StateDir(Path(load_config(run_file).coordinator.state_dir))
    store_run(run_file, pinned, versions=(2, 1), store=pin_directory(state.store, 20))
    store_run(run_file, parameters_of(run_file, 2), versions=(3, 2))

    published = read_published(state, at_step=20)

    assert [fragment.version for fragment in published.fragments] == [2, 1]
    assert all(torch.equal(published.read(name), pinned[name]) for name in pinned)


def test_progress_ends_at_everything(run_file: Path) -> None:
    state = store_run(run_file, parameters_of(run_file))
    told: list[tuple[int, int]] = []

    read_published(state, on_progress=lambda done, total: told.append((done, total)))

    assert len(told) == 2
    assert told[0][0] < told[1][0] == told[1][1]


def test_a_version_forgotten_while_it_was_sought_is_no_damage(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = parameters_of(run_file)
    state = store_run(run_file, parameters, versions=(3, 2))
    fragment = plan_of(load_config(run_file), parameters).fragments[0]
    load = StoredVersions.load

    def load_late(store: StoredVersions, version: int, *, with_contributions: bool) -> object:
        """The syncer publishes and forgets between the listing and the reading."""
        monkeypatch.setattr(StoredVersions, "load", load)
        served = FragmentStore(store.store_dir, fragment, 1)
        served.commit(record_of(fragment, 8, parameters))
        return store.load(version, with_contributions=with_contributions)

    monkeypatch.setattr(StoredVersions, "load", load_late)

    assert read_published(state).fragments[0].version == 8


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run .*resolved.toml"):
        read_published(StateDir(tmp_path))


@pytest.mark.parametrize("has_plan", [False, True], ids=["no-plan", "no-version-0"])
def test_a_run_that_is_not_founded_is_refused(run_file: Path, has_plan: bool) -> None:
    state = store_run(run_file, parameters_of(run_file))
    shutil.rmtree(state.store / "fragment-0001")
    if not has_plan:
        state.plan.unlink()

    with pytest.raises(ConfigError, match="version 0 is founded once all islands have joined"):
        read_published(state)


def test_a_fragment_without_a_valid_record_is_refused_by_file(run_file: Path) -> None:
    state = store_run(run_file, parameters_of(run_file))
    store_run(run_file, parameters_of(run_file), store=pin_directory(state.store, 20))
    record = state.store / "fragment-0001" / "v000000000002.record"
    record.write_bytes(b"rotten" + record.read_bytes()[6:])

    with pytest.raises(ConfigError) as refusal:
        read_published(state)

    assert str(record) in str(refusal.value)
    assert str(refusal.value).endswith("choose --at 20")


def test_a_damaged_pin_is_refused_by_file_with_the_other_checkpoints(run_file: Path) -> None:
    state = store_run(run_file, parameters_of(run_file))
    for step in (10, 20):
        store_run(run_file, parameters_of(run_file), store=pin_directory(state.store, step))
    record = pin_directory(state.store, 20) / "fragment-0000" / "v000000000003.record"
    record.write_bytes(record.read_bytes()[:100])

    with pytest.raises(ConfigError) as refusal:
        read_published(state, at_step=20)

    assert str(record) in str(refusal.value)
    assert str(refusal.value).endswith("choose --at 10")


def test_a_checkpoint_that_lacks_a_fragment_is_not_complete(run_file: Path) -> None:
    state = store_run(run_file, parameters_of(run_file))
    store_run(run_file, parameters_of(run_file), store=pin_directory(state.store, 20))
    shutil.rmtree(pin_directory(state.store, 20) / "fragment-0001")

    with pytest.raises(ConfigError, match="no version of fragment 1: the checkpoint is not compl"):
        read_published(state, at_step=20)


@pytest.mark.parametrize(
    ("steps", "ending"),
    [((), "leave out --at for the newest published versions"), ((5, 9), "choose --at 5 or 9")],
    ids=["none", "others"],
)
def test_an_unknown_checkpoint_is_answered_with_those_there_are(
    run_file: Path, steps: tuple[int, ...], ending: str
) -> None:
    state = store_run(run_file, parameters_of(run_file))
    for step in steps:
        (pin_directory(state.store, step)).mkdir(parents=True)

    with pytest.raises(ConfigError) as refusal:
        read_published(state, at_step=7)

    assert "no checkpoint of inner step 7" in str(refusal.value)
    assert str(refusal.value).endswith(ending)


def test_a_run_of_another_model_is_refused_with_the_first_difference(run_file: Path) -> None:
    state = store_run(run_file, parameters_of(run_file))
    specs = [TensorSpec("blocks.0.weight", (4, 4)), TensorSpec("embed.weight", (256, 32))]
    state.plan.write_text(make_plan(specs, num_fragments=2).to_json())

    with pytest.raises(ConfigError) as refusal:
        read_published(state)

    assert "another model" in str(refusal.value)
    assert r"blocks.0.weight is (4, 4), [model] makes it unknown" in str(refusal.value)


def test_a_run_of_other_sizes_than_its_configuration_is_refused(run_file: Path) -> None:
    state = store_run(run_file, parameters_of(run_file))
    other = load_config(run_file, ["model.ffn_dim=64"])
    state.resolved.write_text(resolved_toml(other))

    with pytest.raises(ConfigError, match=r"down.weight is \(32, 96\), .* makes it \(32, 64\)"):
        read_published(state)
