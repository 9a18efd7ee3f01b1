"""A rank that writes down which inner optimizer it took from another island, then trains on."""

from __future__ import annotations

import os
import sys
from typing import Any

from safetensors.torch import save_file

from diloco.checkpoint.state_transfer import StateReceiver
from diloco.launch.process.ending import exit_at_once
from diloco.launch.rank.main import main
from diloco.protocol.rounds.transfer_manifest import TransferManifest
from diloco.trainer.state import moments

_take = StateReceiver.take_


def _observed(self: StateReceiver, model: Any, optimizer: Any) -> TransferManifest:
    taken = _take(self, model, optimizer)
    tensors = {
        f"{moment} {name}": values
        for moment, of_moment in moments(model, optimizer).items()
        for name, values in of_moment.items()
    }
    save_file(tensors, os.environ["TAKEN"])
    return taken


if __name__ == "__main__":
    StateReceiver.take_ = _observed  # type: ignore[method-assign]
    exit_at_once(main(sys.argv[1:]))
