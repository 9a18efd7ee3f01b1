"""What an engine must know of a run to start it, from its run file. Pure.

A run has one job for the coordinator, one for each island, and one for each syncer with a table of
its own ([syncers.NAME]); other syncers are started by the coordinator.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.forecast.forecast import forecast_syncers
from diloco.transport.addresses import is_loopback, is_wildcard, split_address, split_candidates

COORDINATOR = "coordinator"
#: Where the hosts of an island of several meet; each island has a port of its own.
MEETING_PORT = 29400
#: Of a Service, and of a cluster of SkyPilot.
_DNS_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
#: Over what is foreseen; for an interpreter and its libraries; for a journal and for logs.
_MARGIN, _GIB_OF_A_PROCESS, _GIB_OF_LOGS = 1.2, 2, 10
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
    def stem(self) -> str:
        """Of its files, and of its certificate's."""
        return f"island-{self.name}"

    certificate = stem

    @property
    def devices(self) -> int:
        """Accelerators of each host."""
        return self.ranks_per_host if self.has_devices else 0

    @property
    def cpus(self) -> int:
        """CPUs of each host; eight for an accelerator: its rank, its codec and readers of text."""
        return self.ranks_per_host * (8 if self.has_devices else self.threads)


@dataclass(frozen=True, slots=True)
class ServerJob:
    """The coordinator with the syncers that it starts, or a syncer on a machine of its own.

    Attributes:
        name: "coordinator", or "syncer-NAME".
        syncer: NAME; empty: it is the coordinator.
        key: Of the run file, where its address is.
        address: HOST:PORT as islands reach it; perhaps several.
        ports: At which it listens.
        memory_gib: Of its host, as `diloco plan` foresees it; 0: it is not known.
        disk_gib: Of its state, likewise.
    """

    name: str
    syncer: str
    key: str
    address: str
    ports: tuple[int, ...]
    memory_gib: int = 0
    disk_gib: int = 0

    #: Of its certificate's file: syncers are trusted as the coordinator is, and issue theirs by it.
    certificate = COORDINATOR

    @property
    def stem(self) -> str:
        """Of its files."""
        return self.name

    @property
    def cpus(self) -> int:
        """Two for each process; a syncer on a machine of its own has a supervisor there."""
        return 2 * (len(self.ports) + bool(self.syncer))

    @property
    def host(self) -> str:
        """Its host, the first one of several."""
        return split_address(split_candidates(self.address)[0])[0]

    @property
    def port(self) -> int:
        """Its first port, as islands reach it."""
        return split_address(split_candidates(self.address)[0])[1] or self.ports[0]


