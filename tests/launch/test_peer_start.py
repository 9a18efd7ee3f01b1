"""A start of an island's peer that fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import functools
import random
import socket
import threading
from pathlib import Path

import pytest

from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.launch.rank import peer
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protos.control_pb2 import Grant, JoinReply
from diloco.security.address import listen
from diloco.security.security import Security
from diloco.state_dir import StateDir, holder
from diloco.transport.calls.loopback import LoopbackNetwork
from diloco.transport.identity import Role
from tests.run_files import write_run


def test_a_peer_that_cannot_listen_lets_go_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "listen", functools.partial(listen, busy_s=0.1))
    plan = make_plan([TensorSpec("w", (8,))], num_fragments=1)
    closed: list[str] = []

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        at = f"islands.east.peer_listen=127.0.0.1:{busy.getsockname()[1]}"
        run_file = write_run(tmp_path, {"east": "", "west": ""})
        config = load_config(run_file, ("outer.exchange=allreduce", at), island="east")

        async def start() -> None:
            network = LoopbackNetwork()
            decider = network.connect("decider")

            async def close() -> None:
                closed.append("decider")

            monkeypatch.setattr(decider, "close", close)
            await peer.start_peer(
                config,
                plan,
                JoinReply(grant=Grant(run="test", island="east", incarnation=1)),
                security=Security.of(config, Role.ISLAND, "east"),
                decider=decider,
                connect=network.connect,
                rng=random.Random(0),
                complete_checkpoints=lambda: None,
            )

        with pytest.raises(ConfigError, match="cannot listen"):
            asyncio.run(start())

    state = StateDir(Path(config.coordinator.state_dir)).peer("east")
    assert holder(state.store_lock) is None
    assert not [thread.name for thread in threading.enumerate() if "tensors" in thread.name]
    assert "decider" in closed
