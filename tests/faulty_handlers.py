"""Faults on arrival: the handlers of a server whose calls meet a script of faults."""

from __future__ import annotations

from collections.abc import Callable

from diloco.transport.contracts import Buffer, Handler, Handlers, IncomingCall, Reply
from diloco.transport.identity import Identity
from diloco.transport.shaping.faulty import Fault, Faults

_Tamper = Callable[[Buffer], Buffer]


def faulty_handlers(handlers: Handlers, faults: Faults) -> Handlers:
    """Give the handlers of a server whose calls meet faults on arrival; for any `Server`.

    Raises:
        ValueError: If the script has RESET, which a handler cannot do to its connection.
    """
    if faults.script.rates.get(Fault.RESET):
        raise ValueError(f"{Fault.RESET} is for the callers' end: FaultyTransport")
    return {method: _faulty(handlers[method], faults) for method in handlers}


def _faulty(handler: Handler, faults: Faults) -> Handler:
    async def handle(call: IncomingCall) -> Reply:
        kept = _KeptCall(call)

        async def attempt(tamper: _Tamper) -> Reply:
            return await handler(kept.again(tamper))

        return await faults.play(call.method, call.payload_bytes, attempt, peer=call.peer)

    return handle


class _KeptCall:
    """A call whose payload can be read again, each time through another function."""

    def __init__(self, call: IncomingCall, tamper: _Tamper = bytes) -> None:
        self._call = call
        self._tamper = tamper
        self._payload: list[Buffer] = []

    def again(self, tamper: _Tamper) -> _KeptCall:
        copy = _KeptCall(self._call, tamper)
        copy._payload = self._payload
        return copy

    @property
    def method(self) -> str:
        return self._call.method

    @property
    def header(self) -> bytes:
        return self._call.header

    @property
    def has_asked(self) -> bool:
        return self._call.has_asked

    @property
    def payload_bytes(self) -> int:
        return self._call.payload_bytes

    @property
    def peer(self) -> str:
        return self._call.peer

    @property
    def caller(self) -> Identity | None:
        return self._call.caller

    @property
    def is_local(self) -> bool:
        return self._call.is_local

    async def read_payload(self) -> Buffer:
        if not self._payload:
            self._payload.append(await self._call.read_payload())
        return self._tamper(self._payload[0])
