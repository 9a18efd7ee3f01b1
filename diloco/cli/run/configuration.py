"""`diloco config`: what a run file may say, and what one says once everything is resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from diloco.cli.terminal.options import Overrides, flag
from diloco.cli.terminal.progress import output

#: What people set first: the keys of shipped run files, and those of a site of one's own.
FIRST_KEYS = (
    "run.name", "run.seed", "run.inner_steps", "run.warm_start", "model.family", "model.name",
    "model.preset", "model.dim", "model.num_layers", "model.num_heads", "data.sequence_length",
    "data.sources.NAME.files", "data.sources.NAME.hub", "data.tokenizer", "inner.optimizer.lr",
    "inner.optimizer.schedule", "inner.optimizer.warmup_steps", "outer.preset",
    "outer.inner_steps_per_round", "outer.num_fragments", "outer.overlap_steps",
    "outer.optimizer.lr", "outer.optimizer.momentum", "outer.uplink_codec", "outer.downlink_codec",
    "outer.min_contributions", "transport.certs", "transport.insecure", "transport.link",
    "coordinator.listen", "coordinator.address", "coordinator.state_dir",
    "checkpoint.every_inner_steps", "evaluation.every_inner_steps", "islands.NAME.ranks",
    "islands.NAME.mesh.dp_shard", "islands.NAME.mesh.tp", "islands.NAME.tokens_per_inner_step",
    "islands.NAME.precision", "islands.NAME.device",
)  # fmt: skip


def config(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="Resolve this run file.")
    ] = None,
    explain: Annotated[
        bool, flag("List the keys used first: class, default, range, meaning.", "--explain")
    ] = False,
    every: Annotated[bool, flag("With --explain: every key.", "--all")] = False,
    overrides: Overrides = None,
) -> None:
    """Check a run file and print it with every default filled in, or explain the keys.

    Keys of class identity must be equal on every island, those of class policy are decided by the
    coordinator's file, local ones are each site's own. What other installed packages add is listed
    last.

    Example: diloco config configs/runs/demo.toml --set outer.num_fragments=4
    """
    from diloco.config.classes import fingerprint
    from diloco.config.load import load_config, resolved_toml

    if every and not explain:
        raise typer.BadParameter("--all is of --explain: add it")
    if explain:
        _explain(every=every)
        return
    if run_file is None:
        raise typer.BadParameter("give a RUN.toml, or --explain")
    resolved = load_config(run_file, overrides or ())
    typer.echo(f"# identity fingerprint {fingerprint(resolved)}")
    typer.echo(resolved_toml(resolved), nl=False)


def _explain(*, every: bool) -> None:
    from diloco.config.classes import explain
    from diloco.config.schema import Config
    from diloco.extensions import KINDS, extensions

    console = output()
    rows = explain(Config)
    for row in rows:
        if every or row.path in FIRST_KEYS:
            facts = [row.config_class, f"default {row.default}", row.allowed]
            said = f"  {', '.join(filter(None, facts))}\n    {row.description}"
            console.print(Text.assemble((row.path, "bold"), said))
    for group in KINDS:
        for added in extensions(group):
            console.print(f"added: {added}")
    if not every:
        console.print(f"{len(FIRST_KEYS)} of {len(rows)} keys; all of them: --explain --all")
