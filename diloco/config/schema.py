"""The run file's schema: one frozen model a component, every field described and classified.

Descriptions are what `diloco config --explain` prints and what a refused value is answered with.
Cross-field rules sit in the smallest model that sees all fields, as validators of the later field,
so that one wrong field hides no other. What only the parameters can tell (names, number of
tensors) is checked when the plan is made. Raw tables before validation are `Any`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from diloco.config.classes import Identity, Local, Needs, Policy, Section, unmet_needs
from diloco.config.data import DataConfig
from diloco.config.fields import (
    MOST_CHECKPOINTS,
    MOST_STEPS,
    IslandName,
    Name,
    Problem,
    several_problems,
)
from diloco.config.inner import InnerConfig, wsd_problems
from diloco.config.island import IslandConfig, island_problems
from diloco.config.model import ModelConfig
from diloco.config.network import (
    MOST_SYNCERS,
    NO_TOKEN,
    NOT_LOOPBACK,
    OWN_TRANSPORTS,
    UNKNOWN_PROTECTION,
    CoordinatorConfig,
    SyncerConfig,
    TransportConfig,
    beyond_loopback,
    own_syncer_problems,
    placed_problems,
    port_problems,
    syncer_problems,
)
from diloco.config.outer import FEWEST_OF_A_MEDIAN, OuterConfig
from diloco.config.records import CheckpointConfig, EvaluationConfig, TelemetryConfig
from diloco.errors import ConfigError


def _state_url(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    is_one = bool(separator and scheme in ("s3", "gs", "az", "file") and rest.strip("/"))
    if value and not (is_one and (scheme != "file" or rest.startswith("/"))):
        raise ValueError(
            "must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///PATH"
        )
    return value.rstrip("/")


class RunConfig(Section):
    """What the run is called, how it starts and how long it lasts."""

    name: Identity[Name] = Field(description="Name of the run; an island of another run is refused")
    seed: Identity[int] = Field(ge=0, lt=2**63, description="Seed of initial parameters and data")
    inner_steps: Policy[int] = Field(
        ge=1, le=MOST_STEPS, description="Inner steps of every island; ends the schedule"
    )
    min_islands: Annotated[Policy[int], Needs("outer.merge", "on_arrival")] = Field(
        default=1, ge=1, description="Islands at work without which no round opens"
    )
    max_islands: Annotated[Policy[int], Needs("outer.merge", "on_arrival")] = Field(
        default=0, ge=0, description="Most islands of the run; 0: as many as are configured"
    )
    open: Annotated[Policy[bool], Needs("outer.merge", "on_arrival")] = Field(
        default=False,
        description="Whether islands that the coordinator's file does not name may join, up to "
        "max_islands",
    )
    state: Local[Annotated[str, AfterValidator(_state_url)]] = Field(
        default="",
        description="Object store that has the run's state besides coordinator.state_dir, so that "
        "the run outlives that machine: s3://BUCKET/PREFIX, gs://..., az://..., file:///PATH. "
        "Credentials come from the environment; the run's secret is in it. Empty: none",
    )
    warm_start: Local[str] = Field(
        default="",
        description="Start from these weights: a directory (export, Hugging Face model, state_dir "
        "of a run, checkpoint) or a hub name; empty: from the seed",
    )

    @property
    def has_bucket(self) -> bool:
        """Whether `state` signs addresses for those without credentials: no directory does."""
        return bool(self.state) and not self.state.startswith("file:")


class Config(Section):
    """A whole run file, and the island that this process belongs to, if any."""

    island_id: Local[str] = Field(
        default="",
        description="Island of this process; empty: none (coordinator, syncer, planning)",
    )
    run: RunConfig = Field(description="What the run is called and how long it lasts")
    model: ModelConfig = Field(description="The decoder")
    data: DataConfig = Field(description="Where text comes from")
    inner: InnerConfig = Field(description="Training inside an island")
    outer: OuterConfig = Field(description="Synchronisation between islands")
    transport: TransportConfig = Field(default=TransportConfig(), description="How bytes travel")
    syncers: Local[dict[IslandName, SyncerConfig]] = Field(
        default={},
        description="Syncers on machines of their own, by name, the same at coordinator and "
        "syncers; none: the coordinator starts coordinator.num_syncers next to itself",
    )
    coordinator: CoordinatorConfig = Field(description="Where coordinator and syncer listen")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="What a run is resumed from"
    )
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="Held-out loss")
    telemetry: TelemetryConfig = Field(
        default=TelemetryConfig(), description="Where events and metrics go"
    )
    islands: Identity[dict[IslandName, IslandConfig]] = Field(
        min_length=1, description="Islands by name; the sorted names must agree everywhere"
    )

    @property
    def island(self) -> IslandConfig:
        """The selected island.

        Raises:
            ConfigError: If no island was selected.
        """
        if not self.island_id:
            choices = " or ".join(sorted(self.islands))
            raise ConfigError(f"no island is selected; choose --island {choices}")
        return self.islands[self.island_id]

    @property
    def syncer_shares(self) -> dict[str, float]:
        """Name and share of every syncer of the run, in order.

        "syncer" of the only one, else "syncer-NAME", or "syncer-N" of several that the coordinator
        starts.
        """
        if self.syncers:
            return {f"syncer-{name}": self.syncers[name].share for name in sorted(self.syncers)}
        number = self.coordinator.num_syncers
        return {f"syncer-{n}": 1.0 for n in range(number)} if number > 1 else {"syncer": 1.0}

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of every syncer, in order."""
        return tuple(self.syncer_shares.values())

    @property
    def own_syncers(self) -> tuple[str, ...]:
        """Names of the syncers that the coordinator starts."""
        return () if self.syncers else tuple(self.syncer_shares)

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run: inner_steps times the islands' tokens an inner step."""
        per_step = sum(island.tokens_per_inner_step for island in self.islands.values())
        return self.run.inner_steps * per_step

    @property
    def most_inner_steps(self) -> int:
        """Inner steps that a trainer must be able to make on the selected island.

        `run.inner_steps`; in a decoupled run, which ends by the tokens of all islands, twice what
        the island would make if it trained them all alone.

        Raises:
            ConfigError: If no island was selected.
        """
        if not self.outer.is_on_arrival:
            return self.run.inner_steps
        return 2 * -(-self.total_tokens // self.island.tokens_per_inner_step)

    @property
    def max_islands(self) -> int:
        """Most islands of the run."""
        return self.run.max_islands or len(self.islands)

    @property
    def lease_s(self) -> float:
        """Seconds without a word after which an island counts as lost."""
        lease = self.coordinator.lease
        if lease == "auto":
            return 10.0 if self.outer.is_on_arrival else 300.0
        return lease.seconds

    @property
    def num_unsure_checkpoints(self) -> int:
        """Newest checkpoints that are kept though it is not known that every island has them.

        Islands are at most H + tau inner steps apart; see `CheckpointConfig.num_unsure`.
        """
        apart = self.outer.inner_steps_per_round + self.outer.overlap_steps
        return self.checkpoint.num_unsure(apart)

    @property
    def telemetry_dir(self) -> Path:
        """Directory of events and logs."""
        chosen = self.telemetry.dir
        return Path(chosen) if chosen else Path(self.coordinator.state_dir) / "telemetry"

    @property
    def profile_dir(self) -> Path:
        """Directory of traces."""
        return self.telemetry_dir / "traces"

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of this site's checkpoints, one below it an island."""
        chosen = self.checkpoint.dir
        return Path(chosen) if chosen else Path(self.coordinator.state_dir) / "checkpoints"

    @field_validator("data")
    @classmethod
    def _check_sequence_length(cls, value: DataConfig, info: ValidationInfo) -> DataConfig:
        model = info.data.get("model")
        if model is not None and value.sequence_length > model.max_sequence_length:
            message = f"must be at most model.max_sequence_length = {model.max_sequence_length}"
            raise several_problems([("sequence_length", value.sequence_length, message)])
        return value

    @field_validator("inner")
    @classmethod
    def _check_decay(cls, value: InnerConfig, info: ValidationInfo) -> InnerConfig:
        run = info.data.get("run")
        problems = wsd_problems(value.optimizer, run.inner_steps) if run is not None else []
        if problems:
            raise several_problems([(f"optimizer.{key}", v, text) for key, v, text in problems])
        return value

    @field_validator("run")
    @classmethod
    def _check_open(cls, value: RunConfig) -> RunConfig:
        if value.open and not value.max_islands:
            message = "needs max_islands: the text is divided by that many, however many join"
            raise several_problems([("open", True, message)])
        return value

    @field_validator("syncers")
    @classmethod
    def _check_syncers(
        cls, value: dict[str, SyncerConfig], info: ValidationInfo
    ) -> dict[str, SyncerConfig]:
        run, outer = info.data.get("run"), info.data.get("outer")
        problems = placed_problems(
            value,
            info.data.get("transport"),
            outer.num_fragments if outer is not None else MOST_SYNCERS,
            run.state if run is not None else "-",
        )
        if found := list(problems):
            raise several_problems(found)
        return value

    @field_validator("coordinator")
    @classmethod
    def _check_binds(cls, value: CoordinatorConfig, info: ValidationInfo) -> CoordinatorConfig:
        names = ("listen", "syncer_listen")
        transport = info.data.get("transport")
        message = transport.open_listener if transport is not None else ""
        beyond = beyond_loopback(value, names) if message else []
        problems = [(name, getattr(value, name), message) for name in beyond]
        outer = info.data.get("outer")
        is_elsewhere = bool(info.data.get("syncers", True))  # or they have problems of their own
        if is_elsewhere:
            problems += own_syncer_problems(value)
        if not problems and not is_elsewhere and beyond_loopback(value, names) == ["listen"]:
            message = (
                f"only this machine reaches it, but islands elsewhere reach the coordinator at "
                f"listen = {value.listen} and would be sent here; give it a host like listen's"
            )
            problems = [("syncer_listen", value.syncer_listen, message)]
        if outer is not None:
            problems += syncer_problems(value, outer.num_fragments)
        problems += port_problems(_listeners(value))
        if problems:
            raise several_problems(problems)
        return value

    @field_validator("checkpoint")
    @classmethod
    def _check_kept(cls, value: CheckpointConfig, info: ValidationInfo) -> CheckpointConfig:
        outer = info.data.get("outer")
        if outer is None:
            return value
        apart = outer.inner_steps_per_round + outer.overlap_steps
        # Besides them the last good one, that of a graceful stop, and that of the last resume.
        count = value.keep + value.num_unsure(apart) + 3
        if count > MOST_CHECKPOINTS:
            message = (
                f"an island would keep {count} checkpoints at a time, as islands may be {apart} "
                f"inner steps apart; {MOST_CHECKPOINTS} are allowed: make them less often"
            )
            raise several_problems([("every_inner_steps", value.every_inner_steps, message)])
        return value

    @field_validator("telemetry")
    @classmethod
    def _check_metrics(cls, value: TelemetryConfig, info: ValidationInfo) -> TelemetryConfig:
        names = ("coordinator_metrics", "syncer_metrics")
        problems = _unprotected(value, names, info)
        if not value.metrics_token:
            problems += [(n, getattr(value, n), NO_TOKEN) for n in beyond_loopback(value, names)]
        if (coordinator := info.data.get("coordinator")) is not None:
            listeners = [*_listeners(coordinator)]
            listeners += [("telemetry.coordinator_metrics", value.coordinator_metrics, 1)]
            number = coordinator.num_syncers
            listeners += [("telemetry.syncer_metrics", value.syncer_metrics, number)]
            problems += port_problems(listeners)
        if problems:
            raise several_problems(problems)
        return value

    @field_validator("islands")
    @classmethod
    def _check_islands(
        cls, value: dict[str, IslandConfig], info: ValidationInfo
    ) -> dict[str, IslandConfig]:
        problems = [
            (f"{name}.{path}", shown, message)
            for name, island in value.items()
            for path, shown, message in island_problems(island, info.data)
        ]
        outer = info.data.get("outer")
        if outer is not None and outer.clip_norm_ratio and len(value) < FEWEST_OF_A_MEDIAN:
            raise ValueError(
                f"{len(value)} of them, and outer.clip_norm_ratio = {outer.clip_norm_ratio:g} "
                f"compares {FEWEST_OF_A_MEDIAN} contributions or more: leave it out"
            )
        run = info.data.get("run")
        least = max(outer.quorum or 0 if outer else 0, run.min_islands if run else 0)
        most = (run.max_islands if run else 0) or len(value)
        if least > most or len(value) > most:
            raise ValueError(
                f"{len(value)} of them, with run.min_islands = {run.min_islands if run else '?'}, "
                f"run.max_islands = {most} and outer.min_contributions = "
                f"{outer.min_contributions if outer else '?'}: at most max_islands are allowed, "
                "and the two others at most that"
            )
        data = info.data.get("data")
        if outer is not None and outer.is_on_arrival and data is not None:
            name, tokens = max(
                ((name, island.tokens_per_inner_step) for name, island in value.items()),
                key=lambda island: island[1],
            )
            if 2 * (samples := tokens // data.sequence_length) > data.handover_samples:
                raise ValueError(
                    f"islands.{name} draws {samples} samples an inner step, and "
                    f"data.handover_samples = {data.handover_samples} must be at least two steps': "
                    f"set it to {2 * samples} or more"
                )
        if problems:
            raise several_problems(problems)
        return value

    @model_validator(mode="after")
    def _check_across_sections(self) -> Config:
        if problems := list(unmet_needs(self)):
            raise several_problems(problems)
        if self.transport.payloads == "bucket" and self.run.state and not self.run.has_bucket:
            message = f"a directory signs no addresses, and run.state = {self.run.state}"
            raise several_problems([("transport.payloads", "bucket", message)])
        if self.island_id and self.island_id not in self.islands:
            message = f"is not an island of this file; islands: {', '.join(sorted(self.islands))}"
            raise several_problems([("island_id", self.island_id, message)])
        return self


def _listeners(value: CoordinatorConfig) -> list[tuple[str, str, int]]:
    """Give key and address of each listener of the coordinator's machine, and how many it has."""
    return [
        ("coordinator.listen", value.listen, 1),
        ("coordinator.syncer_listen", value.syncer_listen, value.num_syncers),
    ]


def _unprotected(section: Section, names: Sequence[str], info: ValidationInfo) -> list[Problem]:
    """Name the addresses that need certificates, or the word that the network is trusted."""
    transport = info.data.get("transport")
    if transport is None or transport.certs or transport.insecure:
        return []
    beyond = beyond_loopback(section, names)
    problem = NOT_LOOPBACK if transport.kind in OWN_TRANSPORTS else UNKNOWN_PROTECTION
    return [(name, getattr(section, name), problem) for name in beyond]
