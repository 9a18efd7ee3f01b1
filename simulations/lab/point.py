"""A point of a laboratory: one run with one seed, resolved, and the fingerprint of its figures.

Points come out of a laboratory's file: its sweep, each value with each, and every seed. What
decides a figure is in the fingerprint: configuration, text, threads and the code that trains.
"""

from __future__ import annotations

import functools
import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from diloco.config.load import config_of, load_config
from diloco.config.schema import Config
from diloco.data.batches import Data
from diloco.data.open import open_data
from diloco.errors import ConfigError
from diloco.forecast.build import link_profile
from diloco.simulations.lab.config import LAB, Flags, LabConfig, load_lab
from diloco.transport.shaping.link import LinkProfile

#: Sections of a run that decide its figures here; islands count by their tokens alone.
_DECIDING = ("run", "model", "data", "inner", "outer", "evaluation")
#: Fields of a laboratory that say which points there are, and not what one of them is.
_OUTER_FIELDS = {"run", "set", "seeds", "sweep"}
_ROOT = Path(__file__).resolve().parents[2]
#: What trains: a change in it makes other figures, or is taken to.
_CODE = (
    "diloco/baseline/time_model.py",
    "diloco/launch/loopback_run.py",
    "diloco/compression",
    "diloco/data",
    "diloco/island",
    "diloco/outer",
    "diloco/protocol/island",
    "diloco/protocol/rounds",
    "diloco/syncer",
    "diloco/trainer",
    "diloco/versions",
    "simulations/lab/batches.py",
    "simulations/lab/losses.py",
    "simulations/lab/prune.py",
    "simulations/lab/run.py",
    "simulations/lab/timeline.py",
    "simulations/lab/environment.py",
    "transport/calls/loopback.py",
    "transport/shaping/link.py",
    "transport/shaping/shaped.py",
)


