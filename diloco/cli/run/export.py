"""`diloco export`: the published parameters of a run as a Hugging Face model, or as DCP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.options import Run, flag, option, size_of
from diloco.cli.terminal.progress import counting, notes, output
from diloco.errors import ConfigError
from diloco.transport.units import format_bytes

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.checkpoint.export import Export
    from diloco.checkpoint.published import PublishedFragment

Layout: TypeAlias = Literal["hf", "dcp"]


def export(
    run: Run,
    out: Annotated[
        Path | None, option("Directory to write; default: STATE_DIR/export.", "DIR")
    ] = None,
    at_step: Annotated[
        int | None, option("Export the run checkpoint of that inner step instead.", "STEP", "--at")
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(
            "--format",
            help="hf: safetensors under Hugging Face's names; dcp: torch.distributed.checkpoint "
            "under torchtitan's.",
        ),
    ] = "hf",
    shard_bytes: Annotated[str, option("Largest file of safetensors, as 5GB.", "SIZE")] = "",
    force: Annotated[bool, flag("Replace an earlier export in that directory.", "--force")] = False,
) -> None:
    """Write the published parameters of a run: a model that others load.

    Reads the durable records only, so the run may be under way; says which versions it took.

    Example: diloco export runs/demo --out model
    """
    from diloco.checkpoint.export import MAX_FILE_BYTES, export_run, find_run

    if shard_bytes and layout != "hf":
        raise ConfigError(
            f"--shard-bytes {shard_bytes} is for --format hf; with {layout} every tensor is a file"
        )
    max_file_bytes = size_of("--shard-bytes", shard_bytes) if shard_bytes else MAX_FILE_BYTES
    state = find_run(run)
    default = state.root / ("export" if at_step is None else f"export-step-{at_step:012d}")
    with counting(notes()) as show:
        made = export_run(
            state,
            out or default,
            at_step=at_step,
            overwrite=force,
            layout=layout,
            max_file_bytes=max_file_bytes,
            on_progress=show,
        )
    _show(made, layout)


def _show(made: Export, layout: Layout) -> None:
    columns: dict[str, Callable[[PublishedFragment], object]] = {
        "fragment": lambda fragment: fragment.fragment_id,
        "version": lambda fragment: fragment.version,
        "inner step": lambda fragment: fragment.inner_step,
        "flush": lambda fragment: "yes" if fragment.is_flush else "no",
        "digest": lambda fragment: fragment.digest[:12],
    }
    console = output()
    console.print(FittedTable.of(made.fragments, columns))
    num_bytes = sum(file["bytes"] for file in made.files.values())
    console.print(
        f"{made.num_parameters:,} parameters of run {made.run}, {format_bytes(num_bytes)} in "
        f"{len(made.files)} file(s): {made.directory}"
    )
    console.print(_standing(made))
    how = f'transformers.AutoModelForCausalLM.from_pretrained("{made.directory}")'
    if layout == "dcp":
        how = (
            f'in torchtitan checkpoint.initial_load_path = "{made.directory}" and '
            f"initial_load_model_only = true, or torch.distributed.checkpoint.load"
        )
    console.print(f"Load it: {how}")
    if made.absent_tokenizer:
        console.print(
            f"The tokenizer is not on this machine; where it is, add it: transformers.AutoTokenizer"
            f'.from_pretrained("{made.absent_tokenizer}").save_pretrained("{made.directory}")'
        )


def _standing(made: Export) -> str:
    """Say whether these are the run's last parameters, and how far apart the fragments are."""
    if made.is_final:
        return "The flush of every fragment is in: these are the run's final parameters."
    steps = [fragment.inner_step for fragment in made.fragments]
    text = "The flush is not in: what islands have learned since these versions is not either."
    if min(steps) < max(steps):
        text += (
            f" Versions are mixed: the fragments stand at inner steps {min(steps)} to {max(steps)}."
        )
    return text
