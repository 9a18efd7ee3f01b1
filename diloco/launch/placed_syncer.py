"""Runs a syncer of a run on a machine of its own: `diloco syncer RUN.toml --name NAME`.

What it needs of the run it reads from the run's object store: the secret, the timeline, the policy,
where the coordinator listens. It keeps one process alive, as the coordinator does with syncers next
to itself (`syncer_supervisor`); that process reports to the coordinator, and ends with the run.
Another machine takes its place with the same command, and fences it.

Source: PROTOCOL.md, "Syncers on machines of their own".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from diloco.config.classes import fingerprint, policy_json
from diloco.config.load import load_config, resolved_toml, with_settings
from diloco.config.schema import Config
from diloco.durable import DiskFull, write_durably, write_json
from diloco.errors import ConfigError, Fenced
from diloco.launch.process.ending import first_of, note_signals_async
from diloco.launch.syncer_supervisor import SyncerSupervisor
from diloco.objects.lease import (
    BEAT_S,
    RunFiles,
    RunState,
    follows_path,
    lease_path,
    own_name,
    until_nobody,
)
from diloco.objects.placed_syncer import PlacedSyncer
from diloco.security.address import find_coordinator
from diloco.state_dir import (
    Endpoint,
    Held,
    StateDir,
    hold,
    make_directory,
    stop_syncer,
)

#: Between two looks who coordinates the run.
_FOLLOW_S = 10.0


async def run_placed_syncer(
    config: Config,
    name: str,
    coordinator: str,
    announce: Callable[[str], None],
    *,
    is_standby: bool = False,
) -> int:
    """Serve as one of the run's syncers until the run ends, or a signal comes.

    Args:
        config: The run, as this machine's file has it.
        name: Of a table of [syncers].
        coordinator: HOST:PORT of the coordinator; empty: as the file says, else as the object store
            says, which may be an address of the coordinator's machine alone.
        announce: Called with what is found, for people.
        is_standby: Whether to wait for the end of a machine that serves as this syncer.

    Returns:
        Exit code: 0 when the run has ended or was stopped, 128 + the signal's number when one ended
        this, else that of what cannot be helped by another start.

    Raises:
        ConfigError: If the file has no such table or is of another run, or if another machine
            serves as this syncer.
        Fenced: If another machine has taken its place.
    """
    if name not in config.syncers:
        there = ", ".join(sorted(config.syncers)) or "none: the coordinator starts its syncers"
        raise ConfigError(f"--name {name}: the run file has no [syncers.{name}]; it has {there}")
    state = StateDir(Path(config.coordinator.state_dir).absolute())
    state = state.placed(name, sorted(config.syncers).index(name))
    make_directory(state.root, "coordinator.state_dir")
    state.create([state.syncer_name])
    try:
        with hold(state.coordinator_lock):
            return await _Here(config, name, coordinator, state, announce).serve(is_standby)
    except Held as error:
        raise ConfigError(f"this machine serves as syncer {name} already: {error}") from error


class _Over(Exception):
    """The coordinator has ended in good order: nobody is to be served."""


class _Here:
    """One syncer's place on this machine, whose lock the caller holds."""

    def __init__(
        self,
        config: Config,
        name: str,
        coordinator: str,
        state: StateDir,
        announce: Callable[[str], None],
    ) -> None:
        self._config, self._name = config, name
        self._given = coordinator or config.coordinator.address
        if self._given:
            find_coordinator(config, self._given)  # refuses what is no address
        self._state, self._announce = state, announce
        url, run = config.run.state, config.run.name
        self._run = RunState(url, run, fingerprint(config), state, lambda error: None)
        self._place = PlacedSyncer(self._run.store, state)
        self._own = own_name(state)
        self._num_starts = 0
        self._lease = -1
        self._last_words = ""

    async def serve(self, is_standby: bool) -> int:
        """Wait until nobody else serves, then do so until the end; returns the exit code."""
        signals = note_signals_async()
        serving = asyncio.ensure_future(self._serve(is_standby))
        try:
            await first_of(asyncio.shield(serving), signals.asked.wait())
        finally:
            if not serving.done():
                serving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await serving
                await asyncio.to_thread(stop_syncer, self._state)
        if serving.cancelled():
            self._announce(
                f"syncer {self._name} stops; rounds of its fragments wait until it is started "
                f"again: diloco syncer RUN.toml --name {self._name}, here or on any machine"
            )
        code = signals.exit_code if serving.cancelled() else serving.result()
        if self._num_starts:
            with contextlib.suppress(DiskFull):  # the next one waits a little
                await asyncio.to_thread(self._place.beat, self._own, "", is_over=True)
        return code

    async def _serve(self, is_standby: bool) -> int:
        await self._wait(is_standby)
        supervisor = SyncerSupervisor(
            self._state,
            on_hopeless=lambda reason, code: self._announce(reason),
            before_start=self._before_start,
            last_codes=(0, Fenced.exit_code),
        )
        code = 0

        async def supervise() -> None:
            nonlocal code
            code = await supervisor.run()

        try:
            await first_of(supervise(), self._follow())
        except _Over:
            await asyncio.to_thread(stop_syncer, self._state)
        if code == Fenced.exit_code:
            raise self._fenced("another machine")
        if code == 0:
            self._announce(
                f"syncer {self._name} is done: the coordinator has ended the run, or stopped. Once "
                f"it goes on: diloco syncer RUN.toml --name {self._name}"
            )
        return code

    def _fenced(self, who: str) -> Fenced:
        return Fenced(
            f"{who} serves as syncer {self._name} now or, as the coordinator, has taken this one "
            f"for lost and given its fragments to others (diloco move): this machine ends. To have "
            f"it serve again: diloco syncer RUN.toml --name {self._name}"
        )

    async def _wait(self, is_standby: bool) -> None:
        """Wait until there is a run, and nobody else serves as this syncer."""
        url = self._run.store.url
        in_use = (
            f"run.state = {url}: syncer {self._name} is {{}}, which is at work. Stop that, or wait "
            f"for its end: diloco syncer RUN.toml --name {self._name} --standby"
        )
        while True:
            try:
                found = await asyncio.to_thread(self._run.files)
                if (
                    found is not None
                    and {"resolved.toml", "secret"} <= found.contents.keys()
                    and (self._given or found.address)
                ):
                    before = await until_nobody(
                        self._place.holder,
                        self._own,
                        f"syncer {self._name}",
                        in_use="" if is_standby else in_use,
                        announce=self._announce,
                    )
                    write_json(follows_path(self._state), [before and before.holder])
                    return
                self._say_waiting(f"no coordinator has begun the run in {url}, or listens yet")
            except DiskFull as error:
                self._say_waiting(f"{error.lack}; {error.remedy}: {error}")
            await asyncio.sleep(BEAT_S)

    def _say_waiting(self, why: str) -> None:
        if (words := f"waiting: {why}") != self._last_words:
            self._last_words = words
            self._announce(words)

    async def _before_start(self) -> None:
        """Write for the process what it reads, once it can be: the run as it stands now.

        Raises:
            Fenced: If another machine has taken this one's place.
            _Over: If the coordinator has ended since the first start.
        """
        while True:
            try:
                found = await asyncio.to_thread(self._run.files)
                holder = await asyncio.to_thread(self._place.holder)
                assert found is not None, "its first entry is never removed"
                if self._num_starts and holder is not None and holder.holder != self._own:
                    raise self._fenced(holder.name)
                if self._num_starts and found.is_over:
                    raise _Over
                make_directory(self._state.root, "coordinator.state_dir")  # it may be gone
                self._state.create([self._state.syncer_name])
                self._write(found)
                self._num_starts += 1
                return
            except DiskFull as error:  # the process could read or write nothing either
                self._say_waiting(f"{error.lack}; {error.remedy}: {error}")
                await asyncio.sleep(BEAT_S)

    async def _follow(self) -> None:
        """Have the process find the coordinator that takes the run over.

        Raises:
            _Over: If the last one has ended, and the process has not been told: one that was
                adopted, say, and started again because nobody knew how it had ended.
        """
        was_over = False
        while True:
            await asyncio.sleep(_FOLLOW_S)
            try:
                found = await asyncio.to_thread(self._run.newest)
                if found.lease > self._lease and found.address:
                    self._point_to(found.lease, found.address)
            except DiskFull:  # the process says so
                continue
            if found.is_over and was_over:
                raise _Over
            was_over = found.is_over

    def _point_to(self, lease: int, address: str) -> None:
        """Write for the process where the coordinator is."""
        write_json(lease_path(self._state), lease)
        address = find_coordinator(self._config, self._given or address)
        Endpoint(address, 0).write(self._state.coordinator)
        self._lease = lease
        words = f"syncer {self._name} goes to the coordinator at {address}; its log: "
        if (words := f"{words}{self._state.syncer_log}") != self._last_words:
            self._last_words = words
            self._announce(words)

    def _write(self, found: RunFiles) -> None:
        state = self._state
        there = state.root / "coordinator.toml"
        write_durably(there, [found.contents["resolved.toml"]])
        of_run = load_config(there)
        if of_run.syncer_shares.keys() != self._config.syncer_shares.keys():
            raise ConfigError(
                f"[syncers]: {', '.join(sorted(self._config.syncers))} here, and "
                f"{', '.join(sorted(of_run.syncers)) or 'none'} at the coordinator: give both the "
                f"same tables"
            )
        config = with_settings(self._config, policy_json(of_run))
        own = {"coordinator": config.coordinator.model_copy(update={"state_dir": str(state.root)})}
        write_durably(state.resolved, [resolved_toml(config.model_copy(update=own)).encode()])
        write_durably(state.secret, [found.contents["secret"]], mode=0o600)
        if "timeline.json" in found.contents:
            write_durably(state.timeline, [found.contents["timeline.json"]])
        if "policy.json" in found.contents:
            write_durably(state.policy, [found.contents["policy.json"]])
        self._point_to(found.lease, found.address)
