"""`diloco.connect`: the way from a run file to an open connection with its coordinator.

Source: PROTOCOL.md, "Join".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from diloco.checkpoint.run_checkpoints import RESUME, membership_of
from diloco.config.schema import Config
from diloco.coordinator.status import ask_run_state
from diloco.doctor.slow_tcp import slow_tcp
from diloco.errors import ConfigError, DilocoError
from diloco.extras import require
from diloco.faults.process import link_faults
from diloco.forecast.build import carrier_link, link_profile
from diloco.island.connection import Connection
from diloco.island.link_report import LinkSettings
from diloco.island.record import Record
from diloco.protocol.run.alarms import AlarmKind
from diloco.protos.control_pb2 import RunStateReply
from diloco.security.address import find_coordinator
from diloco.security.security import Security
from diloco.state_dir import StateDir, holder
from diloco.telemetry.events import AlarmRaised
from diloco.transport.addresses import is_loopback, split_address, split_candidates
from diloco.transport.calls.following import FollowingTransport
from diloco.transport.contracts import Transport
from diloco.transport.identity import Role
from diloco.transport.libp2p.address import is_peer_address
from diloco.transport.shaping.link import LinkProfile
from diloco.transport.shaping.shaped import ShapedTransport

logger = logging.getLogger(__name__)

#: Time over which the ranks of all islands spread their question where a syncer is.
_SPREAD_S = 1.0


def connect(config: Config, coordinator: str = "", *, record: Record | None = None) -> Connection:
    """Prepare this rank's connection with its run; nothing is sent before a `DiLoCo` joins.

    What the rank does goes to the sinks of the run file's [telemetry] meanwhile.

    Args:
        config: From `diloco.load_config(path, island=...)`: an island must be selected.
        coordinator: HOST:PORT of the coordinator, or several to be tried in order; empty:
            `coordinator.address` of the run file, or what `coordinator.state_dir` records where the
            coordinator runs on this machine, or over libp2p who proves to be it.
        record: In place of one of the run file's sinks, open for longer than the connection.

    Returns:
        To be used as a context manager: ``with diloco.connect(config) as connection:``.

    Raises:
        ConfigError: If no island is selected, or no address is known, or it is none, or the
            island's certificate cannot be used, or the run has finished here.
    """
    if not config.island_id:
        raise ConfigError(
            f"no island is selected: diloco.load_config(path, island=...) with one of "
            f"{', '.join(sorted(config.islands))}"
        )
    address = find_coordinator(config, coordinator)
    if record is None and _is_here(address):
        _check_not_over(config)
    security = Security.of(config, Role.ISLAND, config.island_id).knowing(address)
    wires = _Wires(config, address, security, link_profile(config))
    connection = Connection(config, wires, record)

    def announce(text: str) -> None:
        connection.on_event(AlarmRaised(AlarmKind.CERTIFICATE, text, config.island_id))

    if security.tls is not None:
        security.tls.on_failure = announce
    return connection


def _is_here(address: str) -> bool:
    """Whether a coordinator's address, or each of several, is of this machine alone."""
    with contextlib.suppress(ValueError):  # of a peer, or no address, which is refused later
        return all(is_loopback(split_address(each.strip())[0]) for each in address.split(","))
    return False


def _check_not_over(config: Config) -> None:
    """Say that a run is over, where its coordinator's directory is here and no coordinator runs.

    What has failed or is stopped may be resumed at any moment: a warning, and the loop waits for a
    coordinator.

    Raises:
        ConfigError: If the run has finished.
    """
    state = StateDir(Path(config.coordinator.state_dir))
    if not state.journal.exists() or holder(state.coordinator_lock) is not None:
        return
    membership = membership_of(config)
    if membership is None:
        return
    what, how = f"the run {config.run.name!r} in {state.root}", ""
    if membership.is_finished and not membership.members.away:
        raise ConfigError(
            f"{what} has finished, nothing is left to train: take its parameters (diloco export "
            f"{state.root}), or begin another run from them (run.warm_start)"
        )
    if membership.fatal_reason:
        how = f"failed: {membership.fatal_reason}"
    elif membership.is_stopped:
        how = f"is stopped {membership.stop_name}"
    if how:
        logger.warning(
            "%s %s. Resume it: %s; this loop waits for its coordinator for up to %g s",
            what, how, RESUME, config.transport.unreachable.seconds,
        )  # fmt: skip


