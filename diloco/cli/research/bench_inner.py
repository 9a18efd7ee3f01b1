"""`diloco bench` inside an island: whether it trains as fast as plain PyTorch.

What the outer loop takes of its devices, and the all-reduces of what islands are compared with.
"""

from __future__ import annotations

from typing import Annotated

import typer

from diloco.cli.research.bench import Require, show_report
from diloco.cli.terminal.options import JsonTarget
from diloco.cli.terminal.progress import progress_console


def register(bench: typer.Typer) -> None:
    """Add the commands of this module to `diloco bench`."""
    bench.command()(plain)
    bench.command()(memory)
    bench.command()(allreduce)


def plain(
    rows: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these models; repeatable.")
    ] = None,
    json_target: JsonTarget = "",
    require: Require = False,
) -> None:
    """Time the native trainer beside plain PyTorch written straight.

    One rank, one thread, float32 on the CPU: a Llama of 0.9M and one of 26M parameters, fused
    AdamW, clipping, the same values to begin with and the same sequences, which lie ready in memory
    for the plain loop. Blocks of steps alternate. Some minutes.

    Read "native / plain": tokens/s of ours over those of the plain loop, the median over pairs of
    blocks, with the interval that holds the true one in 95 of 100 cases; "by CPU time": the same of
    CPU seconds, which other work on the machine does not widen; "losses differ by": of the first
    block, which shows that both compute the same.
    """
    from diloco.bench.training.plain import SETTING, chosen_rows, run_plain
    from diloco.cli.terminal.progress import counting

    chosen = chosen_rows(SETTING, rows or [])
    with counting(progress_console(json_target)) as show:
        report = run_plain(SETTING, chosen, on_progress=show)
    show_report(report, json_target, require=require)


def memory(json_target: JsonTarget = "", require: Require = False) -> None:
    """Count what the outer loop takes of an accelerator's memory, beyond the parameters.

    One island of one rank, 10M parameters in six fragments, int4, real coordinator and syncer; its
    inner steps add noise. With a CUDA device the bytes are those of PyTorch's allocator there;
    without one, parameters lie on a device made of host memory that counts every tensor on it.
    Half a minute.

    Read "fragments": the extra bytes over those of the largest fragment's parameters, required to
    be at most 2 and 5 %; "of 12 B/param.": over float32 parameters and AdamW's moments, where two
    fragments of 36 are 2 % in Streaming DiLoCo. What an island keeps between rounds is in host
    memory (see "host, outer" of diloco plan); what it merges next comes to the device as soon as
    all its ranks have it, if a step is left until then: "steps with fragments in flight".
    """
    from diloco.bench.outer_loop.memory import SETTING, run_memory
    from diloco.cli.terminal.progress import counting

    with counting(progress_console(json_target)) as show:
        report = run_memory(
            SETTING, on_progress=lambda done: show("rows", done, len(SETTING.local_mixes))
        )
    show_report(report, json_target, require=require)


def allreduce(
    rows: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these links; repeatable.")
    ] = None,
    emulate: Annotated[
        bool,
        typer.Option("--emulate", help="Links of network namespaces (root), not of the process."),
    ] = False,
    json_target: JsonTarget = "",
    require: Require = False,
) -> None:
    """Time a flat ring and a hierarchical all-reduce of 64 MiB beside their ideal.

    Two islands of two ranks on links of 100 Mbit/s 60 ms, 1 Gbit/s 20 ms and 1 Gbit/s 1 ms, shaped
    in the process, or emulated with the kernel's TCP (see diloco emulate). Some minutes, on a
    machine without other work: on 1 Gbit/s four processes want more than two CPUs.

    Read "ideal / took": 1 means that nothing but the link took time; "inside alone": reduce-scatter
    and all-gather inside an island, measured by themselves, which chunks hide under the link; a
    chunk of 64 MiB hides nothing.
    """
    from diloco.bench.network.allreduce import SETTING, run_allreduce
    from diloco.cli.terminal.progress import counting
    from diloco.launch.process.ending import Interrupted, note_signals

    try:
        with note_signals() as request, counting(progress_console(json_target)) as show:
            report = run_allreduce(
                SETTING,
                rows or [],
                is_emulated=emulate,
                on_progress=show,
                on_look=request.check,
            )
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None
    show_report(report, json_target, require=require)
