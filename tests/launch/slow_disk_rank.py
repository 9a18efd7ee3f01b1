"""A rank whose disk stands still in the middle of a checkpoint, until it is told to go on.

    python -m tests.launch.slow_disk_rank STEP GO_ON ...    then the arguments of a rank

Of the checkpoint of STEP the first piece is written; the next waits for the file GO_ON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diloco.checkpoint import checkpoint_writer
from diloco.launch.process.ending import exit_at_once
from diloco.launch.rank import main as rank
from diloco.transport.contracts import Buffer
from tests.waiting import wait_until


def main(step: int, go_on: Path, arguments: list[str]) -> int:
    real = checkpoint_writer.write_durably

    def write(path: Path, pieces: Iterable[Buffer], **options: Any) -> None:
        is_slow = f"step-{step:012d}" in str(path) and path.suffix == ".safetensors"
        real(path, slowed(pieces) if is_slow else pieces, **options)

    def slowed(pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        for number, piece in enumerate(pieces):
            if number == 2:  # the header and one lane are there
                wait_until(go_on.exists, 100)
            yield piece

    checkpoint_writer.write_durably = write
    return rank.main(arguments)


if __name__ == "__main__":
    exit_at_once(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