Job: TypeAlias = ServerJob | IslandJob


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a run.

    Attributes:
        config: Of the run.
        run_file: Its path, as jobs are to type it.
        directory: Where the files go, as commands are to name it.
        servers: The coordinator, then syncers on machines of their own.
        islands: In the order of the run file.
        overrides: KEY=VALUE that every command is given.
    """

    config: Config
    run_file: str
    directory: str
    servers: tuple[ServerJob, ...]
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
            ranks_per_host: By island.
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
                '"0.0.0.0:PORT"'
                + ("" if config.syncers else ', coordinator.syncer_listen to "0.0.0.0:PORT+1"')
                + " (or --set each)"
            )
        hosts = [split_address(each)[0] for each in split_candidates(at.address)]
        listening = {f"syncers.{name}.listen": each.listen for name, each in config.syncers.items()}
        listening = listening or {"coordinator.syncer_listen": at.syncer_listen}
        for key, listen in {"coordinator.listen": at.listen, **listening}.items():
            host, port = split_address(listen)
            if port == 0 or (is_loopback(host) and not all(map(is_loopback, hosts))):
                raise ConfigError(
                    f'{key} = "{listen}", and islands reach the coordinator at {at.address}: give '
                    f'a fixed port of every address, such as "0.0.0.0:4711"'
                )
        first, number = split_address(at.syncer_listen)[1], len(config.own_syncers)
        ports = (split_address(at.listen)[1], *range(first, first + number))
        servers = (
            ServerJob(COORDINATOR, "", "coordinator.address", at.address, ports),
            *(_syncer(config, name) for name in config.syncers),
        )
        servers = _with_needs(config, servers)
        at_address: dict[tuple[str, int], ServerJob] = {}
        for each in servers:
            if each.name in config.islands:
                raise ConfigError(f"islands.{each.name}: another job has that name; rename it")
            if (other := at_address.setdefault((each.host, each.port), each)) is not each:
                raise ConfigError(
                    f'{each.key} = "{each.address}" is that of {other.name}, too: give each job an '
                    f"address of its own"
                )
        islands = tuple(
            _island(config, name, index, ranks_per_host[name])
            for index, name in enumerate(config.islands)
        )
        for text in (run_file, directory, *overrides):
            if not text.isprintable():
                raise ConfigError(f"{text!r} becomes part of scripts: give a text of one line")
        return cls(config, run_file, directory, servers, islands, tuple(overrides))

    @property
    def name(self) -> str:
        """Of the run."""
        return self.config.run.name

    @property
    def coordinator(self) -> str:
        """HOST:PORT of the coordinator, as islands reach it; perhaps several."""
        return self.servers[0].address

    @property
    def each(self) -> tuple[Job, ...]:
        """All of them."""
        return (*self.servers, *self.islands)

    def chosen(self, names: Sequence[str]) -> list[Job]:
        """Give the jobs of these names, each once; none is named: all.

        Raises:
            ConfigError: If one is none.
        """
        by_name = {job.name: job for job in self.each}
        for name in names:
            if name not in by_name:
                raise ConfigError(f"--only {name}: no such job; jobs: {', '.join(by_name)}")
        return [by_name[name] for name in dict.fromkeys(names or by_name)]

    @property
    def extras(self) -> str:
        """Extras of the package that its machines install, separated by commas."""
        at, found = self.config.telemetry, self.config
        needed = {
            "data": found.data.sources,
            "prometheus": at.coordinator_metrics or at.syncer_metrics,
            "state": found.run.state,
        }
        return ",".join(["hf", *(extra for extra, why in needed.items() if why)])

    def certificates(self, job: Job) -> tuple[str, ...]:
        """Give the files of a job's certificates; none: the run has none."""
        certs = self.config.transport.certs
        return tuple(f"{certs}/{name}.pem" for name in ("ca", job.certificate) if certs)

    def certificates_made_by(self, lacking: Sequence[str] = ()) -> str:
        """Give the commands that make certificates: all, or of a CA that is here what is lacking.

        Args:
            lacking: Files of certificates; none: all.
        """
        certs = self.config.transport.certs or "certs"
        into = f"--dir {shlex.quote(certs)}"
        if not lacking or f"{certs}/ca.pem" in lacking:
            return f"diloco certs init {shlex.quote(self.run_file)} {into}"
        names = [path[len(certs) + 1 :].removesuffix(".pem") for path in lacking]
        return "; ".join(
            f"diloco certs issue {name.replace('island-', 'island/', 1)} {into}" for name in names
        )

    def check_is_protected(self, engine: str) -> None:
        """Require certificates, a state that all machines reach, and names for hosts.

        Raises:
            ConfigError: Saying what to type.
        """
        if not self.config.transport.certs:
            said = "transport.insecure = true" if self.config.transport.insecure else "no certs"
            raise ConfigError(
                f"{engine}: {said}, and between its machines nothing protects the traffic: "
                f"{self.certificates_made_by()}, then in the run file "
                f'transport.certs = "certs" in place of transport.insecure'
            )
        if self.config.transport.tokens:
            raise ConfigError(
                f'{engine}: transport.tokens = "{self.config.transport.tokens}": tokens are '
                f"brought to no machine; leave it out, certificates say the same"
            )
        if self.config.run.state.startswith("file:"):
            raise ConfigError(
                f'{engine}: run.state = "{self.config.run.state}": its machines have no such '
                f"directory in common; give a bucket, s3://BUCKET/PREFIX"
                + ("" if self.config.syncers else ", or leave it out")
            )
        for name in (self.name, *(f"{self.name}-{job.name}" for job in self.each)):
            if not _DNS_NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
                raise ConfigError(
                    f"{engine} would call something {name!r}: give the run, its islands and "
                    f"syncers names of small letters, digits and '-', a letter first, no '-' last, "
                    f"together at most {_LONGEST_NAME} characters"
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
    found: dict[str, dict[str, str]] = {job.name: {} for job in jobs.each}
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


def read_values(settings: Mapping[str, str]) -> dict[str, Any]:
    """Read values of settings as JSON, and as texts where they are none; hence `Any`.

    Raises:
        ConfigError: If one begins as an object or an array, and is none.
    """
    found: dict[str, Any] = {}
    for key, text in settings.items():
        try:
            found[key] = json.loads(text)
        except ValueError as error:
            if text.startswith(("{", "[")):
                raise ConfigError(f"{key}={text}: is no JSON ({error}); correct it") from error
            found[key] = text
    return found


def _syncer(config: Config, name: str) -> ServerJob:
    table, key = config.syncers[name], f"syncers.{name}.address"
    host, port = split_address(table.listen)
    if is_wildcard(host) and not table.address:
        raise ConfigError(
            f'{key} is not set, and syncers.{name}.listen = "{table.listen}" tells islands none: '
            f'set it to "HOST:{port}" as they reach it'
        )
    return ServerJob(f"syncer-{name}", name, key, table.address or table.listen, (port,))


def _with_needs(config: Config, servers: Sequence[ServerJob]) -> tuple[ServerJob, ...]:
    """Add the memory and the disk that each takes by what its syncers take."""
    if config.model.family == "own":  # only its own loop knows its parameters
        return tuple(servers)
    each = forecast_syncers(config)

    def add(server: ServerJob) -> ServerJob:
        here = [server.name] if server.syncer else config.own_syncers
        held = [syncer for syncer in each if syncer.name in here]
        merged = sum(syncer.memory_bytes for syncer in held)
        stored = sum(syncer.store_bytes for syncer in held)
        return replace(
            server,
            memory_gib=_GIB_OF_A_PROCESS * (1 + len(held)) + math.ceil(_MARGIN * merged / 2**30),
            disk_gib=_GIB_OF_LOGS + math.ceil(_MARGIN * stored / 2**30),
        )

    return tuple(map(add, servers))


def _island(config: Config, name: str, index: int, per_host: int) -> IslandJob:
    island = config.islands[name]
    has_devices = island.device == "cuda"
    return IslandJob(
        name=name,
        num_hosts=island.ranks // per_host,
        ranks_per_host=per_host,
        has_devices=has_devices,
        threads=island.threads,
        meeting_port=MEETING_PORT + index,
    )
