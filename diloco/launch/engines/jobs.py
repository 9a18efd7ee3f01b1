"""What an engine must know of a run to start it, from its run file. Pure.

A run has one job for the coordinator, which starts its syncers, and one for each island. Syncers
with tables of their own ([syncers.NAME]) have none yet: they are started by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.transport.addresses import is_loopback, split_address, split_candidates

COORDINATOR = "coordinator"
#: Where the hosts of an island of several meet; each island has a port of its own.
MEETING_PORT = 29400
#: Ranks of a host with accelerators, where nothing is said.
_USUAL_PER_HOST = 8
_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
#: Of a pod: RUN-ISLAND-INDEX, with a number of five digits.
_LONGEST_NAME = 57


@dataclass(frozen=True, slots=True)
class IslandJob:
    """One island.

    Attributes:
        name: Of the island.
        num_hosts: Hosts it is spread over.
        ranks_per_host: Ranks of each; as many accelerators, if it has them.
        has_devices: Whether it asks for accelerators: its device is cuda.
        threads: Of a rank.
        meeting_port: Port at which its hosts meet.
    """

    name: str
    num_hosts: int
    ranks_per_host: int
    has_devices: bool
    threads: int
    meeting_port: int

    @property
    def devices(self) -> int:
        """Accelerators of each host."""
        return self.ranks_per_host if self.has_devices else 0

    @property
    def cpus(self) -> int:
        """CPUs of each host; eight for an accelerator: its rank, its codec and readers of text."""
        return self.ranks_per_host * (8 if self.has_devices else self.threads)


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a run.

    Attributes:
        config: Of the run.
        run_file: Its path, as jobs are to type it.
        directory: Where the files go, as commands are to name it.
        coordinator: HOST:PORT as islands reach it; perhaps several.
        ports: At which the coordinator and its syncers listen.
        islands: In the order of the run file.
        overrides: KEY=VALUE that every command is given.
    """

    config: Config
    run_file: str
    directory: str
    coordinator: str
    ports: tuple[int, ...]
    islands: tuple[IslandJob, ...]
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        config: Config,
        run_file: str,
        directory: str,
        *,
        ranks_per_host: Mapping[str, int],
        overrides: Sequence[str] = (),
    ) -> Jobs:
        """Read off a run's configuration what its jobs are.

        Args:
            config: Of the run.
            run_file: As above.
            directory: As above.
            ranks_per_host: By island, "" for all others; left out: 8 where the device is cuda, or
                the largest number below that divides the ranks; all ranks of CPUs on one host.
            overrides: As above; `config` has them already.

        Raises:
            ConfigError: If jobs on other machines could not find the coordinator, or an island
                cannot be spread like this.
        """
        at = config.coordinator
        if config.transport.kind != "grpc":
            raise ConfigError(
                f'transport.kind = "{config.transport.kind}": the address of the coordinator is '
                f"known only after its start; start its jobs by hand, or set transport.kind to grpc"
            )
        if not at.address:
            raise ConfigError(
                "coordinator.address is not set, and islands are other jobs, mostly on other "
                "machines: set it to HOST:PORT as they reach it, coordinator.listen to "
                '"0.0.0.0:PORT" and coordinator.syncer_listen to "0.0.0.0:PORT+1" (or --set each)'
            )
        hosts = [split_address(each)[0] for each in split_candidates(at.address)]
        for key in ("listen",) if config.syncers else ("listen", "syncer_listen"):
            host, port = split_address(getattr(at, key))
            if port == 0 or (is_loopback(host) and not all(map(is_loopback, hosts))):
                raise ConfigError(
                    f'coordinator.{key} = "{getattr(at, key)}", and islands reach the coordinator '
                    f'at {at.address}: give a fixed port of every address, such as "0.0.0.0:4711"'
                )
        if COORDINATOR in config.islands:
            raise ConfigError(f"islands.{COORDINATOR}: another job has that name; rename it")
        unknown = sorted({*ranks_per_host} - {"", *config.islands})
        if unknown:
            raise ConfigError(
                f"--ranks-per-host {unknown[0]}={ranks_per_host[unknown[0]]}: not in the run file; "
                f"islands: {', '.join(sorted(config.islands))}"
            )
        first = split_address(at.syncer_listen)[1]
        number = len(config.own_syncers)
        ports = (split_address(at.listen)[1], *range(first, first + number))
        islands = tuple(
            _island(config, name, index, ranks_per_host.get(name, ranks_per_host.get("", 0)))
            for index, name in enumerate(config.islands)
        )
        return cls(config, run_file, directory, at.address, ports, islands, tuple(overrides))

    @property
    def name(self) -> str:
        """Of the run."""
        return self.config.run.name

    @property
    def host(self) -> str:
        """Host of the coordinator, the first one of several."""
        return split_address(split_candidates(self.coordinator)[0])[0]

    @property
    def port(self) -> int:
        """Port of the coordinator, as islands reach it."""
        return split_address(split_candidates(self.coordinator)[0])[1]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all jobs."""
        return (COORDINATOR, *(island.name for island in self.islands))

    def check_is_protected(self, engine: str) -> None:
        """Require certificates, and names that are parts of host names.

        Raises:
            ConfigError: Saying what to type.
        """
        if not self.config.transport.certs:
            said = "transport.insecure = true" if self.config.transport.insecure else "no certs"
            raise ConfigError(
                f"{engine}: {said}, and between its machines nothing protects the traffic: "
                f"diloco certs init {self.run_file} --dir certs, then in the run file "
                f'transport.certs = "certs" in place of transport.insecure'
            )
        for name in (self.name, *(f"{self.name}-{island.name}" for island in self.islands)):
            if not _DNS_NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
                raise ConfigError(
                    f"{engine} would call something {name!r}: give the run and its islands names "
                    f"of small letters, digits and '-', together at most {_LONGEST_NAME} characters"
                )


def read_settings(option: str, texts: Sequence[str], jobs: Jobs) -> dict[str, dict[str, str]]:
    """Read `[JOB:]KEY=VALUE`, repeated: the settings of each job by name; later ones win.

    Args:
        option: Name of the option, for the error.
        texts: What was typed; one without a job is for all. `KEY` alone is `KEY=`.
        jobs: Of the run.

    Raises:
        ConfigError: If a job or a key is none.
    """
    found: dict[str, dict[str, str]] = {name: {} for name in jobs.names}
    for text in sorted(texts, key=lambda each: ":" in each.partition("=")[0]):  # own ones win
        key, _, value = text.partition("=")
        job, _, key = key.rpartition(":")
        if (job and job not in found) or not re.fullmatch(r"[A-Za-z][A-Za-z_-]*", key):
            raise ConfigError(
                f"{option} {text}: write KEY=VALUE, or JOB:KEY=VALUE; jobs: {', '.join(found)}"
            )
        if any(not character.isprintable() for character in value):
            raise ConfigError(f"{option} {text!r}: give a value of one line")
        for name in [job] if job else found:
            found[name][key] = value
    return found


def read_value(text: str) -> Any:
    """Read a value of a setting as JSON, and as a text where it is none; hence `Any`."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _island(config: Config, name: str, index: int, per_host: int) -> IslandJob:
    island = config.islands[name]
    has_devices = island.device == "cuda"
    if not per_host:
        most = min(_USUAL_PER_HOST, island.ranks) if has_devices else island.ranks
        per_host = next(n for n in range(most, 0, -1) if island.ranks % n == 0)
    if island.ranks % per_host:
        raise ConfigError(
            f"--ranks-per-host {name}={per_host}: islands.{name}.ranks = {island.ranks}, which "
            f"must be a multiple of it"
        )
    return IslandJob(
        name=name,
        num_hosts=island.ranks // per_host,
        ranks_per_host=per_host,
        has_devices=has_devices,
        threads=island.threads,
        meeting_port=MEETING_PORT + index,
    )
