"""Checks the arguments of `DiLoCo`, and names what was passed by mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.config.classes import identity_difference, identity_json
from diloco.config.outer import OuterConfig
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.island.connection import Connection


def check_kinds(outer: Any, transport: Any) -> None:
    """Refuse mistaken arguments; `Any` because a caller may pass anything.

    Raises:
        ConfigError: Naming what was passed.
    """
    if not isinstance(transport, Connection):
        raise ConfigError(
            f"diloco.DiLoCo(transport={transport!r}): give the connection itself, `with "
            f"diloco.connect(config) as connection:`"
        )
    if not isinstance(outer, OuterConfig):
        raise ConfigError(
            f"diloco.DiLoCo's second argument is a {type(outer).__name__}: give config.outer of "
            f"the configuration that went to diloco.connect"
        )


def check_same(given: OuterConfig, connected: OuterConfig) -> None:
    """Refuse another configuration than the connection's.

    Raises:
        ConfigError: Naming the differences.
    """
    differing = identity_difference(identity_json(given), identity_json(connected))
    if differing:
        raise ConfigError(
            "DiLoCo was given another [outer] (here) than diloco.connect (there): "
            + "; ".join(differing)
            + ". Change the run file, and pass config.outer of the same configuration to both"
        )


def check_tokens(num_tokens: Any) -> None:
    """Refuse what cannot be a weight; `Any` because a caller may pass a tensor or None.

    Raises:
        ValueError: If it is not a positive integer.
    """
    if isinstance(num_tokens, int) and not isinstance(num_tokens, bool) and num_tokens > 0:
        return
    raise ValueError(
        f"outer.step(num_tokens={num_tokens!r}): with outer.weighting = 'tokens' an island's "
        f"contribution weighs what it was trained on; pass the tokens of the whole island in this "
        f"inner step, an int of at least 1 (of a tensor: int(count))"
    )


def check_logged(values: Mapping[str, Any]) -> dict[str, float]:
    """Give what is logged as numbers, without what is None; `Any` because a caller may pass more.

    Raises:
        ValueError: If one is no number.
    """
    for name, value in values.items():
        if not (value is None or isinstance(value, (int, float))):
            raise ValueError(
                f"outer.log({name}=...) was given a {type(value).__name__}: pass a float (of a "
                f"tensor: {name}.item()); the loss is the mean of the whole island, the same on "
                f"all its ranks"
            )
    return {name: float(value) for name, value in values.items() if value is not None}


def early_text(config: Config, inner_step: int, inner_steps: int) -> str:
    """Say what it does to leave before the end of the run."""
    island = config.island_id
    end, shorter = f"of {inner_steps}", f"run.inner_steps = {inner_step}"
    again = f"to take it back: diloco kick HOST:PORT {island} --undo, then start it again"
    if config.outer.is_on_arrival:
        end = "before the run's tokens are merged"
        shorter = "run.inner_steps, by which the tokens are counted, to less"
        again = "to take it back start it again"
    return (
        f"outer.finish() after inner step {inner_step} {end}: island {island} leaves the run. What "
        f"it has sent is merged, its steps since then are in no version, and the other islands go "
        f"on without it. For a shorter run set {shorter} in every run file; {again}"
    )


def over_text(inner_step: int, inner_steps: int, *, on_arrival: bool) -> str:
    """Say that no inner step follows the last one."""
    if on_arrival:
        return (
            f"inner step {inner_step + 1}: training ends here (outer.is_over): loop `while not "
            f"outer.is_over`, then call outer.finish()"
        )
    return (
        f"inner step {inner_step + 1}: the run has run.inner_steps = {inner_steps} (the "
        f"coordinator's); loop over range(outer.start_step, outer.inner_steps), then call "
        f"outer.finish()"
    )
