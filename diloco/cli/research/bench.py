"""`diloco bench`: what the outer loop, its network and an island's training cost.

A command here is its options and what its help says; the bench of its name is `run` of a module.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.cli.terminal.fitted_table import print_rows
from diloco.cli.terminal.options import (
    Emulate,
    JsonTarget,
    Require,
    Rows,
    flag,
    option,
    plot_option,
    with_options,
    write_json,
)
from diloco.cli.terminal.progress import counting, notes, output, stoppable

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.report.rows import Report, Watch

bench = typer.Typer(
    help="Measure the outer loop: what it costs, how busy it keeps an island.", no_args_is_help=True
)


def measured_by(module: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of `diloco bench` out of a function that says its options and its help.

    The command has --json and --require, too, and calls `diloco.bench.MODULE.run`.
    """

    def add(declared: Callable[..., None]) -> Callable[..., None]:
        def command(json_target: str, require: bool, **options: Any) -> None:
            own = {name: value for name, value in options.items() if value is not None}

            def measure(watch: Watch) -> Report:
                made: Report = importlib.import_module(f"diloco.bench.{module}").run(watch, **own)
                return made

            report = report_of(measure, json_target)
            if picture := own.get("plot"):
                notes(json_target).print(f"picture: {picture}")
            show_report(report, json_target, require=require)

        made = with_options(command, declared, _shared)
        bench.command(declared.__name__)(made)
        return made

    return add


def _shared(json_target: JsonTarget = "", require: Require = False) -> None:
    """Options that every bench has."""


def report_of(measure: Callable[[Watch], Report], json_target: str) -> Report:
    """Measure or check; a signal ends it, and all its processes."""
    began = time.monotonic()
    with stoppable() as request, counting(notes(json_target)) as show:

        def watch(what: str, done: int, total: int) -> None:
            request.check()
            show(what, done, total)

        measured = measure(watch)
    return replace(measured, wall_s=time.monotonic() - began)


@measured_by("outer_loop.overhead")
def overhead() -> None:
    """Time an island's steps with and without the outer loop, and its CPU time a round.

    10M parameters, one rank, real coordinator, syncer and gRPC on this machine. The training thread
    has a CPU of its own, all else shares another. Blocks of plain steps alternate with blocks
    in which the outer loop has nothing to do, or sends and merges everything (int4). Takes a few
    minutes; other load on the machine widens the intervals.

    Read "session idle over plain": 1.00 means that a step without a merge costs nothing; "critical
    path" is what a round takes from training, "all CPU" what it takes from the host's cores, both
    in nanoseconds a parameter, with the phases they are made of below.

    Example: diloco bench overhead --require
    """


@measured_by("outer_loop.utilisation")
def utilisation(rows: Rows = None) -> None:
    """Measure the share of the time that islands train behind a thin link.

    Two islands, coordinator and syncer as real processes; each island's link is shaped to 100
    Mbit/s each way, 60 ms round trip (configs/links/bench-100M-60ms.toml). H = 30; a step is a
    sleep of 0.2 s, in the last row real training. Takes about ten minutes.

    Read "utilisation": inner steps x undisturbed step / wall time; "floor": what the round's
    payload takes on the link, up and down. float32 rows show what the exchange costs when it is
    not hidden; with int4 in ten fragments it disappears behind training.

    Example: diloco bench utilisation --require
    """


@measured_by("outer_loop.codec")
def codec(rows: Rows = None) -> None:
    """Time every codec's encode and decode, eager and compiled, against a copy of the same values.

    One thread; as many float32 values at once as a lane of a fragment of 25 million parameters has,
    and 4 million; two to three minutes, most for compiling. With a GPU, 268 million on that.

    Read "encode" and "decode": GB of float32 (not coded) a CPU second, so that 4 bits a value at x
    GB/s fill a link of x Gbit/s; "/copy": the same as a share of copying the values in memory, in
    the same run; "error": what is lost of seeded normal values, relative to them, which with error
    feedback the next contribution carries. "zstd": coded bytes of a real pseudo-gradient over what
    zstd -1 leaves of them, and the GB of coded bytes a CPU second that packing and unpacking take;
    on links below "pays below" that is less than the time that it saves. "on a slow wire": bytes of
    payloads over those that crossed a line of 100 Mbit/s, and how much "faster" than as many random
    bytes they were, where zstd makes them a tenth smaller required to be the share saved; "on
    loopback": CPU seconds by those of random bytes, required to be at most 1.03.

    Example: diloco bench codec --rows int4 --rows 'topk*'
    """


