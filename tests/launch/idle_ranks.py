"""`diloco island` with ranks that train nothing: each holds its events open and waits for its end.

    python idle_ranks.py island ...    `diloco island ...`, which starts the next in place of ranks
    python idle_ranks.py ...           with the arguments of a rank

Real ranks import torch for seconds, and a supervisor sees of either that it lives or how it ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.cli.main import main
from diloco.launch import ranks
from diloco.launch.process.ending import end_with_starter

_RANK = ["-m", "diloco.launch.rank"]
_spawn = ranks.spawn


def spawn_idle(command: Sequence[str], *rest: Any, **named: Any) -> Any:
    """Start one of ours where a rank is to be started."""
    program, *words = command
    assert words[:2] == _RANK, f"{words}: a supervisor starts ranks by another name"
    return _spawn([program, __file__, *words[2:]], *rest, **named)


def idle(arguments: Sequence[str]) -> None:
    """Be a rank at work until a signal, or the death of the supervisor, ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--island")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--supervised", action="store_true")
    options, _ = parser.parse_known_args(arguments)
    assert options.supervised
    end_with_starter()
    with open(options.output / f"events-{options.island}-{os.environ['RANK']}.jsonl", "a"):
        sys.stdout.write("at work\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "island":
        ranks.spawn = spawn_idle
        main()
    else:
        idle(sys.argv[1:])
