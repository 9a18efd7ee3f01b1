"""Which run checkpoint a run is resumed from, and what is said about it. Imports no torch.

A run checkpoint is complete when every island has told the coordinator that it keeps its part, and
can be resumed when the syncer's part, its pin, is whole too. Of islands that keep their checkpoints
on this machine the parts are looked at as well; the others' own commands do that.

Source: protocol.md section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from diloco.config.classes import identity_difference, identity_json
from diloco.config.schema import Config
from diloco.coordinator.journal import Journal
from diloco.coordinator.membership import Membership
from diloco.errors import ConfigError
from diloco.launch.checkpoints import Checkpoint
from diloco.launch.state_dir import StateDir
from diloco.outer.fragments import Plan
from diloco.rounds.pins import pinned_steps, verify_pin
from diloco.rounds.record import RecordInvalid

RESUME = "diloco coordinator RUN.toml --resume"


def read_membership(config: Config, journal: Journal) -> Membership:
    """Make a run's membership with all that its open journal remembers."""
    membership = Membership(
        run=config.run.name,
        islands=tuple(sorted(config.islands)),
        identity_json=identity_json(config),
        identity_difference=identity_difference,
        inner_steps=config.run.inner_steps,
        num_checkpoints=config.checkpoint.keep,
    )
    membership.apply(journal.entries().items())
    return membership


def insist_on_run(state: StateDir) -> None:
    """Refuse to resume where no run was ever coordinated.

    Raises:
        ConfigError: If there is no journal.
    """
    if not state.journal.exists():
        raise ConfigError(
            f"--resume: there is no run in coordinator.state_dir = {state.root}. Start one with "
            f"diloco coordinator RUN.toml, or give the directory that holds yours"
        )


def choose_checkpoint(
    config: Config,
    state: StateDir,
    membership: Membership,
    at_step: int | None,
    tell: Callable[[str], None],
    *,
    command: str = RESUME,
) -> int:
    """Choose what to resume: the newest complete checkpoint that is whole, or the one asked for.

    Args:
        config: The run, with the islands' `checkpoint.dir` on this machine.
        state: The run's state directory.
        membership: With the journal's entries applied.
        at_step: Inner step of the checkpoint asked for; None takes the newest.
        tell: Hears what was found, skipped and taken.
        command: What to type to resume; ``--at STEP`` is put behind it.

    Returns:
        The inner step of the checkpoint.

    Raises:
        ConfigError: If the run has finished and no step was asked for, if there is no such
            checkpoint, or none is whole.
    """
    complete = membership.checkpoints
    _insist_on_complete(state, membership, at_step, command)
    tell(_found_text(state, membership))
    plan = Plan.from_json(membership.plan_json)
    torn: dict[int, str] = {}
    for step in complete[::-1] if at_step is None else [at_step]:
        problem = next(_problems(config, state, plan, step), "")
        if not problem:
            tell(
                f"resuming from the checkpoint of inner step {step}, now timeline "
                f"{membership.timeline + 1}; what was published after it is abandoned"
            )
            return step
        torn[step] = problem
        if at_step is None:
            tell(f"warning: the checkpoint of inner step {step} is torn, skipped: {problem}")
    others = [step for step in complete if step not in torn]
    raise ConfigError(
        f"cannot resume the run {membership.run!r}: "
        + "; ".join(f"the checkpoint of inner step {s} is torn: {why}" for s, why in torn.items())
        + (_go_back(others, command) or ". Start the run again in an empty coordinator.state_dir")
    )


def commands_of_islands(config: Config) -> str:
    """Name the commands that start all islands."""
    return "; ".join(f"diloco island RUN.toml --island {name}" for name in sorted(config.islands))


def _insist_on_complete(
    state: StateDir, membership: Membership, at_step: int | None, command: str
) -> None:
    complete, run = membership.checkpoints, f"the run {membership.run!r} in {state.root}"
    if membership.is_finished and at_step is None:
        raise ConfigError(
            f"{run} has finished, there is nothing to resume: take its parameters with diloco "
            f"export {state.root}{_go_back(complete, command)}"
        )
    if not complete:
        raise ConfigError(
            f"{run} has no complete checkpoint to resume{_partial_text(state, membership)}. If it "
            f"was neither stopped nor has failed, diloco coordinator RUN.toml goes on where it "
            f"was; otherwise start it again in an empty coordinator.state_dir "
            f"(checkpoint.every_inner_steps makes checkpoints)"
        )
    if at_step is not None and at_step not in complete:
        raise ConfigError(
            f"--at {at_step}: {run} has no complete checkpoint of that inner step"
            f"{_go_back(complete, command)}"
        )


def _problems(config: Config, state: StateDir, plan: Plan, step: int) -> Iterator[str]:
    """Say what is wrong with the parts of a checkpoint that are on this machine."""
    try:
        verify_pin(state.store, plan, step)
    except RecordInvalid as error:
        yield str(error)
    for island in sorted(config.islands):
        if (config.checkpoint_dir / island).is_dir():
            try:
                Checkpoint.open(config.checkpoint_dir, island, step)
            except ConfigError as error:
                yield str(error)


def _found_text(state: StateDir, membership: Membership) -> str:
    return (
        f"run {membership.run!r} in {state.root}, timeline {membership.timeline}: complete "
        f"checkpoints of inner steps {', '.join(map(str, membership.checkpoints))}"
        f"{_partial_text(state, membership)}"
    )


def _partial_text(state: StateDir, membership: Membership) -> str:
    steps = [step for step in pinned_steps(state.store) if step not in membership.checkpoints]
    listed = ", ".join(map(str, steps))
    return f"; begun, but not complete on every island: {listed}" if steps else ""


def _go_back(steps: Sequence[int], command: str) -> str:
    commands = " or ".join(f"{command} --at {step}" for step in steps)
    return f"; to go back: {commands}" if commands else ""