@measured_by("outer_loop.memory")
def memory() -> None:
    """Count what the outer loop takes of an accelerator that has no room for outer state.

    One island of one rank, 10M parameters in six fragments, int4, real coordinator and syncer; its
    inner steps add noise. Parameters lie on a device made of host memory that counts every tensor
    on it. Half a minute.

    Read "fragments": the extra bytes over those of the largest fragment's parameters, required to
    be at most 2 and 5 %; "of 12 B/param.": over float32 parameters and AdamW's moments, where two
    fragments of 36 are 2 % in Streaming DiLoCo. What an island keeps between rounds is in host
    memory (see "host, outer" of diloco plan); what it merges next comes to the device as soon as
    all its ranks have it, if a step is left until then: "steps with fragments in flight".

    Example: diloco bench memory --require
    """


@measured_by("outer_loop.guard")
def guard(
    full: Annotated[
        bool, flag("All faults, two to four islands: 90 cells, not 20.", "--full")
    ] = False,
    seed: Annotated[int, option("Of parameters and text.", "N", min=1)] = 1,
    processes: Annotated[
        int, option("Cells trained at once, one thread each; 0: by CPUs.", "N", min=0)
    ] = 0,
) -> None:
    """Measure what one faulty island does to a run: what is refused, and what the model learns.

    A byte model of 0.03M parameters, 200 inner steps in virtual time with the product's own islands
    and syncer, scheduled and decoupled; from step 103 on the last island is faulty: it learns
    shuffled labels; what it sends has the other sign, is a hundredfold, or noise; or one bit flips
    in a parameter, an inner moment or the anchor. Besides them runs without a fault: a warm start,
    a learning rate that begins again, an island that joins, one that leaves. About 4 s of CPU a
    cell.

    Of two islands whose directions differ both are merged once, then each tries what it sends: the
    bar of their loss is only hoped for.

    Read "ratio": held-out loss over that of the same run without a fault; "refused": by the guard,
    "declined": by the faulty island's own check; "false": either, of healthy islands; "named":
    whether an alarm blames the faulty island alone; "ends": who ended itself.

    Example: diloco bench guard --full
    """


@measured_by("syncer.syncer")
def syncer(rows: Rows = None) -> None:
    """Measure how many islands one core serves, and the memory that it takes.

    A real syncer on one CPU and 4 to 64 simulated islands, which send 16.8M parameters in int4
    each round; with 64 of them also over mTLS. About ten minutes, 3 GiB of memory, 2 GiB of disk.

    Read "CPU ns": nanoseconds a parameter and island of everything a syncer does; "M/s a core":
    its inverse, millions of island-parameters a second; "tensors", "Python" and "gRPC" are the
    shares of this time in merging and verifying, in the event loop and in gRPC's threads: the
    largest is the limit ("memory": its bandwidth); "kernel" is the part of all three in system
    calls, for pages and disk. "TLS" is what gRPC's threads take beyond the row without it. In the
    last row most contributions are spooled to disk, and all islands send at once: only the syncer
    bounds what is in memory.

    Rows are numbers of islands, with -tls and -small-spool; merge-memory: bytes a parameter of a
    merge, of its repair and of its replay, by merge rule, with 2 to 64 contributions on disk: with
    64 at most 1.2 times those with 2; and publish, where 25M parameters of
    two islands are timed from submit to published: "/alone": the fastest round over 2 encodes, 3
    decodes, outer step and downlink on one thread; "encode", "arrive" (until the last lane is
    acknowledged), "merge", "commit" and "announce" are its parts, one after the other. The row with
    the store off the clock is judged: its versions count as durable at once.

    "extra": peak memory beyond an idle syncer, the fragment's state, the contributions in memory
    ("coded") and the lanes in flight, each counted once; "/fragment": over the state of the
    fragment, 12 bytes a parameter. Its bar is 1.25.

    Example: diloco bench syncer --require
    """


