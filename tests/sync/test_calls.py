"""A carrier's calls to a syncer that does not answer, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from diloco.errors import CoordinatorUnavailable
from diloco.sync.exchange import Exchange, ExchangeRules
from tests.virtual_run import Setting, grant
from transport.contracts import Buffer, Reply
from transport.errors import ConnectError
from transport.loopback import run_virtual
from transport.transfer import Transfer


class Silent:
    """A transport to nobody, and when it was asked."""

    peer = "nobody"

    def __init__(self) -> None:
        self.asked_at: list[float] = []

    async def call(
        self,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = 0,
        transfer: Transfer | None = None,
    ) -> Reply:
        self.asked_at.append(asyncio.get_running_loop().time())
        raise ConnectError("nobody listens", peer=self.peer, method=method)

    async def close(self) -> None:
        pass


class Longest(random.Random):
    """Draws the longest wait each time."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_waits_between_calls_are_those_of_the_rules(tmp_path: Path) -> None:
    setting = Setting({"w": [16.0]}, lambda *_: None, tmp_path, inner_steps=1)
    rules = ExchangeRules("float32", False, 60.0, 20.0, seed=0, first_wait_s=1.0, max_wait_s=4.0)
    silent = Silent()

    async def ask() -> float:
        exchange = Exchange(
            setting.plan(),
            {0: (0,)},
            control=silent,
            data=Silent(),
            grant=grant("a"),
            rules=rules,
            rng=Longest(0),
            on_event=lambda event: None,
        )
        began = asyncio.get_running_loop().time()
        exchange.enter({0: {}}, False)
        await exchange.wait_until_entered(60.0)
        assert isinstance(exchange.failure, CoordinatorUnavailable)
        assert "fragment.poll for 20 s" in str(exchange.failure)
        await exchange.stop()
        return began

    began = run_virtual(ask())

    # 1, 2, then 4 s at a time; a wait that would end at 20 s or later is not begun.
    assert [at - began for at in silent.asked_at] == [0, 1, 3, 7, 11, 15, 19]
