"""`diloco data`: what a run is trained on, before it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.terminal.options import Overrides, RunFile, option
from diloco.cli.terminal.progress import counting, notes, output, stoppable
from diloco.errors import ConfigError

data = typer.Typer(help="Prepare what a run is trained on.", no_args_is_help=True)


@data.callback()
def _group() -> None:
    """Prepare what a run is trained on."""


@data.command()
def prepare(
    run_file: RunFile,
    out: Annotated[Path, option("Directory to write; made when missing.", "DIR")],
    processes: Annotated[
        int, option("That tokenise at once; 0: one a CPU.", "NUM", "--processes", min=0)
    ] = 0,
    overrides: Overrides = None,
) -> None:
    """Tokenise a run's text once, into files that its ranks read as they are.

    Makes NAME.bin and NAME.idx, in Megatron's format, of every source NAME of text in the run file,
    with its tokenizer and separator. A rank that trains on text tokenises its island's whole batch;
    of token files it reads its own sequences alone. The last lines printed go into the run file in
    place of the text; then a run draws the same sequences in the same order. To islands and
    checkpoints it is other text, so begin the run with it, and name it at all islands.

    Killed or stopped, the same command goes on where it was, and ends with the same bytes.

    Example: diloco data prepare run.toml --out tokens
    """
    from diloco.config.load import load_config
    from diloco.data.prepare import prepare as prepare_sources
    from diloco.system import usable_cpus

    config = load_config(run_file, overrides or ()).data
    if not config.sources:
        raise ConfigError(
            f"{run_file} has no table [data.sources.NAME]: data.source = "
            f'"{config.source}" needs no preparing'
        )
    # A process has one CPU; the package would start a thread for each in every process.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with stoppable() as request, counting(notes()) as show:

        def show_and_check(what: str, done: int, total: int) -> None:
            request.check()
            show(what, done, total)

        num_processes = processes or usable_cpus()
        made = prepare_sources(config, out, num_processes=num_processes, show=show_and_check)
    for each in made.values():
        size = each.path.stat().st_size
        notes().print(
            f"{each.path}: {each.num_documents:,} documents, {each.num_tokens:,} tokens, "
            f"{size:,} bytes"
        )
    for name, each in made.items():
        source = config.sources[name]
        output().print(f"[data.sources.{name}]")
        output().print(f"files = {json.dumps(str(each.path), ensure_ascii=False)}")
        if "weight" in source.model_fields_set:
            output().print(f"weight = {source.weight}")
        if source.repeat:
            output().print("repeat = true")