@measured_by("syncer.coordinator")
def coordinator(rows: Rows = None) -> None:
    """Time how long a coordinator of 1,000 islands stands still.

    Its real handlers and its journal on this disk, without a network: all islands report once a
    second, with the link to each of 16 syncers, and have new positions of the text every 13 s; in
    turn nothing else happens, Prometheus scrapes it, all bring their parts of a run checkpoint, and
    islands join one after the other with a plan of 47,000 tensors that is not the run's. Two
    minutes; other load on the machine shows in "idle".

    Read "longest stall": the longest time for which the event loop answered nobody; "loop busy":
    CPU time of its thread over wall time, the islands' share included.

    Example: diloco bench coordinator --require
    """


@measured_by("syncer.page")
def page() -> None:
    """Measure what the page of a run costs its coordinator of 1,000 islands.

    The coordinator of diloco bench coordinator, whose islands report once a second, also serves
    gRPC: there a real diloco page asks it, for ten viewers of another process that hold live
    streams of all views open. Times with viewers and without alternate. A minute and a quarter.

    Read "coordinator's CPU": of its whole process over wall time, the islands' share included; the
    page may add 2 % of a core, and no stall of its loop above 50 ms. "page's CPU" is the other
    process's, whatever core it has.

    Example: diloco bench page --require
    """


@measured_by("scale.scale")
def scale(rows: Rows = None) -> None:
    """Run coordinator and syncer with 64 islands of 512 ranks, and with 1,000 islands.

    Rows 64x512, 1000-scheduled and 1000-on-arrival: a process each with the product's handlers,
    limits, journal and store, without gRPC; every rank calls as one that trains does, with lanes of
    64 KiB. Row grpc: 256 islands over real gRPC, with the product's own processes. About eight
    minutes.

    Read "refused": calls that were refused or put off, which none may be; "handler p99": time for
    which 99 of 100 calls of the slowest method held the event loop, with a bar of 50 ms; "loop
    stands still": the longest time in which nobody else was answered, bursts of calls included;
    "CPU a round": of the whole process, for a round of one fragment; "counted": contributions that
    count, of those sent, all of them where the run is scheduled.

    Example: diloco bench scale --require
    """


@measured_by("network.failover")
def failover() -> None:
    """Lose the machine of coordinator and syncer, disk and all, ten times in a run.

    The run's state is in a bucket (an S3 server of moto, a process of its own, 30 ms away); two
    islands merge on arrival. Each time every process of the machine is killed with SIGKILL and its
    directory removed, while a standby waits. Some six minutes. Needs `diloco[state]`, and moto,
    flask and flask-cors.

    Read "taken over after": from the kill until the standby has the run, 10 s of silence and its
    look; "next version after": from then until it publishes; "longest inner step" of an island,
    while processes start on the same cores. Versions that an island merged are compared with the
    journal at the end: lost are those that it has not.

    Example: diloco bench failover --require
    """


@measured_by("network.placed")
def placed() -> None:
    """Count what crosses the line of each site: one syncer at the core, or one at each site.

    Real runs of 2 and of 4 sites on emulated networks (namespaces; needs root), where the kernel
    counts each site's line. A run of 11 rounds less one of 3: bytes a round. A few minutes.

    Read "ideal": (M - 1)/M of the coded bytes of a contribution and of a version, each way, with
    the headers of TCP: a reduce-scatter and an all-gather of the same bytes; "most / ideal": the
    fuller way of the line. With one syncer, at the core, lines of islands carry all of it, and the
    core's line, which is not shown, the sum of all. The last versions must have the same digests.

    Example: diloco bench placed --require
    """


@measured_by("network.bucket")
def bucket() -> None:
    """Count what a round costs the syncer's line, by islands: payloads direct, or by bucket.

    Real runs of 2 and of 16 islands on emulated networks (namespaces; needs root), with an S3
    server (moto) at the core; counters of the emulated line of the syncer's site. A run of 4 rounds
    less one of 1: bytes a round. A quarter of an hour or more on two cores.

    Read "ideal": a version to islands by bucket and once more in its frame, which is what is
    durable; "syncer sends": with direct payloads a version for each island, and their
    contributions in the frame; "of it acks": packets that only acknowledge what it receives, which
    are judged, too. The last versions must have the same digests.

    Example: diloco bench bucket --require
    """


@measured_by("syncer.state")
def state(rows: Rows = None) -> None:
    """Time what the close of a round costs more with run.state in an object store.

    Versions of several sizes are written to this disk, sent to an S3 server (moto, a process of its
    own, 30 ms away) as one object with a small one after it, and written as with run.state, in
    turn. Half a minute. Needs `diloco[state]`, and moto, flask and flask-cors.

    Read "ratio": a version with run.state over the disk and those two objects, which are two round
    trips, the way of the bytes and the server's time. Its bar is 1.1.

    Example: diloco bench state --require
    """


