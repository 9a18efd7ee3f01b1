"""What is predicted of a real run: by the simulator, and by `diloco plan`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from diloco.bench.network.emulating import ISLANDS
from diloco.simulations.planner.assumptions import Assumptions
from diloco.simulations.planner.prediction import simulate_whole
from diloco.simulations.runs.costs import HostCosts
from diloco.simulations.runs.run_model import fragment_sizes, run_plan, simulate_run
from diloco.simulations.validation.validate_run import (
    Message,
    ValidationPoint,
    ValidationSetting,
    run_config,
)
from diloco.transport.shaping.link import Link, LinkProfile
from diloco.transport.units import parse_bandwidth

#: Share of a packet of 1,500 bytes that is TCP's payload: what an emulated link carries of ours.
_PAYLOAD_SHARE = 1448 / 1500
_UNLIMITED_BPS = 1e15


def predict(
    setting: ValidationSetting,
    point: ValidationPoint,
    costs: HostCosts,
    step_s: Mapping[str, float],
) -> Message:
    """Simulate the run of a point.

    Returns:
        `blocked_s` and `round_s` a round, mean over islands; `utilisation`; and what the missing
        part of it may go with: `transfer_s`, `round_trips_s`, `megabytes`, `host_s`, `fragments`.
    """
    config = run_config(setting, point, Path("unused"))
    link = _link(point, is_emulated=setting.is_emulated)
    run, alone = (
        simulate_run(
            config,
            step_s=step_s,
            links=LinkProfile(name, each, each, ""),
            costs=costs,
        )
        for name, each in (("validated", link), ("free", Link(_UNLIMITED_BPS, 0.0)))
    )
    islands = run.steady.values()
    plan = run_plan(config)
    sizes = fragment_sizes(config, plan)
    num_bytes = sum(size.bytes_up + size.bytes_down for size in sizes)
    return {
        "blocked_s": statistics.mean(each.blocked_s_per_round for each in islands),
        "round_s": statistics.mean(each.seconds_per_round for each in islands),
        "utilisation": run.utilisation,
        "transfer_s": 8 * num_bytes / link.bandwidth_bps,
        "round_trips_s": point.num_fragments * point.rtt_ms / 1000,
        "megabytes": num_bytes / 1e6,
        "host_s": statistics.mean(each.blocked_s_per_round for each in alone.steady.values()),
        "fragments": float(point.num_fragments),
    }


def planned_s(
    setting: ValidationSetting, point: ValidationPoint, step_s: Mapping[str, float]
) -> float:
    """Give the seconds in which `diloco plan` has the run of a point end.

    Inputs are the link and the inner steps; what hosts take is its own assumption, not calibrated.
    """
    config = run_config(setting, point, Path("unused"))
    link = _link(point, is_emulated=False)
    links = dict.fromkeys(ISLANDS, LinkProfile("told", link, link, ""))
    return simulate_whole(config, run_plan(config), Assumptions(step_s=step_s, links=links))[1]


def _link(point: ValidationPoint, *, is_emulated: bool) -> Link:
    if not point.bandwidth:
        return Link(_UNLIMITED_BPS, 0.0)
    share = _PAYLOAD_SHARE if is_emulated else 1.0
    return Link(share * parse_bandwidth(point.bandwidth), point.rtt_ms / 2000)
