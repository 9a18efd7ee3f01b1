"""The sections of what a run leaves behind: checkpoints, evaluations, telemetry."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator

from diloco.config.classes import Local, Needs, Policy, Section
from diloco.config.fields import MOST_CHECKPOINTS, MOST_STEPS
from diloco.config.network import host_of


class CheckpointConfig(Section):
    """Run checkpoints: what a run is resumed from, and what an island returns with."""

    every_inner_steps: Annotated[Policy[int], Needs("outer.merge", "scheduled")] = Field(
        default=0,
        ge=0,
        description="Inner steps between run checkpoints; 0: only at a graceful stop; on arrival "
        "islands have none in common: every_tokens",
    )
    every_tokens: Annotated[Policy[int], Needs("outer.merge", "on_arrival")] = Field(
        default=0,
        ge=0,
        description="Merged tokens between run checkpoints; 0: only at a graceful stop",
    )
    keep: Policy[int] = Field(
        default=2,
        ge=1,
        le=MOST_CHECKPOINTS // 4,  # as many again may be unsure, and more where they are frequent
        description="Complete checkpoints that are kept; older ones are removed",
    )
    dir: Local[str] = Field(
        default="",
        description="Directory of this site's checkpoints, seen by all ranks of its island; empty: "
        "checkpoints in coordinator.state_dir",
    )
    asynchronous: Local[bool] = Field(
        default=True,
        description="Whether training goes on while a checkpoint is copied to host memory and "
        "written: 12 bytes a parameter, shared by the ranks of a replica, and kept for the next "
        "one; false: it waits, and no copy is made",
    )

    mirror: Local[str] = Field(
        default="",
        description="URL of fsspec (s3://BUCKET/PATH, gs://..., file:///mnt/...) to which each "
        "checkpoint is copied behind the training, and from which it is taken when it is not on "
        "disk; as many are kept; credentials are the file system's own affair; empty: none",
    )

    @field_validator("mirror")
    @classmethod
    def _check_mirror(cls, value: str) -> str:
        if not value:
            return value
        from fsspec.registry import known_implementations, registry  # slow, and seldom needed

        protocol, separator, _ = value.partition("://")
        if not separator:
            raise ValueError("must be a URL: for a directory file:///PATH")
        if protocol not in {*known_implementations, *registry}:
            raise ValueError(
                f"fsspec knows no {protocol}://: install the package that registers it, or choose "
                "s3:// (pip install s3fs), gs:// (gcsfs), abfs:// (adlfs), sftp:// (paramiko) or "
                "file://"
            )
        return value

    def num_unsure(self, apart: int) -> int:
        """Newest checkpoints that are kept though it is not known that every island has them.

        keep + ceil(apart / every), with islands at most `apart` = H + tau inner steps apart: an
        older one that is not complete yet never will be. One where they are made at stops only.
        """
        if self.every_inner_steps == 0:
            return 1
        return self.keep + math.ceil(apart / self.every_inner_steps)


class EvaluationConfig(Section):
    """Held-out loss."""

    every_inner_steps: Policy[int] = Field(
        default=0, ge=0, description="Inner steps between evaluations; 0: only at the end"
    )
    num_sequences: Policy[int] = Field(
        default=256, ge=1, description="Held-out sequences of an evaluation"
    )
    every_checkpoints: Policy[int] = Field(
        default=1,
        ge=0,
        description="Run checkpoints from one to the next of which every island takes the "
        "held-out loss, of the published values and before it writes its part: num_sequences "
        "forward passes each time. Once most islands, and two where there are two, find it good, "
        "older checkpoints may go; 0: none is judged",
    )
    max_rise: Policy[float] = Field(
        default=0.1,
        gt=0,
        description="Share by which the held-out loss of a checkpoint may be above that of earlier "
        "good ones (median of the five lowest) and count as good",
    )
    max_returns: Policy[int] = Field(
        default=2,
        ge=0,
        description="How often the run returns to its last good checkpoint by itself, after two "
        "bad ones in a row or one that is not finite, before five good ones follow; then it ends "
        "with exit code 20 and the command to type; 0: never, alarms alone",
    )
    max_nats_per_byte: Local[float] = Field(
        default=0.0,
        ge=0,
        description="`diloco local` fails unless the published parameters end below this held-out "
        "loss; 0: whatever it is",
    )


class WandbConfig(Section):
    """Weights & Biases: one run an island, the islands of a run in one group."""

    mode: Local[Literal["disabled", "offline", "online"]] = Field(
        default="disabled",
        description="Whether metrics go there: offline writes files below telemetry.dir for a "
        "later `wandb sync`",
    )
    project: Local[str] = Field(
        default="",
        description="Project; empty: WANDB_PROJECT, or wandb's own default; WANDB_ENTITY: whose",
    )


class ProfileConfig(Section):
    """A trace of some inner steps by torch.profiler, outer phases and IO thread included.

    One Chrome trace a rank, in the directory traces of telemetry.dir.
    """

    num_steps: Local[int] = Field(
        default=0,
        ge=0,
        le=1000,
        description="Inner steps of the trace, which take about twice as long; 0: none is made",
    )
    start_step: Annotated[Local[int], Needs("num_steps")] = Field(
        default=10,
        ge=0,
        le=MOST_STEPS,
        description="Completed inner steps at which it begins, past the first ones that warm up",
    )
    memory: Annotated[Local[bool], Needs("num_steps")] = Field(
        default=False,
        description="Whether allocations are traced, too; on CUDA with a snapshot for "
        "pytorch.org/memory_viz",
    )


class TelemetryConfig(Section):
    """Where events and metrics go; events are always written as lines of JSON."""

    dir: Local[str] = Field(
        default="",
        description="Directory of events and logs; empty: telemetry in coordinator.state_dir",
    )
    tensorboard: Local[bool] = Field(
        default=False, description="Whether metrics go to telemetry.dir/tensorboard, too"
    )
    wandb: WandbConfig = Field(
        default=WandbConfig(), description="Weights & Biases: one run an island"
    )
    profile: ProfileConfig = Field(
        default=ProfileConfig(), description="A trace of some inner steps"
    )
    coordinator_metrics: Local[str] = Field(
        default="",
        description="HOST:PORT at which the coordinator serves /metrics to Prometheus; empty: "
        "nowhere",
    )
    syncer_metrics: Local[str] = Field(
        default="",
        description="HOST:PORT at which the syncer serves /metrics to Prometheus; empty: nowhere",
    )
    metrics_token: Local[str] = Field(
        default="",
        description="File with the bearer token that /metrics asks for; empty: none, which only "
        "loopback allows",
    )

    @field_validator("coordinator_metrics", "syncer_metrics")
    @classmethod
    def _check_address(cls, value: str) -> str:
        if value:
            host_of(value)
        return value