@measured_by("network.wan")
def wan(rows: Rows = None) -> None:
    """Measure how much of emulated long and lossy links the transport fills.

    Each link is made of network namespaces (root; see diloco emulate), checked against its
    specification, and then carries in turn what iperf3 sends in 8 streams and contributions of 16
    lanes through the product's own transport. Besides them: the in-process shaper against its
    specification, and what mTLS costs. About fifteen minutes; a busy machine makes checks miss.

    Read "figure": payload per second over that of the limit in the same minute on the same link;
    shaper: the largest error of a transfer's time; mtls-cpu: CPU of both ends over that of
    plaintext. "limit by" says what the limit is: iperf3, which must be installed, and of bursts,
    which it does not time, plain TCP. Rows of hivemind have a table of their own and no bar: their
    cap is about 4 MB in flight a stream. Rows heartbeat-* time heartbeats on 10 Mbit/s, 60 ms, that
    data saturates both ways, paced (transport.rate = 9.5 Mbit/s; these have bars) or not: "p99,
    RTTs": 99th percentile over the empty link's round trip, "idle": without data, "silence": the
    longest time in which the coordinator heard nothing. They take about four minutes more.

    Example: diloco bench wan --json wan.json
    """


@measured_by("network.allreduce")
def allreduce(rows: Rows = None, emulate: Emulate = False) -> None:
    """Time a flat ring and a hierarchical all-reduce of 64 MiB against their ideal.

    Two islands of two ranks on links of 100 Mbit/s 60 ms, 1 Gbit/s 20 ms and 1 Gbit/s 1 ms, shaped
    in the process, or emulated with the kernel's TCP (see diloco emulate). Some minutes, on a
    machine without other work: on 1 Gbit/s four processes want more than two CPUs.

    Read "ideal / took": 1 means that nothing but the link took time; "inside alone": reduce-scatter
    and all-gather inside an island, measured by themselves, which chunks hide under the link; a
    chunk of 64 MiB hides nothing.

    Example: diloco bench allreduce --json -
    """


@measured_by("training.plain")
def plain(rows: Rows = None) -> None:
    """Time the native trainer against plain PyTorch written straight.

    One rank, one thread, float32 on the CPU: a Llama of 0.9M and one of 26M parameters, fused
    AdamW, clipping, the same values to begin with and the same sequences, which lie ready in memory
    for the plain loop. Blocks of steps alternate. Some minutes.

    Read "native / plain": tokens/s of ours over those of the plain loop, the median over pairs of
    blocks, with the interval that holds the true one in 95 of 100 cases; "by CPU time": the same of
    CPU seconds, which other work on the machine does not widen; "losses differ by": of the first
    block, which shows that both compute the same.

    Example: diloco bench plain --require
    """