@dataclass(frozen=True)
class LabPoint:
    """One run of a laboratory.

    Attributes:
        lab: Its settings.
        config: The run: islands of one rank each.
        swept: The values that the sweep gave it, by dotted key.
    """

    lab: LabConfig
    config: Config
    swept: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """Of initial parameters, text, step times and failures."""
        return self.config.run.seed

    @property
    def tokens_per_inner_step(self) -> int:
        """Of all islands together."""
        return sum(island.tokens_per_inner_step for island in self.config.islands.values())

    @property
    def device(self) -> torch.device:
        """Where it computes.

        Raises:
            ConfigError: If there is no such device.
        """
        has_cuda = torch.cuda.is_available()
        if self.lab.device == "cuda" and not has_cuda:
            raise ConfigError('device = "cuda": this machine has none; set device = "cpu"')
        return torch.device("cuda" if has_cuda and self.lab.device != "cpu" else "cpu")

    def link_of(self, island: str) -> LinkProfile | None:
        """Find the link that an island has; None: it costs no time.

        Raises:
            ConfigError: If there is none of that name.
        """
        own = self.lab.islands.get(island)
        for link in (own.link if own else None, self.lab.link):
            if link is not None and link.is_given:
                return link.found()
        return link_profile(self.config)

    def deciding(self) -> dict[str, Any]:
        """Say everything that decides its figures, as JSON values."""
        return {**self.settings(), **_environment(self)}

    def settings(self) -> dict[str, Any]:
        """Say what is asked for, whatever code, machine and text trains it, as JSON values."""
        links = {name: self.link_of(name) for name in self.config.islands}
        config = self.config.model_dump(mode="json")
        return {
            **{name: config[name] for name in _DECIDING},
            "islands": {
                name: island.tokens_per_inner_step for name, island in self.config.islands.items()
            },
            "lab": self.lab.model_dump(mode="json", exclude=_OUTER_FIELDS),
            "links": {name: repr(link and (link.up, link.down)) for name, link in links.items()},
        }

    def fingerprint(self) -> str:
        """Name its figures: blake3 of all that decides them, in hex."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        return _digest(self.deciding())

    def start_fingerprint(self) -> str:
        """Name the state after its warm steps, which points that differ in nothing else share."""
        return self._start_fingerprint

    @functools.cached_property
    def _start_fingerprint(self) -> str:
        config = union_config(self.config).model_dump(mode="json")
        is_apart = self.lab.data.split == "topics" or not is_even(self.config)
        sizes = sorted(island.tokens_per_inner_step for island in self.config.islands.values())
        return _digest(
            {
                **{name: config[name] for name in ("run", "model", "inner", "data")},
                "split": self.lab.data.split,
                "islands": sizes if is_apart else self.tokens_per_inner_step,
                "warm_steps": self.lab.warm_steps,
                "threads": self.lab.threads,
                **_environment(self),
            }
        )


def points_of(path: Path | None, flags: Flags | None = None) -> list[LabPoint]:
    """Give every point of a laboratory's file, in order: the sweep's first key varies slowest.

    Args:
        path: The file; None: the flags say all.
        flags: What is said besides it.

    Raises:
        ConfigError: If a file or a value cannot be used; which point it is, is said.
    """
    flags = flags or Flags()
    lab = load_lab(path, flags)
    keys, points = list(lab.sweep), []
    for values in itertools.product(*lab.sweep.values()):
        swept = dict(zip(keys, values, strict=True))
        own = [f"{k.removeprefix(LAB)}={_toml(v)}" for k, v in swept.items() if k.startswith(LAB)]
        try:
            there = replace(flags, overrides=(*flags.overrides, *own))
            mine = load_lab(path, there) if own else lab
            settings = [f"{k}={_toml(v)}" for k, v in swept.items() if not k.startswith(LAB)]
            for seed in lab.seeds or (None,):
                seeded = [] if seed is None else [f"run.seed={seed}"]
                config = _load_run(mine, [*mine.set, *settings, *seeded])
                _check(mine, config)
                points.append(LabPoint(mine, config, swept))
        except ConfigError as error:
            if not swept:
                raise
            where = ", ".join(f"{key} = {_toml(value)}" for key, value in swept.items())
            raise ConfigError(f"at the point {where} of the sweep: {error}") from error
    return points


def union_config(config: Config) -> Config:
    """Give the run of one island with the batches of all: what data parallel trains."""
    tokens = sum(island.tokens_per_inner_step for island in config.islands.values())
    values = config.model_dump()
    values["run"] |= {"min_islands": 1, "max_islands": 0, "open": False}
    values["outer"] = {"preset": "classic", "inner_steps_per_round": 1}
    values["islands"] = {"all": {"ranks": 1, "tokens_per_inner_step": tokens}}
    values["checkpoint"] = {}
    return config_of({**values, "island_id": "all"}, "cannot join the islands' batches")


def is_even(config: Config) -> bool:
    """Whether all islands have the same tokens an inner step: then they share one batch."""
    return len({island.tokens_per_inner_step for island in config.islands.values()}) == 1


def open_text(config: Config) -> Data:
    """Open the text of a run; the last ones stay open."""
    key = json.dumps(
        {
            "data": config.data.model_dump(mode="json"),
            "vocab_size": config.model.vocab_size,
            "seed": config.run.seed,
            "slots": 0 if config.data.source == "stdlib" else config.max_islands,
        },
        sort_keys=True,
    )
    if key not in _texts:
        if len(_texts) >= _MOST_TEXTS:
            _texts.clear()
        _texts[key] = open_data(config)
    return _texts[key]


_MOST_TEXTS = 4
_texts: dict[str, Data] = {}


def _load_run(lab: LabConfig, settings: Sequence[str]) -> Config:
    """Load the run with its islands made one rank each, or replaced by equal ones."""
    plain = load_config(lab.run)
    tokens = lab.tokens_per_inner_step
    if not lab.num_islands:
        if tokens:
            raise ConfigError(
                f"tokens_per_inner_step = {tokens}: is of num_islands above 0; the islands of "
                f"{lab.run} have their own"
            )
        islands = {name: i.tokens_per_inner_step for name, i in plain.islands.items()}
    else:
        tokens = tokens or sum(i.tokens_per_inner_step for i in plain.islands.values())
        if tokens % lab.num_islands:
            nearest = max(1, round(tokens / lab.num_islands)) * lab.num_islands
            raise ConfigError(
                f"tokens_per_inner_step = {tokens}: {lab.num_islands} islands share them equally, "
                f"so it must be a multiple of {lab.num_islands}; the nearest is {nearest}"
            )
        each = tokens // lab.num_islands
        islands = {f"island-{slot:02d}": each for slot in range(lab.num_islands)}
    table = ", ".join(
        f"{name} = {{ ranks = 1, tokens_per_inner_step = {each} }}"
        for name, each in islands.items()
    )
    return load_config(lab.run, [f"islands={{ {table} }}", *settings])


def _check(lab: LabConfig, config: Config) -> None:
    """Refuse what the laboratory and its run owe to each other.

    Raises:
        ConfigError: Naming the key and what it may be.
    """
    known = ", ".join(config.islands)
    for name in lab.islands:
        if name not in config.islands:
            raise ConfigError(f"islands.{name}: not an island of {lab.run}; there are {known}")
    outer = config.outer
    if lab.warm_steps >= config.run.inner_steps:
        raise ConfigError(
            f"warm_steps = {lab.warm_steps}: must be from 0 to below run.inner_steps = "
            f"{config.run.inner_steps}"
        )
    if lab.method == "diloco" and lab.warm_steps and outer.is_on_arrival:
        raise ConfigError(
            f'warm_steps = {lab.warm_steps}: with outer.merge = "on_arrival" a run ends by tokens, '
            "which count from its own start: leave it out"
        )
    if lab.data.split == "topics" and config.data.source != "stdlib":
        raise ConfigError(
            f'data.split = "topics": is of data.source = "stdlib", not "{config.data.source}"; '
            'set it to "iid"'
        )
    if lab.method == "data_parallel" and lab.failures != type(lab.failures)():
        raise ConfigError(
            'failures: with method = "data_parallel" none are simulated; leave them out'
        )
    if lab.prune.share and lab.method == "data_parallel":
        raise ConfigError(
            f'prune.share = {lab.prune.share}: with method = "data_parallel" there are no '
            "pseudo-gradients; leave it out"
        )
    for island in config.islands:
        LabPoint(lab, config, {}).link_of(island)


def _toml(value: object) -> str:
    """Write a swept value as `--set` reads it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _environment(point: LabPoint) -> dict[str, Any]:
    return {
        "text": open_text(point.config).digest,
        "device": point.device.type,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "code": code_digest(),
    }


@functools.cache
def code_digest() -> str:
    """Digest the sources of what trains: figures of another version are not taken for its own."""
    digest = blake3()
    for name in _CODE:
        path = _ROOT / name
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{source.relative_to(_ROOT)}\0".encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _digest(value: object) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest()
