"""Published parameters of a run, read from its state directory without disturbing it.

Every record is checked whole before a value of it is used; nothing is written or locked, so the run
may be under way. All values are held in memory, 4 bytes a parameter, while the object lives, and
while it is made one fragment's record as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diloco.checkpoint.stores import read_plan, state_by_fragment
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.outer.fragments import Plan
from diloco.state_dir import StateDir
from diloco.trainer.models.families import Shape, parameter_shapes, shape_of
from diloco.versions.pins import pin_directory, pinned_steps
from diloco.versions.record import RecordInvalid
from diloco.versions.stored import StoredVersions
from diloco.versions.version import VersionRecord


@dataclass(frozen=True, slots=True)
class PublishedFragment:
    """The version of a fragment that was read.

    `inner_step` is the newest at which a contribution to it was sent, 0 for version 0; `digest` is
    that of the version, in hex.
    """

    fragment_id: int
    version: int
    timeline: int
    inner_step: int
    is_flush: bool
    digest: str


@dataclass(frozen=True, slots=True)
class PublishedVectors:
    """Parameters of a whole run, and where they stand.

    Attributes:
        config: The run's own configuration.
        plan: Its plan.
        fragments: What was read of each fragment, in plan order.
        vectors: Published vector of each fragment, shape [padded_numel], float32, CPU.
    """

    config: Config
    plan: Plan
    fragments: tuple[PublishedFragment, ...]
    vectors: tuple[Tensor, ...]

    @property
    def is_final(self) -> bool:
        """Whether every fragment is the flush: the run has ended, nothing newer will come."""
        return all(fragment.is_flush for fragment in self.fragments)

    @property
    def shape(self) -> Shape:
        """Sizes of the model."""
        return shape_of(self.config.model)

    def read(self, name: str) -> Tensor:
        """Return a parameter by its canonical name: unsharded, float32, freshly allocated."""
        shape = next(spec.shape for spec in self.plan.tensors if spec.name == name)
        values = torch.empty(shape)
        flat = values.view(-1)
        for fragment, vector in zip(self.plan.fragments, self.vectors, strict=True):
            for entry in fragment.entries:
                if entry.name == name:
                    numel = entry.end - entry.start
                    flat[entry.start : entry.end] = vector[entry.offset : entry.offset + numel]
        return values


def read_published(
    state: StateDir,
    *,
    at_step: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PublishedVectors:
    """Read the newest published version of every fragment, or those that a checkpoint pins.

    While a run is under way its fragments stand at versions of several inner steps, and a newest
    record that is damaged is passed over, with a warning, as a syncer would.

    Args:
        state: The run's state directory.
        at_step: Inner step of a run checkpoint; None takes the newest versions.
        on_progress: Told (values read, values to read) after each fragment.

    Raises:
        ConfigError: If there is no run, no version 0 yet, no such checkpoint, no valid record, or
            the run trains another model than the built-in decoder.
    """
    config, plan = _read_run(state)
    stored = state_by_fragment(state, plan)
    directories = {p: each.store for p, each in stored.items()}
    if at_step is not None:
        directories = _pins(state, stored, at_step)
    num_values = sum(fragment.padded_numel for fragment in plan.fragments)
    fragments, vectors = [], []
    for fragment in plan.fragments:
        try:
            directory = directories[fragment.fragment_id]
            record = StoredVersions(directory, fragment).newest()
        except RecordInvalid as error:
            raise ConfigError(_damaged_text(state, fragment.fragment_id, at_step, error)) from error
        if record is None and at_step is None:
            raise ConfigError(_not_founded_text(state))
        if record is None:
            raise ConfigError(
                f"{directory} holds no version of fragment {fragment.fragment_id}: the checkpoint "
                f"is not complete; {_other_steps_text(state, at_step)}"
            )
        fragments.append(_describe(record))
        vectors.append(torch.cat([lane.published for lane in record.lanes]))
        on_progress(sum(vector.numel() for vector in vectors), num_values)
    return PublishedVectors(config, plan, tuple(fragments), tuple(vectors))


def _read_run(state: StateDir) -> tuple[Config, Plan]:
    if not state.resolved.is_file():
        raise ConfigError(
            f"{state.root} holds no run (there is no {state.resolved.name} in it): give the run "
            "file, or the coordinator.state_dir of a run that was started"
        )
    config = load_config(state.resolved)
    plan = read_plan(state)
    if plan is None:
        raise ConfigError(_not_founded_text(state))
    expected = parameter_shapes(shape_of(config.model))
    found = {spec.name: spec.shape for spec in plan.tensors}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ConfigError(
                f"the run in {state.root} trains another model than the built-in decoder: "
                f"{name} is {found.get(name, 'missing')}, [model] makes it "
                f"{expected.get(name, 'unknown')}. Save it from its own training loop, inside "
                "`with outer.global_parameters():`"
            )
    return config, plan


def _describe(record: VersionRecord) -> PublishedFragment:
    return PublishedFragment(
        fragment_id=record.fragment_id,
        version=record.version,
        timeline=record.timeline,
        inner_step=max((c.sent_at_inner_step for c in record.contributors), default=0),
        is_flush=record.is_flush,
        digest=record.digest.hex(),
    )


def _pins(state: StateDir, stored: Mapping[int, StateDir], step: int) -> dict[int, Path]:
    """Directories of the versions that a checkpoint pins, by fragment."""
    directories = {p: pin_directory(each.store, step) for p, each in stored.items()}
    if not all(directory.is_dir() for directory in directories.values()):
        raise ConfigError(
            f"the run in {state.root} has no checkpoint of inner step {step}; "
            f"{_other_steps_text(state, step)}"
        )
    return directories


def _other_steps_text(state: StateDir, step: int | None) -> str:
    pinned = [set(pinned_steps(each.store)) for each in state.syncers]
    others = " or ".join(map(str, sorted(set.intersection(*pinned) - {step})))
    return f"choose --at {others}" if others else "leave out --at for the newest published versions"


def _not_founded_text(state: StateDir) -> str:
    return (
        f"the run in {state.root} has no published parameters yet: version 0 is founded once all "
        "islands have joined; `diloco status HOST:PORT` shows who is missing"
    )


def _damaged_text(
    state: StateDir, fragment_id: int, at_step: int | None, error: RecordInvalid
) -> str:
    return (
        f"fragment {fragment_id} of the run in {state.root} has no valid record: {error}; "
        f"{_other_steps_text(state, at_step)}"
    )
