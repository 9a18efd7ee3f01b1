"""Which sinks a rank's events go to: its file of events, and for the leader what the site asks."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from diloco.config.schema import Config
from diloco.durable import read_json, write_json
from diloco.telemetry.sinks import BackgroundSink, FanOut, JsonlSink, Sink
from diloco.telemetry.tensorboard import TensorBoardSink
from diloco.telemetry.wandb import WandbRun, WandbSink


def build_sinks(config: Config, island_rank: int, output_dir: Path) -> Sink:
    """Build the sinks of one rank of the selected island; nothing is opened yet.

    Args:
        config: `telemetry` is read, with an island selected.
        island_rank: Position of the rank in its island; metrics are written by rank 0 alone.
        output_dir: Directory of events and logs; must be there.
    """
    run, island = config.run.name, config.island_id
    context = {"run": run, "island": island, "island_rank": island_rank}
    path = output_dir / f"events-{island}-{island_rank}.jsonl"
    sinks: list[Sink] = [JsonlSink(path, context, time.time)]
    if island_rank == 0 and config.telemetry.tensorboard:
        sink = TensorBoardSink(output_dir / "tensorboard" / island)
        sinks.append(BackgroundSink("tensorboard", sink))
    if island_rank == 0 and config.telemetry.wandb.mode != "disabled":
        sinks.append(BackgroundSink("wandb", WandbSink(_wandb_run(config, output_dir))))
    return FanOut(sinks)


def _wandb_run(config: Config, output_dir: Path) -> WandbRun:
    """Give the same wandb run to every start of the island in one directory, and to no other.

    A run of the same name in another directory is another run, so names alone do not choose.
    """
    wandb = config.telemetry.wandb
    path = output_dir / f"wandb-{config.island_id}.json"
    run_id = read_json(path)
    if run_id is None:
        run_id = f"{config.island_id}-{secrets.token_hex(6)}"
        write_json(path, run_id)
    return WandbRun(
        mode=wandb.mode,
        project=wandb.project,
        entity=wandb.entity,
        group=config.run.name,
        name=config.island_id,
        run_id=run_id,
        directory=output_dir,
        config=config.model_dump(mode="json"),
    )
