"""What `diloco init` knows of a run that is to be, and the values that follow from it. Pure.

Names and hosts end up in shell scripts, so characters with a meaning there are refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from diloco.errors import ConfigError
from diloco.launch.engines.jobs import MEETING_PORT
from diloco.launch.engines.templates import bare_host
from diloco.transport.addresses import is_loopback, split_address

Launcher: TypeAlias = Literal["ssh", "systemd", "slurm", "kubernetes"]
Preset: TypeAlias = Literal["streaming", "decoupled"]

#: The coordinator's port where none is said; its syncer has the next one.
PORT = 4711
_MOST_STEPS_APART = 480
_SHORTEST, _SHARE = 24, 0.5
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9][A-Za-z0-9.-]*")


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Values of a run that fit a model: a start, which `diloco plan` and a trial improve.

    Large models have fragments of three layers, as in Streaming DiLoCo (arXiv 2501.18512), and
    lanes of about 40M parameters: a syncer holds whole fragments, a carrier whole lanes. Rates are
    Muon's: five times AdamW's usual ones for the small ones, as `diloco lab suite from-scratch`
    measured them, above 2.5 times, as in MuLoCo (arXiv 2505.23725).
    """

    sequence_length: int
    lr: float
    micro_batches: int
    num_fragments: int = 4
    num_lanes: int = 16


_DEFAULTS = {
    "tiny": ModelDefaults(32, 1e-2, 1, 2),
    "debug": ModelDefaults(128, 1e-2, 1),
    "10M": ModelDefaults(512, 2.5e-3, 1),
    "150M": ModelDefaults(1024, 1e-3, 2),
    "1B": ModelDefaults(1024, 1e-3, 4),
    "llama3-8B": ModelDefaults(2048, 7.5e-4, 8, 10),
    "llama3-70B": ModelDefaults(2048, 3.8e-4, 8, 26, 64),
    "llama3-405B": ModelDefaults(2048, 2e-4, 8, 42, 256),
}
#: Of a model of transformers, whose weights the run begins with, under AdamW.
_TUNED = ModelDefaults(1024, 1e-5, 4)


@dataclass(frozen=True, slots=True)
class Site:
    """One island.

    Attributes:
        name: Of the island.
        hosts: Where it runs, the first one first; none: this machine.
        devices: Accelerators of each host; 0: it computes on CPUs.
        threads: Of a rank.
    """

    name: str
    hosts: tuple[str, ...] = ()
    devices: int = 0
    threads: int = 1

    @property
    def num_hosts(self) -> int:
        """Hosts, this machine being one."""
        return max(1, len(self.hosts))

    @property
    def ranks_per_host(self) -> int:
        """Ranks of a host: one for each accelerator, or one."""
        return max(1, self.devices)

    @property
    def ranks(self) -> int:
        """Ranks of the island."""
        return self.num_hosts * self.ranks_per_host


@dataclass(frozen=True, slots=True)
class Answers:
    """Everything that the files of a run are made from.

    Attributes:
        name: Of the run.
        sites: Islands.
        coordinator: HOST:PORT as islands reach it; empty: all is on this machine.
        model: A preset, or a directory or hub name of transformers.
        data: Paths or globs, or `hub:OWNER/NAME`; none: the built-in text.
        tokenizer: Of them; empty: bytes, or the model's own.
        inner_steps: Of every island.
        preset: Of `outer`.
        inner_steps_per_round: H.
        overlap_steps: tau.
        rate: Of an island's payloads; empty: what TCP takes.
        launchers: What starts it, besides commands that are typed.
    """

    name: str
    sites: tuple[Site, ...]
    coordinator: str = ""
    model: str = "debug"
    data: tuple[str, ...] = ()
    tokenizer: str = ""
    inner_steps: int = 2000
    preset: Preset = "streaming"
    inner_steps_per_round: int = _SHORTEST
    overlap_steps: int = 2
    rate: str = ""
    launchers: tuple[Launcher, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether everything is on this machine."""
        return not self.coordinator

    @property
    def host(self) -> str:
        """Host of the coordinator."""
        return split_address(self.coordinator)[0]

    @property
    def port(self) -> int:
        """Port of the coordinator."""
        return split_address(self.coordinator)[1]

    @property
    def is_of_transformers(self) -> bool:
        """Whether the model is one of transformers."""
        return self.model not in _DEFAULTS

    @property
    def defaults(self) -> ModelDefaults:
        """Values that fit the model."""
        return _DEFAULTS.get(self.model, _TUNED)

    @property
    def hub(self) -> str:
        """Data set of the hub; empty: files, or the built-in text."""
        return self.data[0].removeprefix("hub:") if self.data[:1] and _is_hub(self.data[0]) else ""

    @property
    def warmup_steps(self) -> int:
        """A twentieth of the run, at most 500."""
        return min(500, max(1, self.inner_steps // 20))

    @property
    def checkpoint_steps(self) -> int:
        """Inner steps between checkpoints: a few rounds, at most the run."""
        return min(self.inner_steps, 5 * self.inner_steps_per_round)

    @property
    def checkpoint_tokens(self) -> int:
        """Tokens of all islands between cuts, where islands merge on arrival."""
        return self.checkpoint_steps * sum(map(self.tokens_of, self.sites))

    def tokens_of(self, site: Site) -> int:
        """Batch of an island: eight sequences for each part of each rank's batch."""
        return 8 * site.ranks * self.defaults.micro_batches * self.defaults.sequence_length

    def meeting_of(self, site: Site) -> str:
        """HOST:PORT where the hosts of an island meet; empty: it has one."""
        if site.num_hosts == 1:
            return ""
        return f"{bare_host(site.hosts[0])}:{MEETING_PORT + self.sites.index(site)}"


def check(answers: Answers) -> None:
    """Refuse what cannot be a run, or could not be started as told.

    Raises:
        ConfigError: Naming the option.
    """
    _check_name("the run's name (the last part of DIR, or --name)", answers.name)
    names = [site.name for site in answers.sites]
    for name in names:
        _check_name("--island", name)
    if len(set(names)) < len(names) or not names:
        raise ConfigError(f"--island {' --island '.join(names)}: give each island another name")
    for site in answers.sites:
        for host in site.hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"--island {site.name}={host}: is not [USER@]HOST")
    beyond = [site.name for site in answers.sites if site.hosts]
    if beyond and len(beyond) < len(names):
        missing = ", ".join(sorted({*names} - {*beyond}))
        raise ConfigError(f"--island {missing}: give it a host, as the others have: NAME=HOST")
    if answers.launchers and answers.is_local:
        raise ConfigError(
            f"--launcher {answers.launchers[0]}: says how hosts are started, and there are none: "
            f"give --island NAME=HOST and --coordinator HOST"
        )
    if answers.coordinator and not _HOST.fullmatch(answers.host):
        raise ConfigError(f"--coordinator {answers.coordinator}: is not HOST or HOST:PORT")
    elsewhere = {bare_host(h) for site in answers.sites for h in site.hosts if not is_loopback(h)}
    if elsewhere and is_loopback(answers.host):
        raise ConfigError(
            f"--coordinator {answers.coordinator}: is reached from its own machine only, and "
            f"{', '.join(sorted(elsewhere))} are others: give the name by which they reach it"
        )


