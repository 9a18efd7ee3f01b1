"""One end of an exchange of the codecs' byte vectors, as a process of its own; argument ORDER.

ORDER is JSON: {"do": "serve" or "call", "transport", "device", "certs", "key", "address",
"result"}. The caller encodes the values with every codec on its device and sends them; the server
decodes what it receives, encodes the values itself, and sends that back. The server prints
{"address": ...} and lives until its standard input ends; the caller writes into the file `result`,
for every codec, what the server had and what came back, or what the codec's error says.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from diloco.compression.base import from_bytes, to_bytes
from diloco.compression.registry import get_codec
from diloco.conformance.codecs import KEY, NUMEL, ByteVector, byte_vectors, values
from diloco.errors import CodecError
from diloco.security.security import Security
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import TransportError
from diloco.transport.identity import Identity, Role
from diloco.transport.libp2p.daemon import Swarm

_METHOD = "conformance.codec"
_DEADLINE_S = 30.0
#: Larger than every payload.
_MOST_BYTES = 8 * NUMEL

Order = dict[str, Any]  # JSON values


def main(order: Order) -> None:
    """Be the end that an order says."""
    torch.set_num_threads(1)
    asyncio.run(_serve(order) if order["do"] == "serve" else _call(order))


def _security(order: Order, role: Role, island: str = "") -> Security:
    if order["transport"] == "hivemind":
        return Security(insecure=True, swarm=Swarm(), key=Path(order["key"]))
    if order["certs"]:
        return Security.open(Identity("", role, island), certs=order["certs"])
    return Security(insecure=True)


async def _serve(order: Order) -> None:
    async def answer(call: IncomingCall) -> Reply:
        codec = get_codec(call.header.decode())
        received = from_bytes(await call.read_payload()).to(order["device"])
        found = ByteVector.of(received, codec.decode(received, NUMEL))
        own = codec.encode(values().to(order["device"]), KEY)
        return Reply(json.dumps(asdict(found)).encode(), to_bytes(own.cpu()))

    server = _security(order, Role.SYNCER).server("127.0.0.1:0", {_METHOD: answer}, limits=Limits())
    await server.start()
    sys.stdout.write(json.dumps({"address": server.address}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.0)


async def _call(order: Order) -> None:
    security = _security(order, Role.ISLAND, "a")
    transport = security.transport(order["address"], Role.SYNCER, channels=0)
    found: Order = {}
    try:
        for name in byte_vectors():
            codec = get_codec(name)
            try:
                payload = codec.encode(values().to(order["device"]), KEY)
                reply = await transport.call(
                    _METHOD,
                    name.encode(),
                    to_bytes(payload.cpu()),
                    deadline_s=_DEADLINE_S,
                    max_reply_bytes=_MOST_BYTES,
                )
                returned = from_bytes(reply.payload).to(order["device"])
                returned_vector = ByteVector.of(returned, codec.decode(returned, NUMEL))
            except (CodecError, TransportError) as error:
                found[name] = f"{type(error).__name__}: {error}"
                continue
            found[name] = [json.loads(reply.header), asdict(returned_vector)]
    finally:
        await transport.close()
    Path(order["result"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
