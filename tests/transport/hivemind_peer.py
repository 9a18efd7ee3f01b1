"""A libp2p peer in a process of its own: `python -m tests.transport.hivemind_peer KEY PORT`.

Prints its address; holds every call for ever, and prints a line when it has one.
"""

import asyncio
import sys
from pathlib import Path

from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.libp2p.server import HivemindServer


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def hold(call: IncomingCall) -> Reply:
    say("holding")
    await asyncio.sleep(1e6)
    return Reply(b"")


async def echo(call: IncomingCall) -> Reply:
    return Reply(call.header, await call.read_payload())


async def main() -> None:
    key, port = sys.argv[1:]
    handlers = {"hold": hold, "echo": echo}
    server = HivemindServer(f"127.0.0.1:{port}", handlers, identity=Path(key))
    await server.start()
    say(server.address)
    await asyncio.sleep(1e6)


if __name__ == "__main__":
    asyncio.run(main())