def read_sites(
    islands: Sequence[str], devices: Sequence[str], *, usual_devices: int, threads: int
) -> tuple[Site, ...]:
    """Read `--island NAME[=HOST,HOST]` and `--gpus [ISLAND=]N`.

    Args:
        islands: Texts of the first.
        devices: Texts of the second.
        usual_devices: Of each host of which nothing is said.
        threads: Of a rank without accelerators.

    Raises:
        ConfigError: If one cannot be read.
    """
    told: dict[str, int] = {}
    names = [text.partition("=")[0] for text in islands]
    for text in devices:
        name, _, count = text.rpartition("=")
        if not count.isdecimal() or int(count) > 64 or (name and name not in names):
            raise ConfigError(
                f"--gpus {text}: write a number of accelerators of each host, or ISLAND=NUMBER; "
                f"islands: {', '.join(names)}"
            )
        told[name] = int(count)
    usual = told.get("", usual_devices)
    sites = []
    for text in islands:
        name, _, hosts = text.partition("=")
        number = told.get(name, usual)
        listed = tuple(host.strip() for host in hosts.split(",") if host.strip())
        sites.append(Site(name, listed, number, 1 if number else threads))
    return tuple(sites)


def read_coordinator(text: str, sites: Sequence[Site]) -> str:
    """Read `--coordinator HOST[:PORT]`; empty: the first island's first host, if it has any.

    Raises:
        ConfigError: If it is no address.
    """
    text = text or next((bare_host(site.hosts[0]) for site in sites if site.hosts), "")
    if not text or ":" not in text:
        return text and f"{text}:{PORT}"
    try:
        host, port = split_address(text)
    except ValueError as error:
        raise ConfigError(f"--coordinator {text}: {error}; write HOST or HOST:PORT") from error
    if not 1 <= port < 65535:
        raise ConfigError(f"--coordinator {text}: the port is 1 to 65534; the next is the syncer's")
    return f"{host}:{port}"


def shortest_period(num_fragments: int, needed_steps: float = 0.0) -> int:
    """Give the shortest H in steps of 24: each fragment leaves at a step of its own."""
    return _SHORTEST * max(1, math.ceil(max(num_fragments, needed_steps) / _SHORTEST))


def fitting_schedule(
    *, round_bits: float, bandwidth_bps: float, rtt_s: float, step_s: float, num_fragments: int
) -> tuple[int, int]:
    """Choose H and tau for a link.

    H: the payload of a round takes at most half of its time, and each fragment leaves at a step of
    its own; in steps of 24, at most 480.
    tau: a fragment goes up and comes down, with two round trips, while training goes on; at most
    the steps until the next fragment leaves, at least 2.

    Args:
        round_bits: Of the whole model, one way.
        bandwidth_bps: Of an island, each way.
        rtt_s: Round trip.
        step_s: Of the fastest island.
        num_fragments: P.
    """
    needed = round_bits / bandwidth_bps / _SHARE / step_s
    period = min(_MOST_STEPS_APART, shortest_period(num_fragments, needed))
    fragment_s = 2 * round_bits / num_fragments / bandwidth_bps + 2 * rtt_s
    overlap = math.ceil(fragment_s / step_s)
    return period, max(2, min(overlap, period // num_fragments - 1))


def _is_hub(text: str) -> bool:
    return text.startswith("hub:")


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise ConfigError(
            f"{what} {name!r}: small letters, digits and '-' inside, at most 40: units, pods and "
            f"files are called by it"
        )
