"""`diloco bench`: what the outer loop costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.terminal.options import JsonTarget, write_json
from diloco.cli.terminal.progress import progress_console

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.report.rows import Report

bench = typer.Typer(
    help="Measure the outer loop: what it costs, how busy it keeps an island.",
    no_args_is_help=True,
)

Require = Annotated[
    bool,
    typer.Option("--require", help="Exit with 1 if a figure misses its bar; the last line says."),
]


@bench.command()
def overhead(json_target: JsonTarget = "", require: Require = False) -> None:
    """Time an island's steps with and without the outer loop, and its CPU time a round.

    10M parameters, one rank, real coordinator, syncer and gRPC on this machine. The training thread
    has a CPU of its own, all else shares another. Blocks of plain steps alternate with blocks
    in which the outer loop has nothing to do, or sends and merges everything (int4). Takes a few
    minutes; other load on the machine widens the intervals.

    Read "session idle over plain": 1.00 means that a step without a merge costs nothing; "critical
    path" is what a round takes from training, "all CPU" what it takes from the host's cores, both
    in nanoseconds a parameter, with the phases they are made of below.
    """
    from diloco.bench.outer_loop.overhead import SETTING, run_overhead
    from diloco.cli.terminal.progress import counting

    with counting(progress_console(json_target)) as show:
        report = run_overhead(
            SETTING, on_progress=lambda done: show("cycles", done, SETTING.num_cycles)
        )
    show_report(report, json_target, require=require)


@bench.command()
def utilisation(json_target: JsonTarget = "", require: Require = False) -> None:
    """Measure the share of the time that islands train behind a thin link.

    Two islands, coordinator and syncer as real processes; each island's link is shaped to 100
    Mbit/s each way, 60 ms round trip (configs/links/bench-100M-60ms.toml). H = 30; a step is a
    sleep of 0.2 s, in the last row real training. Takes about ten minutes.

    Read "utilisation": inner steps x undisturbed step / wall time; "floor": what the round's
    payload takes on the link, up and down. float32 rows show what the exchange costs when it is
    not hidden; with int4 in ten fragments it disappears behind training.
    """
    from diloco.bench.outer_loop.utilisation import SETTING, run_utilisation
    from diloco.cli.terminal.progress import counting

    with counting(progress_console(json_target)) as show:
        report = run_utilisation(
            SETTING, on_progress=lambda done, row: show(row, done, len(SETTING.rows))
        )
    show_report(report, json_target, require=require)


@bench.command()
def codec(
    names: Annotated[
        list[str] | None, typer.Option("--codec", metavar="NAME", help="Only these; repeatable.")
    ] = None,
    json_target: JsonTarget = "",
    require: Require = False,
) -> None:
    """Time every codec's encode and decode, eager and compiled, beside a copy of the same values.

    One thread; as many float32 values at once as a lane of a fragment of 25 million parameters has,
    and 4 million; about two minutes, most of them for compiling. With a GPU, 268 million on that.

    Read "encode" and "decode": GB of float32 (not coded) a CPU second, so that 4 bits a value at x
    GB/s fill a link of x Gbit/s; "/copy": the same as a share of copying the values in memory, in
    the same run; "error": what is lost of seeded normal values, relative to them, which with error
    feedback the next contribution carries. "zstd": coded bytes of a real pseudo-gradient over what
    zstd -1 leaves of them, and the GB of coded bytes a CPU second that packing and unpacking take;
    on links below "pays below" that is less than the time that it saves. Nothing is compressed in a
    run.
    """
    from diloco.bench.outer_loop.codec import SETTING, run_codec
    from diloco.cli.terminal.progress import counting

    with counting(progress_console(json_target)) as show:
        report = run_codec(
            SETTING,
            names or [],
            on_progress=lambda done, total: show("codecs", done, total),
        )
    show_report(report, json_target, require=require)


@bench.command()
def publish(json_target: JsonTarget = "", require: Require = False) -> None:
    """Time a round from submit to published beside the arithmetic that it needs.

    25M parameters, int4, two islands and a syncer, a process each, over loopback. The clock starts
    when the islands begin to encode and stops when both have heard of the next version. About a
    minute; it wants two idle CPUs.

    Read "/alone": the fastest round over 2 encodes, 3 decodes, outer step and downlink on one
    thread; "encode", "arrive" (until the last lane is acknowledged), "merge", "commit" and
    "announce" are its parts in milliseconds, one after the other; "CPU" is that of all processes.
    The first row of rounds is judged: its versions count as durable at once. The second writes
    them: merging shares the CPUs with hashing and writing 12 bytes a parameter.
    """
    from diloco.bench.syncer.publish import SETTING, run_publish
    from diloco.cli.terminal.progress import counting

    with counting(progress_console(json_target)) as show:
        report = run_publish(SETTING, on_progress=lambda done, total: show("rounds", done, total))
    show_report(report, json_target, require=require)


@bench.command()
def syncer(json_target: JsonTarget = "", require: Require = False) -> None:
    """Measure how many islands one core serves, and the memory that it takes.

    A real syncer on one CPU and 4 to 64 simulated islands, which send 16.8M parameters in int4
    each round; with 64 of them also over mTLS. About five minutes, 3 GiB of memory, 2 GiB of disk.

    Read "CPU ns": nanoseconds a parameter and island of everything a syncer does; "M/s a core":
    its inverse, millions of island-parameters a second; "tensors", "Python" and "gRPC" are the
    shares of this time in merging and verifying, in the event loop and in gRPC's threads: the
    largest is the limit ("memory": its bandwidth); "kernel" is the part of all three in system
    calls, for pages and disk. "TLS" is what gRPC's threads take beyond the row without it. In the
    last row most contributions are spooled to disk, and all islands send at once: only the syncer
    bounds what is in memory.

    "extra": peak memory beyond an idle syncer, the fragment's state, the contributions in memory
    ("coded") and the lanes in flight, each counted once; "/fragment": over the state of the
    fragment, 12 bytes a parameter. Its bar is 1.25.
    """
    from diloco.bench.syncer.syncer import SETTING, run_syncer
    from diloco.cli.terminal.progress import counting

    with counting(progress_console(json_target)) as show:
        report = run_syncer(SETTING, on_progress=lambda done, total: show("rounds", done, total))
    show_report(report, json_target, require=require)


@bench.command()
def heartbeat(json_target: JsonTarget = "", require: Require = False) -> None:
    """Time heartbeats on a link of 10 Mbit/s that data saturates both ways.

    Emulated links (network namespaces, root; see diloco emulate) of 60 ms round trip, cubic and
    bbr, payloads at transport.rate = 9.5 Mbit/s (these have bars) or unpaced. About four minutes,
    on a machine without other work: see "idle p99", of heartbeats on the empty link.

    Read "p99, RTTs": 99th percentile of a heartbeat's time over the empty link's round trip;
    "silence": the longest time in which the coordinator heard nothing, which stands in for a lease
    until there are leases; "data": that the link was really full.
    """
    from diloco.bench.network.heartbeat import SETTING, run_heartbeat
    from diloco.cli.terminal.progress import counting

    with counting(progress_console(json_target)) as show:
        report = run_heartbeat(SETTING, on_progress=show)
    show_report(report, json_target, require=require)


@bench.command()
def wan(
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these rows, with * and ?; repeatable."),
    ] = None,
    json_target: JsonTarget = "",
    require: Require = False,
) -> None:
    """Measure how much of emulated long and lossy links the transport fills.

    Each link is made of network namespaces (root; see diloco emulate), checked against its
    specification, and then carries in turn what iperf3 sends in 8 streams and contributions of 16
    lanes through the product's own transport. Beside them: the in-process shaper against its
    specification, and what mTLS costs. About fifteen minutes; a busy machine makes checks miss.

    Read "figure": payload per second over that of the limit in the same minute on the same link;
    shaper: the largest error of a transfer's time; mtls-cpu: CPU of both ends over that of
    plaintext. "limit by" says what the limit is: iperf3, which must be installed, and of bursts,
    which it does not time, plain TCP. Rows of hivemind have a table of their own and no bar: their
    cap is about 4 MB in flight a stream.
    """
    from diloco.bench.network.wan import SETTING, run_wan
    from diloco.cli.terminal.progress import counting
    from diloco.launch.process.ending import Interrupted, note_signals

    try:
        with note_signals() as request, counting(progress_console(json_target)) as show:
            report = run_wan(SETTING, rows or [], on_progress=show, on_look=request.check)
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None
    show_report(report, json_target, require=require)


@bench.command()
def guard(
    full: Annotated[
        bool, typer.Option("--full", help="All faults, two to four islands: 90 cells, not 20.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", min=1, help="Of parameters and text.")] = 1,
    processes: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Cells trained at once, one thread each; 0: by CPUs."
        ),
    ] = 0,
    json_target: JsonTarget = "",
    require: Require = False,
) -> None:
    """Measure what one faulty island does to a run: what is refused, and what the model learns.

    A byte model of 0.03M parameters, 200 inner steps in virtual time with the product's own islands
    and syncer, scheduled and decoupled; from step 103 on the last island is faulty: it learns
    shuffled labels; what it sends has the other sign, is a hundredfold, or noise; or one bit flips
    in a parameter, an inner moment or the anchor. Beside them runs without a fault: a warm start, a
    learning rate that begins again, an island that joins, one that leaves. About 4 s of CPU a cell.

    Of two islands whose directions differ both are merged once, then each tries what it sends: the
    bar of their loss is only hoped for.

    Read "ratio": held-out loss over that of the same run without a fault; "refused": by the guard,
    "declined": by the faulty island's own check; "false": either, of healthy islands; "named":
    whether an alarm blames the faulty island alone; "ends": who ended itself.
    """
    from diloco.bench.outer_loop.guard import SETTING, chosen_cells, run_guard
    from diloco.cli.terminal.progress import counting
    from diloco.report.rows import usable_cpus

    cells = chosen_cells(is_full=full)
    with counting(progress_console(json_target)) as show:
        report = run_guard(
            SETTING,
            cells,
            seed=seed,
            num_processes=processes or usable_cpus(),
            on_progress=lambda done: show("cells", done, len(cells)),
        )
    show_report(report, json_target, require=require)


def show_report(report: Report, json_target: str, *, require: bool) -> None:
    """Print tables and bars, write the JSON, and judge.

    Raises:
        typer.Exit: With code 1 if `require` and a bar was missed, or none could be judged.
    """
    from rich.console import Console

    from diloco.cli.terminal.report_tables import print_rows

    console = Console(quiet=json_target == "-")
    for title, rows in report.tables.items():
        print_rows(console, report.columns, rows, title)
    for requirement in report.requirements:
        missed = "yellow" if requirement.is_stretch else "red"
        style = "green" if requirement.is_met else missed
        console.print(requirement.as_text(), style=style, highlight=False, soft_wrap=True)
    write_json(report.as_dict(), json_target)
    if not require:
        return
    if not report.requirements:
        typer.echo("nothing was judged: the chosen rows have no bar", err=True)
        raise typer.Exit(1)
    if report.missed:
        for requirement in report.missed:
            typer.echo(requirement.as_text(), err=json_target == "-")
        raise typer.Exit(1)
