"""One island of a golden trace, as a process with a loop of its own; argument ORDER.

ORDER is JSON: {"run_file", "island", "device", "trace", "result"}. Into the file `result` it
writes what the island had after every inner step, its last value, and the digests of what is
published.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import diloco
from diloco.conformance.golden import Descent, golden_traces


def main(order: dict[str, Any]) -> None:
    """Train an island as an order of JSON values says."""
    torch.set_num_threads(1)
    config = diloco.load_config(order["run_file"], island=order["island"])
    (trace,) = (each for each in golden_traces() if each.name == order["trace"])
    num_tokens = trace.tokens.get(order["island"], 1)
    training = Descent(order["island"], num_tokens, order["device"])
    with diloco.connect(config) as connection:
        outer = diloco.DiLoCo(training.parameters, config.outer, transport=connection)
        for inner_step in range(outer.start_step, outer.inner_steps):
            training.inner_step(inner_step)
            outer.step(num_tokens=num_tokens)
            training.record(outer)
        outer.finish()
        training.history.end = training.w.item()
        found = {"history": asdict(training.history), "digests": outer.digests}
        Path(order["result"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
