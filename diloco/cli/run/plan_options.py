"""Options of `diloco plan`, by what they are of: the panels of its help page."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

from diloco.cli.terminal.options import flag, option

_known = functools.partial(
    option, rich_help_panel="What is known of machines and links", show_default=False
)
_MEASURE, _SUGGEST = "Measure what is not known", "Suggest"
_measure = functools.partial(option, rich_help_panel=_MEASURE)
_syncers = functools.partial(
    option,
    rich_help_panel="Machine of the syncers: needing more than it has is refused",
    show_default=False,
)
_suggest = functools.partial(option, rich_help_panel=_SUGGEST)

StepTimes = Annotated[
    list[str] | None,
    _known("Of an inner step: eu=0.8s, or 0.8s of all others; repeatable.", "[ISLAND=]TIME"),
]
Links = Annotated[
    list[str] | None,
    _known("Of configs/links, in place of transport.link; repeatable.", "[ISLAND=]PROFILE"),
]
Bandwidths = Annotated[
    list[str] | None,
    _known("Both ways, in place of the profile's: 200Mbit/s; repeatable.", "[ISLAND=]RATE"),
]
RoundTrips = Annotated[
    list[str] | None,
    _known("Round trip, in place of the profile's: 80ms; repeatable.", "[ISLAND=]TIME"),
]
SyncerLink = Annotated[
    str,
    _known("Line of the syncers' site, which islands share; left out: no bottleneck.", "PROFILE"),
]
TcpLoss = Annotated[
    float,
    _known(
        "Packets lost, which bound a connection of TCP (Mathis): 0.001; left out: no bound.",
        "SHARE",
    ),
]
TcpWindow = Annotated[
    str, _known("Most that a connection has on its way: 4MiB; left out: no bound.", "SIZE")
]
RanksPerHost = Annotated[
    list[str] | None,
    _known(
        "Ranks of a host; repeatable; left out: 8 with device cuda, all ranks on CPUs.",
        "[ISLAND=]N",
        "--ranks-per-host",
    ),
]
Device = Annotated[
    str,
    _known(
        "Whose peak an estimated step has: H100, A100, cpu ...; left out: H100 for "
        "islands.NAME.device = cuda, else cpu.",
        "NAME",
    ),
]
Mfu = Annotated[
    float | None, _known("Of an accelerator's peak which is reached; left out: 0.4.", "SHARE")
]
InsideBandwidth = Annotated[
    str, _known("Of a rank inside its island, for all-reduces; left out: no bottleneck.", "RATE")
]
Measure = Annotated[
    bool,
    flag(
        "Time real inner steps here, of every island without --step-time.",
        "--measure",
        rich_help_panel=_MEASURE,
    ),
]
CoordinatorAddress = Annotated[
    str,
    _measure(
        "With --measure: time the round trip from here to there.", "HOST:PORT", "--coordinator"
    ),
]
Probe = Annotated[
    str,
    _measure(
        "With --measure: time the rate from here to a receiver there, started as "
        'python -m diloco.bench.network.wan_end \'{"do": "receive", "kind": "grpc", "host": '
        '"0.0.0.0"}\'; it answers everybody, so stop it afterwards.',
        "HOST:PORT",
    ),
]
SyncerCores = Annotated[
    int,
    _syncers(
        "CPU cores, on which lanes merge side by side; left out: one thread, any.", "N", min=0
    ),
]
SyncerMemory = Annotated[str, _syncers("Such as 64GiB.", "SIZE")]
SyncerDisk = Annotated[str, _syncers("Such as 2TB.", "SIZE")]
SyncerNetwork = Annotated[str, _syncers("Such as 10Gbit/s.", "RATE")]
SyncerDiskRate = Annotated[str, _syncers("It writes, such as 8Gbit/s; left out: 9.7.", "RATE")]
Suggest = Annotated[
    bool,
    flag(
        "Search H, P, tau, codec and lanes for the earliest end.",
        "--suggest",
        rich_help_panel=_SUGGEST,
    ),
]
MaxLoss = Annotated[str, _suggest("Most that settings may cost of the loss.", "PERCENT")]
LabResults = Annotated[
    list[Path] | None,
    _suggest(
        "Losses of your own model, which go before others': a list points of h, m, "
        "codec, tau, loss; repeatable.",
        "RESULT.json",
    ),
]
Periods = Annotated[str, _suggest("Values to try; left out: a grid.", "H,H")]
Fragments = Annotated[str, _suggest("Values to try.", "P,P")]
Overlaps = Annotated[str, _suggest("Values to try.", "TAU,TAU")]
Codecs = Annotated[str, _suggest("To try, both ways.", "NAME,NAME")]
Lanes = Annotated[str, _suggest("Values to try.", "N,N")]

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
OF_SYNCERS = (
    "syncer_cores",
    "syncer_memory",
    "syncer_disk",
    "syncer_network",
    "syncer_disk_rate",
)
