"""Finds a run's coordinator by the run's name, through libp2p's Kademlia DHT.

    entry      under a hash of the run's name: identities of peers that say they are its coordinator
    question   name of the asker's token (32) | nonce (32)
    answer     proof of (run, identity of the peer that answers, nonce) under that token (32)

Anyone can enter itself, so an entry alone proves nothing. A coordinator has the digests of all
tokens of its run (`security.tokens`) and proves that. A stranger that passes the question on gets
a proof of the other peer's identity, and libp2p has proven already whose identity it has itself. No
token is sent to anyone before.

The DHT is that of the daemons, which `hivemind-dht` serves too. `hivemind.DHT` is not used: its
records are signed by a key that nothing binds to the run, and it forks a process that has threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Collection

from diloco.transport.errors import ConnectError, TransportError
from diloco.transport.libp2p.address import PeerAddress
from diloco.transport.libp2p.daemon import Daemon, DaemonFailed, Swarm
from diloco.transport.security.tokens import digest_of, name_of, proof_of

_log = logging.getLogger(__name__)

#: Streams on which a coordinator proves that it is one.
PROTOCOL = "/diloco/rendezvous/1"
NONCE_BYTES = 32
NAME_BYTES = PROOF_BYTES = hashlib.sha256().digest_size
#: A CID of version 1, raw, of a sha256.
_CID = b"\x01\x55\x12\x20"
#: Peers that are asked; a stranger that enters more keeps the coordinator from being found.
_MOST_PEERS = 64
_ANSWER_S = 10.0
_LOOK_S = 2.0
_QUESTIONS, _QUESTION_S = 4, 0.5


def entry_of(run: str) -> bytes:
    """Give the key of a run's entry in the DHT, a CID."""
    return _CID + hashlib.sha256(b"diloco run " + run.encode()).digest()


def statement_of(run: str, peer_id: str, nonce: bytes) -> bytes:
    """Give what is proven: that this peer coordinates this run, to the asker of now."""
    return b"\0".join((b"diloco coordinator", run.encode(), peer_id.encode(), nonce))


async def find_by_name(run: str, token: str, swarm: Swarm, *, wait_s: float) -> str:
    """Find the coordinator of a run; returns its address, ``/p2p/IDENTITY``.

    Args:
        run: Its name.
        token: Of the asker, whose digest the coordinator has.
        swarm: Through whom it is found.
        wait_s: Seconds for which it is looked for; it may not have been started yet.

    Raises:
        TransportError: If nobody proves in time that it is the coordinator.
        HivemindMissing: If hivemind is not installed.
    """
    seen: set[str] = set()
    try:
        async with asyncio.timeout(wait_s):
            is_told = False
            while not (found := await _look(run, digest_of(token), swarm, seen)):
                if not is_told:
                    _log.warning("found no coordinator of run=%s; looking for %g s", run, wait_s)
                is_told = True
                await asyncio.sleep(_LOOK_S)
    except DaemonFailed as error:
        raise TransportError(str(error)) from error
    except TimeoutError:
        raise ConnectError(
            f"no coordinator of the run {run!r} was found within {wait_s:g} s: {len(seen)} peers "
            f"are entered under its name, and none proves that it knows this site's token"
        ) from None
    return str(PeerAddress(found, ()))


async def _look(run: str, digest: str, swarm: Swarm, seen: set[str]) -> str:
    """Look once, by a daemon that has not given any peer up; adds who did not prove it to `seen`.

    Raises:
        DaemonFailed: If the daemon does not start.
    """
    daemon = await Daemon.start(swarm)
    try:
        peers: set[str] = set()
        for _ in range(_QUESTIONS):  # it knows nobody for a moment after it has met an initial peer
            await daemon.meet_any()
            try:
                if peers := await daemon.providers(entry_of(run), _MOST_PEERS):
                    break
            except DaemonFailed as error:
                _log.debug("no entry of run=%s: %s", run, error)
            await asyncio.sleep(_QUESTION_S)
        found = await _first_proven(daemon, peers, run, digest)
        for peer_id in () if found else peers - seen:
            _log.warning(
                "peer=%s is entered as coordinator of run=%s and has not proven it", peer_id, run
            )
        seen |= peers
        return found
    finally:
        await daemon.stop()


async def _first_proven(daemon: Daemon, peers: Collection[str], run: str, digest: str) -> str:
    """Ask all of them; returns the first that proves that it is the coordinator, else nothing."""
    asking = [asyncio.create_task(_proves(daemon, peer, run, digest)) for peer in peers]
    try:
        for answer in asyncio.as_completed(asking):
            if peer_id := await answer:
                return peer_id
        return ""
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _proves(daemon: Daemon, peer_id: str, run: str, digest: str) -> str:
    """Ask a peer; returns it if it is the coordinator, else nothing."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    expected = proof_of(digest, statement_of(run, peer_id, nonce))
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer, _ = await daemon.open(PeerAddress(peer_id, ()), PROTOCOL)
            try:
                writer.write(name_of(digest) + nonce)
                answer = await reader.readexactly(PROOF_BYTES)
            finally:
                writer.transport.abort()
    except (DaemonFailed, OSError, EOFError, TimeoutError) as error:
        _log.debug("no proof of peer=%s: %r", peer_id, error)
        return ""
    return peer_id if hmac.compare_digest(answer, expected) else ""
