"""Whole runs over a bad line: what is damaged is asked for again, and told; a thin one suffices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import diloco
from diloco.io_thread import IoThread
from diloco.protocol.run.alarms import AlarmKind
from diloco.telemetry.events import AlarmRaised, DamagedOnTheWay, Event
from diloco.transport.addresses import split_address
from diloco.transport.shaping.line import ShapedLine
from tests.served_run import ServedRun

INNER_STEPS = 4
WIDTH = 160


def train(served: ServedRun, num_layers: int, island: str, events: list[Event]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(sum(island.encode()))
    config = served.island(island)
    with diloco.connect(config, served.address) as connection:
        outer = diloco.DiLoCo(model, config.outer, transport=connection, on_event=events.append)
        for _ in range(INNER_STEPS):
            inputs = torch.randn(16, WIDTH, generator=generator)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step(num_tokens=100)
        outer.finish()
    return model


@contextmanager
def over_a_line(served: ServedRun, **options: float) -> Iterator[ShapedLine]:
    """Have islands reach the run through a line, which is what they are told, too."""
    thread = IoThread()
    thread.start()
    line = ShapedLine(("127.0.0.1", split_address(served.address)[1]), **options)
    thread.run(line.__aenter__())
    served.address = f"127.0.0.1:{line.port}"
    try:
        yield line
    finally:
        thread.run(line.__aexit__())
        thread.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_flush_of_24_fragments_ends_over_a_thin_line(tmp_path: Path) -> None:
    settings = {"inner_steps": INNER_STEPS, "inner_steps_per_round": 24, "num_fragments": 24}
    with (
        ServedRun(tmp_path, {"east": ""}, codec="float32", **settings) as served,
        over_a_line(served, rate_bps=1e6) as line,
    ):
        model = train(served, 24, "east", [])
        num_bytes = 4 * sum(each.numel() for each in model.parameters())
        assert [leave.exit_code for leave in served.leaves] == [0]
        # Version 0 and the flush, a few fragments in their rounds, and headers.
        assert 2 * num_bytes < line.up.num_bytes < 1.2 * 2.2 * num_bytes


def test_two_islands_reach_the_same_parameters_over_a_line_that_flips_bits(tmp_path: Path) -> None:
    models: dict[str, nn.Module] = {}
    events: dict[str, list[Event]] = {"east": [], "west": []}
    settings = {"inner_steps": INNER_STEPS, "inner_steps_per_round": 2, "rpc_timeout": "1s"}
    with (
        ServedRun(tmp_path, dict.fromkeys(events, ""), **settings) as served,
        over_a_line(served, damage_every_bytes=120_000),
    ):

        def run(island: str) -> None:
            models[island] = train(served, 2, island, events[island])

        threads = [threading.Thread(target=run, args=[island]) for island in events]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    east, west = (dict(models[island].named_parameters()) for island in events)
    assert all(torch.equal(east[name], west[name]) for name in east)
    assert [leave.exit_code for leave in served.leaves] == [0, 0]
    told = [event for each in events.values() for event in each]
    assert any(event.is_too_much for event in told if isinstance(event, DamagedOnTheWay))
    alarms = {event.alarm for event in told if isinstance(event, AlarmRaised)}
    assert alarms == {AlarmKind.DAMAGED_ON_THE_WAY}
