"""Options of `diloco plan` that would change nothing: refused by name, before any work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.simulations.planner.assumptions import (
    CPU,
    PlanOptions,
    device_of,
    find_links,
    has_delay,
    parsed,
    told_steps,
)
from diloco.transport.addresses import split_address

NO_LINK = (
    "transport.link names no profile, so the figures of the real link are not known: give --link "
    "PROFILE, or --bandwidth and --rtt, or --measure with --probe"
)


def check_use(
    config: Config,
    told: PlanOptions,
    *,
    is_measured: bool = False,
    coordinator: str = "",
    probe: str = "",
    needing: Sequence[str] = (),
) -> None:
    """Refuse options that cannot be read, or that would change nothing.

    Args:
        config: The run.
        told: What is said.
        is_measured: Whether inner steps that are not told are timed.
        coordinator: Where a round trip is timed to; empty: it is not.
        probe: Where a rate, and a round trip, are timed to; empty: they are not.
        needing: Other options that have no effect where no link is known.

    Raises:
        ConfigError: Naming the first such option, and why.
    """
    for option, address in (("--coordinator", coordinator), ("--probe", probe)):
        if address:
            parsed(option, address, split_address)
    is_path = bool(coordinator or probe)
    unused = chain(
        _unused_of_steps(config, told, is_measured=is_measured, is_path=is_path),
        _unused_of_links(config, told, coordinator, probe, needing),
    )
    for option, why in unused:
        raise ConfigError(f"{option} would change nothing: {why}, or leave it out")


def _unused_of_steps(
    config: Config, told: PlanOptions, *, is_measured: bool, is_path: bool
) -> Iterator[tuple[str, str]]:
    without = config.islands.keys() - told_steps(config, told)
    estimated = set() if is_measured else {device_of(config, name, told) for name in without}
    if is_measured and not (without or is_path):
        yield "--measure", "every inner step is told; tell fewer by --step-time"
    if told.device and not estimated:
        yield f"--device {told.device}", "no inner step is estimated; tell or measure fewer"
    if told.reached is not None and told.share and estimated <= {CPU}:
        why = "no inner step is estimated from the peak of an accelerator; give --device"
        yield f"--mfu {told.share:g}", why


def _unused_of_links(
    config: Config, told: PlanOptions, coordinator: str, probe: str, needing: Sequence[str]
) -> Iterator[tuple[str, str]]:
    links, tcp = find_links(config, told), told.tcp
    if links is None and not probe:
        said = {
            "--rtt": bool(told.round_trips) and not told.bandwidths,
            "--syncer-link": bool(told.syncer_link),
            "--tcp-loss": bool(told.tcp_loss),
            "--tcp-window": bool(told.tcp_window),
            "--inside-bandwidth": bool(told.inside_bandwidth),
        }
        for option in [*(option for option, is_said in said.items() if is_said), *needing]:
            yield option, f"no time is predicted, as {NO_LINK}"
    if told.round_trips and (coordinator or probe):
        why = "what is measured takes its place; give no --coordinator and no --probe"
        yield f"--rtt {told.round_trips[0]}", why
    if told.bandwidths and probe:
        why = "what is measured takes its place; give no --probe"
        yield f"--bandwidth {told.bandwidths[0]}", why
    is_timed = coordinator or probe
    if tcp and links and not is_timed and not any(map(has_delay, links.values())):
        option = "--tcp-loss" if tcp.loss else "--tcp-window"
        yield option, "without a round trip it bounds nothing; give --rtt"
    if told.inside_bps < math.inf and max(each.ranks for each in config.islands.values()) == 1:
        why = "no island has several ranks; set islands.NAME.ranks"
        yield f"--inside-bandwidth {told.inside_bandwidth}", why
