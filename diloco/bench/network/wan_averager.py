"""hivemind's own averager between two peers, for comparison: `... wan_averager ORDER`.

Takes the orders of `wan_end`, kind "averager", and their "compression". A burst is one averaging
step of two peers: each sends half of its vector and half of the mean, so as many bytes leave it as
its coded vector has; looking for the other peer (matchmaking) is a part of the step. It forks, so
it is a program of its own; nothing of the product uses it.

A step may give a group and leave values as they were, with no more than a warning: its 8-bit codecs
do under numpy 2. So they are refused, the two peers have different values before each step, and the
mean is insisted on after it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import sys
import threading
import time
from typing import Any

import torch

from diloco.errors import ConfigError, IslandFailed

_PREFIX = "diloco-bench"
_STEP_S = 120.0
_MATCHMAKING_S = 1.0
#: Name in an order -> class in hivemind, bytes a value.
_COMPRESSIONS = {"none": ("NoCompression", 4), "float16": ("Float16Compression", 2)}
#: Values before a step; they, their mean and its difference to each are float16, too.
_VALUES = {"receive": 1.0, "send": 3.0}
_MEAN = 2.0

Order = dict[str, Any]  # JSON values


def main(order: Order) -> None:
    """Do what an order says.

    Raises:
        ConfigError: If it asks for a compression that is not known to average.
        IslandFailed: If a step finds no group, or leaves another value than the mean.
    """
    if order["compression"] not in _COMPRESSIONS:
        raise ConfigError(
            f"hivemind's averager with compression {order['compression']!r} is not measured: its "
            f"lossy codecs give a group and average nothing under numpy 2; "
            f"use one of {', '.join(_COMPRESSIONS)}"
        )
    compression, bytes_per_value = _COMPRESSIONS[order["compression"]]
    multiprocessing.set_start_method("fork")  # hivemind's objects cannot be spawned
    hivemind = importlib.import_module("hivemind")
    initial = [order["address"]] if order["do"] == "send" else []
    dht = hivemind.DHT(
        initial_peers=initial, host_maddrs=[f"/ip4/{order['host']}/tcp/0"], start=True
    )
    averager = hivemind.DecentralizedAverager(
        [torch.zeros(order["burst_bytes"] // bytes_per_value)],
        dht,
        prefix=_PREFIX,
        target_group_size=2,
        min_group_size=2,
        min_matchmaking_time=_MATCHMAKING_S,
        request_timeout=_MATCHMAKING_S / 2,
        compression=getattr(importlib.import_module("hivemind.compression"), compression)(),
        start=True,
    )
    try:
        if order["do"] == "receive":
            _send({"address": str(dht.get_visible_maddrs()[0])})
            threading.Thread(target=_average_forever, args=(averager,), daemon=True).start()
            sys.stdin.read()
        else:
            _send({"seconds": [step(averager, _VALUES["send"]) for _ in range(order["bursts"])]})
    finally:
        averager.shutdown()
        dht.shutdown()


def _average_forever(averager: Any) -> None:
    while True:
        # A step fails whenever the other peer ends; the next one may have its successor. Half of
        # the other peer's mean comes from here, so it notices what goes wrong here.
        with contextlib.suppress(Exception):
            step(averager, _VALUES["receive"])


def step(averager: Any, value: float) -> float:
    """Average `value` with the other peer's; returns the seconds that the step took.

    Raises:
        IslandFailed: If there is no group, or the values are not the mean afterwards.
    """
    with averager.get_tensors() as (values,):
        values.fill_(value)
    began = time.monotonic()
    group = averager.step(timeout=_STEP_S)
    seconds = time.monotonic() - began
    if group is None:
        raise IslandFailed("hivemind's averager found no group")
    with averager.get_tensors() as (values,):
        least, most = values.min().item(), values.max().item()
    if not least == most == _MEAN:
        raise IslandFailed(
            f"hivemind's averager gave a group of {len(group)}, and values of {least:g} to "
            f"{most:g} where the mean is {_MEAN:g}: it averaged nothing, or not all"
        )
    return seconds


def _send(message: Order) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
