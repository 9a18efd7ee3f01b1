"""Options of `diloco plan`, by what they are of: the panels of its help page."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

_known = functools.partial(
    typer.Option, rich_help_panel="What is known of machines and links", show_default=False
)
_measure = functools.partial(typer.Option, rich_help_panel="Measure what is not known")
_syncers = functools.partial(
    typer.Option,
    rich_help_panel="Machine of the syncers: needing more than it has is refused",
    show_default=False,
)
_suggest = functools.partial(typer.Option, rich_help_panel="Suggest")

StepTimes = Annotated[
    list[str] | None,
    _known(
        metavar="[ISLAND=]TIME",
        help="Of an inner step: eu=0.8s, or 0.8s of all others; repeatable.",
    ),
]
Links = Annotated[
    list[str] | None,
    _known(
        metavar="[ISLAND=]PROFILE",
        help="Of configs/links, in place of transport.link; repeatable.",
    ),
]
Bandwidths = Annotated[
    list[str] | None,
    _known(
        metavar="[ISLAND=]RATE",
        help="Both ways, in place of the profile's: 200Mbit/s; repeatable.",
    ),
]
RoundTrips = Annotated[
    list[str] | None,
    _known(
        metavar="[ISLAND=]TIME",
        help="Round trip, in place of the profile's: 80ms; repeatable.",
    ),
]
SyncerLink = Annotated[
    str,
    _known(
        metavar="PROFILE",
        help="Line of the syncers' site, which islands share; left out: no bottleneck.",
    ),
]
TcpLoss = Annotated[
    float,
    _known(
        metavar="SHARE",
        help="Packets lost, which bound a connection of TCP (Mathis): 0.001; left out: no bound.",
    ),
]
TcpWindow = Annotated[
    str,
    _known(
        metavar="SIZE",
        help="Most that a connection has on its way: 4MiB; left out: no bound.",
    ),
]
Device = Annotated[
    str,
    _known(
        metavar="NAME",
        help="Whose peak an estimated step has: H100, A100, cpu ...; left out: H100 for "
        "islands.NAME.device = cuda, else cpu.",
    ),
]
Mfu = Annotated[
    float | None,
    _known(metavar="SHARE", help="Of an accelerator's peak which is reached; left out: 0.4."),
]
InsideBandwidth = Annotated[
    str,
    _known(
        metavar="RATE",
        help="Of a rank inside its island, for all-reduces; left out: no bottleneck.",
    ),
]
Measure = Annotated[
    bool,
    _measure("--measure", help="Time real inner steps here, of every island without --step-time."),
]
CoordinatorAddress = Annotated[
    str,
    _measure(
        "--coordinator",
        metavar="HOST:PORT",
        help="With --measure: time the round trip from here to there.",
    ),
]
Probe = Annotated[
    str,
    _measure(
        metavar="HOST:PORT",
        help="With --measure: time the rate from here to a receiver there, started as "
        'python -m diloco.bench.network.wan_end \'{"do": "receive", "kind": "grpc", "host": '
        '"0.0.0.0"}\'; it answers everybody, so stop it afterwards.',
    ),
]
SyncerCores = Annotated[int, _syncers(metavar="N", min=0, help="CPU cores; left out: any.")]
SyncerMemory = Annotated[str, _syncers(metavar="SIZE", help="Such as 64GiB.")]
SyncerDisk = Annotated[str, _syncers(metavar="SIZE", help="Such as 2TB.")]
SyncerNetwork = Annotated[str, _syncers(metavar="RATE", help="Such as 10Gbit/s.")]
Suggest = Annotated[
    bool,
    _suggest("--suggest", help="Search H, P, tau, codec and lanes for the earliest end."),
]
MaxLoss = Annotated[
    str, _suggest(metavar="PERCENT", help="Most that settings may cost of the loss.")
]
LabResults = Annotated[
    list[Path] | None,
    _suggest(
        metavar="RESULT.json",
        help="Losses of your own model, which go before others': a list points of h, m, "
        "codec, tau, loss; repeatable.",
    ),
]
Periods = Annotated[str, _suggest(metavar="H,H", help="Values to try; left out: a grid.")]
Fragments = Annotated[str, _suggest(metavar="P,P", help="Values to try.")]
Overlaps = Annotated[str, _suggest(metavar="TAU,TAU", help="Values to try.")]
Codecs = Annotated[str, _suggest(metavar="NAME,NAME", help="To try, both ways.")]
Lanes = Annotated[str, _suggest(metavar="N,N", help="Values to try.")]

#: Names of parameters that mean something with another option only.
OF_SUGGEST = (
    "max_loss",
    "lab",
    "inner_steps_per_round",
    "num_fragments",
    "overlap_steps",
    "codecs",
    "num_lanes",
)
OF_MEASURE = ("coordinator", "probe")
OF_SYNCERS = ("syncer_cores", "syncer_memory", "syncer_disk", "syncer_network")
