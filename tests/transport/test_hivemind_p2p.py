"""What hivemind's own client of the daemon lacks, for which `libp2p.daemon` is not replaced by it.

Whichever of these fails one day is a reason less.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from diloco.extras import is_installed

pytestmark = [
    pytest.mark.skipif(not is_installed("hivemind"), reason="hivemind is not installed"),
    pytest.mark.timeout(120),
]

#: In a process of its own: the import changes the one that does it.
_FACTS = """
import asyncio, json, os, signal, sys, tempfile
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

NOBODY = "12D3KooWN5P2Q2iiazQx4nT1YLy7dtk141rSerXCWfCod4awDsn9"

def make(**options):
    return P2P.create(nat_port_map=False, auto_nat=False, **options)

async def ends(work, within_s):
    try:
        await asyncio.wait_for(work, within_s)
    except TimeoutError:
        return False
    except Exception:
        pass
    return True

async def main():
    facts = {"imports torch": "torch" in sys.modules}
    try:
        await make(initial_peers=[f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"])
    except P2PDaemonError:
        facts["starts only while an initial peer answers"] = True
    p2p = await make()
    child = p2p._child
    facts["Ctrl-C ends the daemon, too"] = os.getpgid(child.pid) == os.getpgid(0)
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    facts["does not know that its daemon died"] = p2p.is_alive
    call = p2p._client.call_unary_handler(PeerID.from_base58(NOBODY), "method", b"")
    facts["a call through a dead daemon waits"] = not await ends(call, 2.0)
    await p2p.shutdown()
    p2p = await make()
    os.kill(p2p._child.pid, signal.SIGSTOP)
    await asyncio.sleep(0.5)  # a thread that has not stopped yet would take the SIGTERM
    facts["does not end a daemon that hangs"] = not await ends(p2p.shutdown(), 6.0)
    os.kill(p2p._child.pid, signal.SIGKILL)
    await p2p._child.wait()
    print(json.dumps(facts))

with tempfile.TemporaryDirectory() as sockets:
    P2P._UNIX_SOCKET_PREFIX = f"/unix{sockets}/"
    asyncio.run(main())
"""


def test_a_daemon_that_dies_or_hangs_is_not_noticed_and_a_start_needs_a_living_peer() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FACTS],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout.splitlines()[-1])
    assert len(facts) == 6 and all(facts.values()), facts