def _link_settings(config: Config, profile: LinkProfile | None) -> LinkSettings:
    """Say what is known of the island's link: a simulated one, or the rate that it may take."""
    has_bucket = config.transport.payloads == "bucket"
    if profile is None:
        rate_bps = config.transport.rate.bps
        return LinkSettings(rate_bps, rate_bps, has_bucket=has_bucket)
    up, down = profile.up, profile.down
    delay_s = up.delay_s + down.delay_s
    return LinkSettings(up.bandwidth_bps, down.bandwidth_bps, delay_s, has_bucket)


class _Wires:
    """Connections of the run's kind; shaped to a syncer where `transport.link` has a profile."""

    def __init__(
        self, config: Config, address: str, security: Security, profile: LinkProfile | None
    ) -> None:
        self._config = config
        self._address = self._finding = address
        self._asking: asyncio.Task[RunStateReply] | None = None
        self.on_found: Callable[[Sequence[int]], None] = lambda syncers: None
        self._security = security
        self._profile = profile
        self.link = _link_settings(config, profile)
        self._faults = link_faults(os.environ, config.island_id, address)

    def coordinator(self) -> Transport:
        for text in slow_tcp(self._address):  # here, because the leader alone speaks to it
            logger.warning("%s", text)
        # Not shaped: it carries a few hundred bytes a second.
        address = self._faults.route(self._address)
        transport = self._security.transport(address, Role.COORDINATOR)
        return self._faults.around(transport, carries_fragments=False)

    def syncers(
        self, addresses: Sequence[str], *, island_rank: int, carriers: Collection[int]
    ) -> list[tuple[Transport, Transport]]:
        # All of them together have this rank's part of the island's rates and of its link.
        security = self._security.one_of(len(set(carriers)))
        link = None
        if self._profile is not None:
            link = carrier_link(self._profile, carriers).states(self._seed(island_rank))

        def opening(channels: int) -> Callable[[str], Transport]:
            def open_at(address: str) -> Transport:
                transport = security.transport(
                    self._faults.route(address), Role.SYNCER, channels=channels
                )
                transport = self._faults.around(transport, carries_fragments=True)
                return transport if link is None else ShapedTransport(transport, *link)

            return open_at

        control, data = opening(1), opening(self._config.transport.num_channels)
        around = self._payloads_around(security)
        return [
            (
                FollowingTransport(address, control, functools.partial(self._find, n)),
                around(FollowingTransport(address, data, functools.partial(self._find, n))),
            )
            for n, address in enumerate(addresses)
        ]

    def _payloads_around(self, security: Security) -> Callable[[Transport], Transport]:
        """Put what carries payloads around a way to a syncer."""
        chosen = self._config.transport
        if chosen.payloads == "direct":
            return lambda transport: transport
        require('transport.payloads = "bucket"', "httpx", "leave it out")
        from diloco.transport.bucket.client import ObjectTransport

        def around(transport: Transport) -> Transport:
            try:
                return ObjectTransport(transport, pacer=security.pacer, insecure=chosen.insecure)
            except (ImportError, OSError, ValueError) as error:  # of what the environment says
                raise ConfigError(
                    f'transport.payloads = "bucket": no client of the object store can be made: '
                    f"{error}. See to HTTPS_PROXY, HTTP_PROXY, ALL_PROXY (for SOCKS: pip install "
                    f"'httpx[socks]') and SSL_CERT_FILE in the environment"
                ) from error

        return around

    async def _find(self, syncer_id: int) -> str:
        """Find out where a syncer is now: on another machine perhaps."""
        return (await self._asked()).syncer_addresses[syncer_id]

    async def look(self) -> None:
        await self._asked()

    async def _asked(self) -> RunStateReply:
        """Ask the coordinator once for all syncers and connections of this rank."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> RunStateReply:
        """Ask the coordinator where the syncers are; ranks that ask at once do so one by one."""
        await asyncio.sleep(random.uniform(0.0, _SPREAD_S))
        asked = self._finding
        transport = self._security.transport(asked, Role.COORDINATOR)
        try:
            known = await ask_run_state(transport, self._config.island_id)
        except DilocoError:
            if self._finding == asked and not is_peer_address(asked):  # another one first
                first, *others = split_candidates(asked)
                self._finding = ",".join([*others, first])
            raise
        finally:
            await transport.close()
        self.on_found(known.fragment_syncers)
        return known

    def _seed(self, island_rank: int) -> int:
        name = f"{self._config.run.seed}/{self._config.island_id}/{island_rank}"
        return random.Random(name).getrandbits(64)
