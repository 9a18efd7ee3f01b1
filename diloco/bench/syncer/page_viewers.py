"""Viewers of a page, as a process: each holds the live stream of a view open and reads it.

`python -m diloco.bench.syncer.page_viewers URL NUMBER` says "looking" once each has had its first
event, and with the end of standard input what came from then on, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from urllib.parse import urlsplit

from diloco.page.rendering import VIEWS

_MOST_LINE_BYTES = 64 << 20


class _Viewers:
    def __init__(self) -> None:
        self.events = self.sent = 0

    async def look(self, place: str, view: str, has_begun: asyncio.Event) -> None:
        """Read one stream for as long as this process lasts."""
        host, _, port = place.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=_MOST_LINE_BYTES)
        writer.write(f"GET /run/0/{view}/live HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
        while line := await reader.readline():
            self.sent += len(line)
            if line.startswith(b"data: "):
                self.events += 1
                has_begun.set()
        sys.exit(f"the stream of {view} has ended")


async def _main(url: str, number: int) -> None:
    viewers, views = _Viewers(), list(VIEWS)
    begun = [asyncio.Event() for _ in range(number)]
    async with asyncio.TaskGroup() as looking:
        tasks = [
            looking.create_task(viewers.look(urlsplit(url).netloc, views[n % len(views)], each))
            for n, each in enumerate(begun)
        ]
        await asyncio.gather(*(each.wait() for each in begun))
        viewers.events = viewers.sent = 0
        print("looking", flush=True)  # noqa: T201  # to the bench that started it
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps({"events": viewers.events, "sent": viewers.sent}))  # noqa: T201
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2])))
