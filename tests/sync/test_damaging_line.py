"""Two islands over a line that flips bits: what is damaged is asked for again, and told."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

import diloco
from diloco.alarms import AlarmKind
from diloco.sync.io_thread import IoThread
from diloco.telemetry.events import AlarmRaised, DamagedOnTheWay, Event
from tests.served_run import ServedRun
from transport.addresses import split_address
from transport.line import Line

INNER_STEPS = 4


def train(served: ServedRun, address: str, island: str, events: list[Event]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 160))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(sum(island.encode()))
    config = served.island(island)
    with diloco.connect(config, address) as connection:
        outer = diloco.DiLoCo(model, config.outer, transport=connection, on_event=events.append)
        for _ in range(INNER_STEPS):
            inputs = torch.randn(16, 160, generator=generator)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step(num_tokens=100)
        outer.finish()
    return model


def test_two_islands_reach_the_same_parameters_over_a_line_that_flips_bits(tmp_path: Path) -> None:
    models: dict[str, nn.Module] = {}
    events: dict[str, list[Event]] = {"east": [], "west": []}
    settings = {"inner_steps": INNER_STEPS, "inner_steps_per_round": 2, "rpc_timeout": "1s"}
    thread = IoThread()
    thread.start()
    with ServedRun(tmp_path, dict.fromkeys(events, ""), **settings) as served:
        line = Line(("127.0.0.1", split_address(served.address)[1]), damage_every_bytes=120_000)
        thread.run(line.__aenter__())
        served.address = f"127.0.0.1:{line.port}"  # what islands are told, too

        def run(island: str) -> None:
            models[island] = train(served, served.address, island, events[island])

        threads = [threading.Thread(target=run, args=[island]) for island in events]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        thread.run(line.__aexit__())
    thread.stop()

    east, west = (dict(models[island].named_parameters()) for island in events)
    assert all(torch.equal(east[name], west[name]) for name in east)
    assert [leave.exit_code for leave in served.leaves] == [0, 0]
    told = [event for each in events.values() for event in each]
    assert any(event.is_too_much for event in told if isinstance(event, DamagedOnTheWay))
    alarms = {event.alarm for event in told if isinstance(event, AlarmRaised)}
    assert alarms == {AlarmKind.DAMAGED_ON_THE_WAY}