@measured_by("training.race")
def race(
    rows: Rows = None,
    quick: Annotated[bool, flag("One link, few steps; the loss has no bar.", "--quick")] = False,
    emulate: Emulate = False,
    plot: Annotated[str, plot_option("all figures")] = "",
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

    Example: diloco bench race --quick --plot race.png
    """


@measured_by("training.input_path")
def data(rows: Rows = None) -> None:
    """Measure what a rank's text costs: from the source to the rows that it takes.

    Text as bytes, text with a tokenizer, and token files prepared from the same text; islands of
    one, 8 and 64 ranks, of which each keeps its rows of 128 sequences of 2,048 tokens. In one
    thread, without the thread that makes batches ahead. A minute.

    Read "tokens/s a core": tokens of the island's batch, the rows of other ranks too, a CPU second;
    "plain copy": the same, where a rank's rows are copied from a mapped file and nothing else is
    done; "/copy": the first over the second. A rank tokenises its island's whole batch whatever it
    keeps; of token files it reads its own rows. The bar is for token files and 64 ranks.

    Example: diloco bench data --require
    """


@measured_by("training.device")
def device(rows: Rows = None) -> None:
    """Count what a training thread waits for its accelerator, without one.

    Real inner steps of a model of 0.1M parameters, on 1, 2 (FSDP2, TP) and 4 ranks over gloo, and
    the outer loop's part of the same thread, scheduled, decoupled and keeping what was trained
    since the send, lanes kept on the device and on the host, with a real coordinator and syncer.
    Tensors are labelled as the device's or the host's, and what would wait on CUDA counts. Two
    minutes. Rows are operations: step, idle (of the outer loop, nothing due), send, merge, both
    (after one inner step, where no island waits), exchange (other threads, all rounds), checkpoint,
    copy (of the inner state, in memory).

    Read "syncs": times at which the host asks for a value of the device; "sync copies": copies that
    block it; "late waits": figures of the step before, read once the next was launched; "/value":
    coded bytes of all ranks over the values of the fragment; "uncoded": float32 bytes likewise;
    "new/lane": the largest storage that was made after the first round, over the largest lane;
    "down/state": bytes over those of the state that is copied. Bars: 0 and 0; of a send, a merge
    and the exchange also 0.6 coded bytes a value each way, none uncoded where lanes are kept on the
    device, and of the first two nothing larger than a lane; of a checkpoint and a copy 1.001 of the
    state, and after the first one nothing larger than 0.01 of a lane.

    Example: diloco bench device --rows step --require
    """


@measured_by("training.gpu")
def gpu(rows: Rows = None) -> None:
    """Measure training and its outer loop on one CUDA device, each figure with its bar.

    In bfloat16, with compiled blocks where triton is there; coordinator and syncer run on the CPUs.
    `make gpu` runs it after the tests that need a device. A row that fails is a missed bar, and the
    others are measured. Bars are goals, not figures of a machine.

    Read "step": a Llama of 150M parameters, the native trainer over plain PyTorch that computes the
    same, in turns, and the share of the device's peak that each takes (MFU); "idle", "flight":
    blocks of its steps with an outer loop that has nothing to do, or four fragments in flight in
    int4, over the plain blocks next to them; "send", "merge": what one holds the training thread,
    of 125M values in one fragment, without waits for other islands; "codec": of 268M values;
    "checkpoint": the copy to host memory, of 8 GB of parameters and moments, or as much as finds
    room; "islands": diloco local with two islands on the device, and then with one that has the
    tokens of both: digests must be equal, and the loss below that of a guess among all bytes.

    Example: diloco bench gpu --rows step --rows send --require
    """


@measured_by("training.scaling")
def scaling(
    ranks: Annotated[str, option("Numbers of ranks besides one.", "N,N")] = "2,4",
    rows: Rows = None,
    emulate: Annotated[
        bool, flag("A namespace and a link for every rank (root).", "--emulate")
    ] = False,
) -> None:
    """Measure how an island's speed grows with its ranks, by strategy.

    Ranks of one thread on this machine, joined by gloo, train a byte model of 3.3M parameters on
    the same 2,048 tokens an inner step: fsdp, replicate, tp, pp (1F1B, two micro-batches a stage)
    and cp (ring) each take all ranks. A minute or two. They meet through the loopback; --emulate
    joins each to a switch by 1 Gbit/s, 0.4 ms round trip between two, measured before: as slow
    besides these ranks as a cluster's network next to its GPUs. What carries the packets takes CPU
    time, too.

    Read "x N": one rank's tokens/s times the ranks; "ideal": the same, times the CPUs where ranks
    share those, and no more than lets pass what the busiest rank moved ("MB/step", with --emulate)
    under the arithmetic; "efficiency": tokens/s over the ideal, which other work on the machine
    lowers. "exposed": share of the wall time in which a rank's training thread waited for others,
    its waits for a CPU not counted: collectives that nothing hides, and the bubbles of a pipeline;
    of more ranks than CPUs also others' waits for a CPU. "CPU": CPU time of a token over that of
    one rank, whatever else computes, so that 1 means that a strategy adds no work. "loss" differs
    by rounding only. There are no bars.

    Example: diloco bench scaling --json scaling.json
    """


def show_report(report: Report, json_target: str, *, require: bool) -> None:
    """Print tables and bars, write the JSON, and judge.

    Raises:
        typer.Exit: With code 1 if `require` and a bar was missed, or none could be judged.
    """
    console = output(json_target)
    for title, rows in report.tables.items():
        print_rows(console, report.columns, rows, title)
    for requirement in report.requirements:
        missed = "yellow" if requirement.is_stretch else "red"
        style = "green" if requirement.is_met else missed
        console.print(requirement.as_text(), style=style)
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
