"""An S3 server of `moto` in a process of its own, and the environment with which it is reached."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import wait_until

BUCKET = "runs"


@dataclass(frozen=True)
class S3Server:
    """A server with one empty bucket."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }


def free_port() -> int:
    with socket.socket() as drawn:
        drawn.bind(("127.0.0.1", 0))
        return int(drawn.getsockname()[1])


@contextlib.contextmanager
def s3_server(log: Path) -> Iterator[S3Server]:
    """Serve one bucket while the context lasts."""
    import boto3  # slow

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd="/")
    server = S3Server(port, process)

    def is_up() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    try:
        wait_until(is_up, 60.0)
        client = boto3.client(
            "s3",
            endpoint_url=server.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="id",
            aws_secret_access_key="not-a-secret",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def environment_of(server: S3Server) -> Iterator[None]:
    """Have this process reach a server, too."""
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
