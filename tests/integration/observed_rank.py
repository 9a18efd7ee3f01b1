"""A rank that writes down which inner optimizer it took from another island, then trains on."""

from __future__ import annotations

import os
import sys
from typing import Any

from safetensors.torch import save_file

from diloco.inner.state import moments
from diloco.launch.ending import exit_at_once
from diloco.launch.healing import Healing
from diloco.launch.rank import main
from diloco.rounds.donation import Manifest

_take = Healing.take_


def _observed(self: Healing, model: Any, optimizer: Any) -> Manifest:
    taken = _take(self, model, optimizer)
    tensors = {
        f"{moment} {name}": values
        for moment, of_moment in moments(model, optimizer).items()
        for name, values in of_moment.items()
    }
    save_file(tensors, os.environ["TAKEN"])
    return taken


if __name__ == "__main__":
    Healing.take_ = _observed  # type: ignore[method-assign]
    exit_at_once(main(sys.argv[1:]))
