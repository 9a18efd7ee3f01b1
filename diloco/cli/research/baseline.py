"""`diloco baseline`: a run's model, text and links, trained with all-reduce or local SGD."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.cli.terminal.options import AsJson, Overrides, RunFile, option, size_of
from diloco.cli.terminal.progress import answering, output, stoppable
from diloco.errors import ConfigError
from diloco.transport.units import format_bytes, format_duration

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.baseline.local import BaselineOptions


def baseline(
    run_file: RunFile,
    name: Annotated[
        str, option("flat, hierarchical, local-sgd or post-local-sgd.", "NAME")
    ] = "hierarchical",
    overrides: Overrides = None,
    codec: Annotated[str, option("Of what crosses between islands.", "NAME")] = "float32",
    chunk: Annotated[str, option("Float32 values reduced at once.", "SIZE")] = "4MiB",
    streams: Annotated[int, option("Parts under way at once, a rank.", "N", min=1, max=256)] = 8,
    hop: Annotated[str, option("Between islands: transport, gloo or nccl.", "NAME")] = "transport",
    every: Annotated[
        int, option("Local SGD: steps between averages; 0: the run's.", "H", min=0)
    ] = 0,
    first: Annotated[int, option("post-local-sgd: steps of data parallel before.", "T", min=0)] = 0,
    out: Annotated[str, option("For logs and summary; empty: STATE_DIR-NAME.", "DIR")] = "",
    as_json: AsJson = False,
) -> None:
    """Train the run's model on this machine in another way, to be compared with.

    flat: one ring all-reduce of the gradients through all ranks of all islands, every inner step.
    hierarchical: reduce-scatter inside the islands, all-reduce of shards between them, all-gather
    inside, chunk by chunk under the backward. local-sgd: gradients are summed inside an island,
    parameters averaged over islands every H inner steps; post-local-sgd: after T steps of data
    parallel.

    Same text, batches, seed and links (transport.link, or diloco emulate) as `diloco local`, no
    outer optimizer, and no fault tolerance: one rank that ends early ends it all. The inner
    optimizer's moments stay local in local SGD. --hop gloo crosses between islands in a plain
    process group of all ranks, as inside one cluster: the same chunks, pipeline and sums to the
    bit, without shaping, encryption or authentication. --hop nccl is that on CUDA devices, of which
    every rank needs one: the phases of a chunk follow each other there, under the backward.

    Example: diloco baseline configs/runs/demo.toml --name flat
    """
    from diloco.baseline.local import BaselineOptions, check_baseline, run_baseline
    from diloco.compression.registry import get_codec
    from diloco.config.load import load_config
    from diloco.launch.process.emulated import Emulated
    from diloco.launch.rank.inputs import open_inputs

    config = load_config(run_file, overrides or ())
    options = BaselineOptions(
        name, get_codec(codec).name, _chunk_bytes(chunk), streams, every, first, hop
    )
    check_baseline(config, options)
    if (emulated := Emulated.surrounding(os.environ)) is not None:
        config = emulated.placed(config)
    directory = _empty_place(out or f"{config.coordinator.state_dir}-{name}")
    answering(lambda: open_inputs(config, may_download=True))
    console = output("-" if as_json else "")
    console.print(f"baseline {name} of run {config.run.name}; logs in {directory}")
    with stoppable() as request:
        summary = run_baseline(config, options, directory, emulated=emulated, on_look=request.check)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    console.print(_text(summary, options))


def _empty_place(path: str) -> Path:
    """Refuse a directory in which something would be overwritten."""
    directory = Path(path)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is not empty: remove it, or give another --out")
    return directory


def _chunk_bytes(text: str) -> int:
    least, most = 256 << 10, 256 << 20  # a part costs a call, about a millisecond of CPU
    size = size_of("--chunk", text)
    if not least <= size <= most or size % 4:
        raise ConfigError(
            f"--chunk {text}: must be 256KiB to 256MiB, in whole float32 values (4 bytes)"
        )
    return size


def _text(summary: dict[str, Any], options: BaselineOptions) -> str:
    moved = ", ".join(
        f"{name} {format_bytes(each['bytes_up'])} up" for name, each in summary["islands"].items()
    )
    return (
        f"{options.name}: {summary['inner_steps']:,} inner steps, {summary['total_tokens']:,} "
        f"tokens in {format_duration(summary['wall_s'])}\n"
        f"held-out loss {summary['nats_per_byte']:.4f} nats a byte, last training loss "
        f"{summary['losses'][-1]:.4f} nats a token\n"
        f"utilisation {summary['utilisation']:.1%}: {format_duration(summary['waited_s'])} waited "
        f"for other ranks and links\n"
        f"between islands: {moved}"
    )
