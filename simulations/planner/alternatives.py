"""The same tokens by all-reduce of gradients in every inner step, on the same links.

Predicted by `diloco.simulations.scenarios.wallclock`: chunks of `diloco baseline` become ready one
after the other while the backward goes on and are reduced meanwhile; the step waits for what is
left. All islands have the thinnest link of the run, with the longest round trip, and the most ranks
of any: a ring is as fast as its slowest member.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import ValidationError

from diloco.baseline.local import FLAT, HIERARCHICAL, BaselineOptions
from diloco.config.fields import Bandwidth, Duration, Size
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.simulations.planner.assumptions import Assumptions
from diloco.simulations.scenarios.scenario import Method, Scenario
from diloco.simulations.scenarios.wallclock import utilisation

_FLOAT_BYTES = 4
#: What a scenario may have; more would change nothing.
_MOST_BUCKETS = 10_000
_METHODS: dict[str, Method] = {FLAT: "data-parallel", HIERARCHICAL: "hierarchical"}


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to train on the same tokens.

    Attributes:
        name: What `diloco baseline --name` calls it, and the codec between islands.
        wall_s: Of as many inner steps.
        utilisation: Share of it in inner steps.
        bytes_up: Payload that an island sends in the whole run.
    """

    name: str
    wall_s: float
    utilisation: float
    bytes_up: float


def alternatives(config: Config, num_parameters: int, assumed: Assumptions) -> list[Alternative]:
    """Predict flat and hierarchical all-reduce in float32, and hierarchical in bfloat16.

    Returns:
        Nothing for a run of one island, which reduces with nobody.

    Raises:
        ConfigError: If the model or a batch is larger than anything that is predicted.
    """
    if len(config.islands) == 1:
        return []
    try:
        return [
            _alternative(config, num_parameters, assumed, name, bits, codec)
            for name, bits, codec in (
                (FLAT, 32.0, "float32"),
                (HIERARCHICAL, 32.0, "float32"),
                (HIERARCHICAL, 16.0, "bfloat16"),
            )
        ]
    except ValidationError as error:
        raise ConfigError(
            f"a model of {num_parameters:,} parameters whose inner step takes "
            f"{max(assumed.step_s.values()):.3g} s is beyond what can be predicted: see to [model] "
            f"and tokens_per_inner_step"
        ) from error


def _alternative(
    config: Config,
    num_parameters: int,
    assumed: Assumptions,
    name: str,
    bits: float,
    codec: str,
) -> Alternative:
    assert assumed.links is not None, "nothing is predicted without links"
    profiles, options = assumed.links.values(), BaselineOptions(name)
    rate_bps = min(min(p.up.bandwidth_bps, p.down.bandwidth_bps) for p in profiles)
    rtt_s = max(p.up.delay_s + p.down.delay_s for p in profiles)
    chunks = math.ceil(_FLOAT_BYTES * num_parameters / options.chunk_bytes)
    step_s, tcp = max(assumed.step_s.values()), assumed.tcp
    window = f"{tcp.window_bytes:.0f}B" if tcp and tcp.window_bytes < math.inf else ""
    inside = f"{assumed.inside_bps!r}bit/s" if assumed.inside_bps < math.inf else ""
    scenario = Scenario(
        method=_METHODS[name],
        params=float(num_parameters),
        step_time=Duration(f"{step_s!r}s"),
        islands=len(config.islands),
        bits_up=bits,
        bandwidth=Bandwidth(f"{rate_bps!r}bit/s"),
        rtt=Duration(f"{rtt_s!r}s"),
        tcp_loss=tcp.loss if tcp else 0.0,
        tcp_window=Size(window),
        streams=options.streams if tcp else 1,
        ranks=max(island.ranks for island in config.islands.values()),
        inside_bandwidth=Bandwidth(inside),
        buckets=min(chunks, _MOST_BUCKETS),
    )
    members = scenario.islands * (scenario.ranks if name == FLAT else 1)
    share = utilisation(scenario)
    return Alternative(
        name=f"{name}, {codec}",
        wall_s=config.run.inner_steps * step_s / share,
        utilisation=share,
        bytes_up=config.run.inner_steps * 2 * (members - 1) / members * bits / 8 * num_parameters,
    )
