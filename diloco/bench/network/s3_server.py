"""An S3 server of `moto`, a process of its own, and a line to it that delays every byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import CoordinatorUnavailable
from diloco.extras import require
from diloco.launch.process.children import last_words, spawn

#: The one bucket that there is.
BUCKET = "runs"
_KEYS = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_REGION": "us-east-1",
}
_START_S, _LOOK_S = 60.0, 0.05
_READ_BYTES = 1 << 18
_Join = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server with one bucket, empty when it started."""

    port: int
    process: subprocess.Popen[bytes]
    host: str = "127.0.0.1"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which a process reaches it."""
        return environment_at(self.port, self.host)


def environment_at(port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """Give the variables with which a process reaches the server behind a port."""
    return {**_KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}


def free_port() -> int:
    """Draw a port of this machine."""
    with socket.socket() as drawn:
        drawn.bind(("127.0.0.1", 0))
        return int(drawn.getsockname()[1])


@contextlib.contextmanager
def s3_server(log: Path, host: str = "127.0.0.1", bucket: str = BUCKET) -> Iterator[S3Server]:
    """Serve one empty bucket while the context lasts, at an address of this machine.

    Raises:
        ConfigError: If moto is not installed.
        CoordinatorUnavailable: If it does not start.
    """
    require("an S3 server of this machine", "moto")
    import boto3  # moto brings it; slow

    port = free_port()
    process = spawn([sys.executable, "-P", "-m", "moto.server", "-H", host, "-p", str(port)], log)
    server = S3Server(port, process, host)
    try:
        until = time.monotonic() + _START_S
        while not _is_up(host, port):
            if process.poll() is not None or time.monotonic() > until:
                raise CoordinatorUnavailable(f"moto's server did not start: {last_words(log)}")
            time.sleep(_LOOK_S)
        boto3.client(
            "s3",
            endpoint_url=server.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id=_KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=_KEYS["AWS_SECRET_ACCESS_KEY"],
            region_name=_KEYS["AWS_REGION"],
        ).create_bucket(Bucket=bucket)
        yield server
    finally:
        process.kill()
        process.wait()


def _is_up(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


@contextlib.contextmanager
def delayed(port: int, delay_s: float) -> Iterator[int]:
    """Serve a line to a port that delays every byte, each way; gives the port of this end."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        try:
            while piece := await reader.read(_READ_BYTES):
                loop.call_later(delay_s, writer.write, piece)
            await asyncio.sleep(delay_s)
        finally:
            writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):  # at the end
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    with serving(join) as here:
        yield here


@contextlib.contextmanager
def serving(join: _Join) -> Iterator[int]:
    """Answer connections to a port of this machine, in a thread; gives the port."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(join, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, name="line", daemon=True)
    thread.start()
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_all() -> None:
    """End whatever still runs in this loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
