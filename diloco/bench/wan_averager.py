"""hivemind's own averager between two peers, for comparison: `... wan_averager ORDER`.

Takes the orders of `wan_end`, kind "averager". A burst is one averaging step of two peers, float16:
each sends half of its vector and half of the mean, so as many bytes leave it as its coded vector
has; looking for the other peer (matchmaking) is a part of the step. It forks, so it is a program of
its own; nothing of the product uses it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import threading
import time
from typing import Any

import torch

_PREFIX = "diloco-bench"
_STEP_S = 120.0
_MATCHMAKING_S = 1.0
_BYTES_PER_VALUE = 2

Order = dict[str, Any]  # JSON values


def main(order: Order) -> None:
    """Do what an order says."""
    hivemind = importlib.import_module("hivemind")
    initial = [order["address"]] if order["do"] == "send" else []
    dht = hivemind.DHT(
        initial_peers=initial, host_maddrs=[f"/ip4/{order['host']}/tcp/0"], start=True
    )
    numel = order["burst_bytes"] // _BYTES_PER_VALUE
    averager = hivemind.DecentralizedAverager(
        [torch.ones(numel)],
        dht,
        prefix=_PREFIX,
        target_group_size=2,
        min_group_size=2,
        min_matchmaking_time=_MATCHMAKING_S,
        request_timeout=_MATCHMAKING_S / 2,
        compression=importlib.import_module("hivemind.compression").Float16Compression(),
        start=True,
    )
    try:
        if order["do"] == "receive":
            _tell({"address": str(dht.get_visible_maddrs()[0])})
            threading.Thread(target=_average_forever, args=(averager,), daemon=True).start()
            sys.stdin.read()
        else:
            _tell({"seconds": [_step(averager) for _ in range(order["bursts"])]})
    finally:
        averager.shutdown()
        dht.shutdown()


def _average_forever(averager: Any) -> None:
    while True:
        # A step fails whenever the other peer ends; the next one may have its successor.
        with contextlib.suppress(Exception):
            averager.step(timeout=_STEP_S)


def _step(averager: Any) -> float:
    began = time.monotonic()
    if averager.step(timeout=_STEP_S) is None:
        raise RuntimeError("hivemind's averager found no group")
    return time.monotonic() - began


def _tell(message: Order) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
