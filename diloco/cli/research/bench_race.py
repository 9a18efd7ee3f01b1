"""`diloco bench race` and `diloco bench scaling`: other ways to train, and more ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.research.bench import Require, show_report
from diloco.cli.terminal.options import JsonTarget, plot_option
from diloco.cli.terminal.progress import progress_console


def register(bench: typer.Typer) -> None:
    """Add the commands of this module to `diloco bench`."""
    bench.command()(race)
    bench.command()(scaling)


def race(
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these links, with * and ?; repeatable."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One link, few steps; the loss has no bar.")
    ] = False,
    emulate: Annotated[
        bool,
        typer.Option("--emulate", help="Links of network namespaces (root), not of the process."),
    ] = False,
    plot: Annotated[str, plot_option("all figures")] = "",
    json_target: JsonTarget = "",
    require: Require = False,
) -> None:
    """Race all-reduce of gradients against DiLoCo: same model, tokens and links.

    Two islands of two ranks train a byte model of 0.9M parameters for 200 inner steps on links of
    1 Gbit/s 1 ms, 1 Gbit/s 20 ms and 100 Mbit/s 60 ms; with --emulate also on those with 0.1 %
    loss. flat: one ring all-reduce of the gradients through all ranks; hierarchical: inside the
    islands, between them, inside; diloco-float32: H = 10, islands wait; streaming-int4: H = 10,
    four fragments in 4 bits, merged two inner steps later. About a quarter of an hour on two CPUs
    without other work; --quick some three minutes.

    Read "faster": wall time of hierarchical all-reduce over that of the row; "utilisation": share
    of the wall time in which nobody waited for links or other ranks; "up" and "down": what an
    island sent to and got from others in the whole run; "loss ratio": held-out loss over that of
    hierarchical all-reduce. The bar, on 100 Mbit/s 60 ms:
    streaming-int4 ends earlier than hierarchical all-reduce, and with a held-out loss at most 5 %
    above it; that is one seed and few steps, learning is compared by diloco lab
    suite parity.
    """
    from diloco.bench.training.race import QUICK, SETTING, chosen_links, run_race
    from diloco.bench.training.race_plot import write_plot
    from diloco.cli.terminal.progress import counting
    from diloco.launch.process.ending import Interrupted, note_signals

    setting = QUICK if quick else SETTING
    links = chosen_links(setting, rows or [], is_emulated=emulate)
    try:
        with note_signals() as request, counting(progress_console(json_target)) as show:
            report = run_race(
                setting, links, is_emulated=emulate, on_progress=show, on_look=request.check
            )
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None
    if plot:
        write_plot(report.rows, Path(plot))
        progress_console(json_target).print(f"picture: {plot}", highlight=False, soft_wrap=True)
    show_report(report, json_target, require=require)


def scaling(
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="N,N", help="Numbers of ranks beside one.")
    ] = "2,4",
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these, such as fsdp-2, with * and ?; repeatable."),
    ] = None,
    emulate: Annotated[
        bool,
        typer.Option("--emulate", help="A namespace and a link for every rank (root)."),
    ] = False,
    json_target: JsonTarget = "",
) -> None:
    """Measure how an island's speed grows with its ranks, by strategy.

    Ranks of one thread on this machine, joined by gloo, train a byte model of 3.3M parameters on
    the same 2,048 tokens an inner step: fsdp, replicate, tp, pp (1F1B, two micro-batches a stage)
    and cp (ring) each take all ranks. A minute or two. They meet through the loopback; --emulate
    joins each to a switch by 1 Gbit/s, 0.4 ms round trip between two, measured before: as slow
    beside these ranks as a cluster's network beside its GPUs. What carries the packets takes CPU
    time, too.

    Read "x N": one rank's tokens/s times the ranks; "ideal": the same, times the CPUs where ranks
    share those, and no more than lets pass what the busiest rank moved ("MB/step", with --emulate)
    under the arithmetic; "efficiency": tokens/s over the ideal, which other work on the machine
    lowers. "exposed": share of the wall time in which a rank's training thread waited for others,
    its waits for a CPU not counted: collectives that nothing hides, and the bubbles of a pipeline;
    of more ranks than CPUs also others' waits for a CPU. "CPU": CPU time of a token over that of
    one rank, whoever else computes, so that 1 means that a strategy adds no work. "loss" differs
    by rounding only. There are no bars.
    """
    from diloco.bench.training.scaling import SETTING, chosen_rows, run_scaling
    from diloco.cli.terminal.progress import counting
    from diloco.errors import ConfigError
    from diloco.launch.process.ending import Interrupted, note_signals

    words = ranks.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--ranks {ranks}: give numbers of ranks with commas, such as 2,4")
    chosen = chosen_rows(SETTING, [int(word) for word in words], rows or [])
    try:
        with note_signals() as request, counting(progress_console(json_target)) as show:
            report = run_scaling(
                SETTING, chosen, is_emulated=emulate, on_progress=show, on_look=request.check
            )
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None
    show_report(report, json_target, require=False)
