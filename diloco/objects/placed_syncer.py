"""Who writes the store of a syncer on a machine of its own: the machine that opened its chain last.

Its sign of life keeps others from taking its place while it works; that one process writes at a
time is held by the chain alone.

Source: PROTOCOL.md, "Syncers on machines of their own".
"""

from __future__ import annotations

import json

from diloco.objects.lease import Holder, is_of_store
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectStore
from diloco.state_dir import StateDir


class PlacedSyncer:
    """One syncer's place in the object store of a run, as its machine sees it."""

    def __init__(self, store: ObjectStore, state: StateDir) -> None:
        """Assign only."""
        self._store = store
        self._alive = f"alive/{state.syncer_name}"
        self._replica = Replica(store, state.syncer_name, state.store, is_of_store)
        self._num_beats = 0

    def holder(self) -> Holder | None:
        """Look which machine has its store; None: none ever had it.

        Raises:
            ObjectLost: If objects were removed.
            StoreAway: If the store does not say.
        """
        opened = self._replica.read().opened
        if not opened:
            return None
        beat = self._store.get(self._alive)
        return Holder(opened["lease"], opened["holder"], opened["host"], beat)

    def beat(self, holder: str, address: str, *, is_over: bool = False) -> None:
        """Say that this machine's syncer lives, or that it has ended.

        Raises:
            StoreAway: If the store does not answer.
        """
        self._num_beats += 1
        said = {"beat": [holder, self._num_beats], "address": address, "is_over": is_over}
        self._store.put(self._alive, json.dumps(said).encode(), probes=True)
