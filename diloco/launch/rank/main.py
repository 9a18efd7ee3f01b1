"""One rank of an island: builds everything once, trains, and ends with an exit code.

    RANK=0 WORLD_SIZE=2 ... python -m diloco.launch.rank --config resolved.toml
        --island eu-west --coordinator HOST:PORT --output DIR

`diloco island` starts the ranks of one host like this; under torchrun or srun it calls `run_rank`
in the job's own processes. The loop is one of `diloco.connect` and `diloco.DiLoCo`, as anybody's
could be. Writes events-ISLAND-RANK.jsonl and ISLAND-RANK.log to DIR, the leader also
manifest-ISLAND.json.

Source: PROTOCOL.md, "Agreement of ranks", "Return of an island" and "Words for figures".
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from diloco.checkpoint.island_checkpoints import IslandCheckpoints
from diloco.checkpoint.memory_copies import MemoryCopies
from diloco.checkpoint.mirror import Mirror
from diloco.checkpoint.state_transfer import open_state_transfer
from diloco.checkpoint.warm_start import WarmStart, find_warm_start
from diloco.config.classes import fingerprint
from diloco.config.hugging_face import check_version
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.coordinator.status import ask_run_state
from diloco.data.batches import Data
from diloco.data.open import open_data
from diloco.data.prefetch import PrefetchedBatches
from diloco.durable import DiskFull, write_durably
from diloco.errors import ConfigError, DilocoError, FingerprintMismatch
from diloco.faults.training import rank_faults
from diloco.forecast.rank_memory import check_host_memory, forecast_rank
from diloco.io_thread import IoThread
from diloco.island.connection import Connection
from diloco.island.groups import make_groups
from diloco.island.record import Record
from diloco.island.session import DiLoCo
from diloco.launch.process.ending import end_with_starter
from diloco.launch.process.logs import log_to
from diloco.launch.rank.affinity import bind_next_to
from diloco.launch.rank.connect import connect
from diloco.launch.rank.device import backend_of, check_async_tp, check_precision, rank_device
from diloco.launch.rank.flight_recorder import FlightRecorders
from diloco.launch.rank.inputs import check_added
from diloco.launch.rank.job import Job, limit_collectives, meet
from diloco.launch.rank.text_share import open_text
from diloco.launch.rank.watch import RankWatch
from diloco.protocol.island.soundness import Mend
from diloco.protos.control_pb2 import Grant, JoinReply, RunStateReply
from diloco.security.security import Security
from diloco.telemetry.meter import ComputeWork
from diloco.trainer.flops import flops_per_token, peak_flops
from diloco.trainer.launched_step import LaunchedStep
from diloco.trainer.models.experts import imbalances
from diloco.trainer.models.families import (
    Model,
    Shape,
    check_mesh,
    check_optimizer_names,
    initialise_,
    shape_of,
)
from diloco.trainer.parallel.mesh import IslandMesh, make_mesh
from diloco.trainer.parallel.parallelize import compile_ahead, parallelize
from diloco.trainer.parallel.pipeline import Pipeline, build_part, parts_of
from diloco.trainer.state import load_parameters_
from diloco.trainer.trainer import InnerTrainer
from diloco.transport.identity import Role

logger = logging.getLogger(__name__)


def run_rank(config: Config, job: Job, *, coordinator_address: str, output_dir: Path) -> int:
    """Train as one rank of the selected island until the run is over, or stopped.

    Args:
        config: With an island selected; the coordinator's policy fields win over its own.
        job: This rank's place.
        coordinator_address: HOST:PORT.
        output_dir: Where events and logs go; made when missing.

    Returns:
        Exit code: 0, or that of the error with which the island stopped.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    log_to(output_dir / f"{config.island_id}-{job.island_rank}.log", logging.INFO)
    record = Record(config, output_dir)
    rank = _Rank(config, job, coordinator_address, output_dir, record)
    try:
        with connect(config, coordinator_address, record=record) as connection:
            rank.run(connection)
    except DilocoError as error:
        level = logging.ERROR if error.exit_code else logging.INFO
        logger.log(level, "island stops, exit_code=%d: %s", error.exit_code, error)
        if error.exit_code:
            rank.failed(error)  # mostly all ranks have agreed on it; else the others learn of it
        return error.exit_code
    except Exception as error:
        logger.exception("rank failed, island=%s rank=%d", config.island_id, job.island_rank)
        return rank.failed(error)
    finally:
        rank.close()
        record.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


class _Rank:
    """The parts of one rank, in the order in which they come to be."""

    def __init__(
        self, config: Config, job: Job, coordinator_address: str, output_dir: Path, record: Record
    ) -> None:
        self._config = config
        self._job = job
        self._coordinator_address = coordinator_address
        self._output_dir = output_dir
        self._is_leader = job.island_rank == 0
        self._record = record
        self._watch: RankWatch | None = None

    def run(self, connection: Connection) -> None:
        """Enter the run, train to its end or stop, and evaluate."""
        self._connection = connection
        self._enter(connection)
        self._train()
        self._finish()
        self._checkpoints.close()

    def close(self) -> None:
        """End what makes batches, and the watch."""
        if hasattr(self, "_batches"):
            self._batches.close()
        if self._watch is not None:
            self._watch.stop()

    def failed(self, error: Exception) -> int:
        """Find out whether another rank is to blame, and who; returns the exit code."""
        return 1 if self._watch is None else self._watch.failed(error)

    # -- start -----------------------------------------------------------------------------------

    def _enter(self, connection: Connection) -> None:
        """Meet the other ranks, join the run, and take up where this start begins."""
        self._check_launch()
        check_added(self._config)
        check_version(self._config.model.transformers)
        shape = shape_of(self._config.model)
        check_optimizer_names(shape, self._config.inner.optimizer)
        check_mesh(shape, self._config.island.mesh)
        at = self._config.checkpoint.mirror
        mirror = Mirror(at, self._config.island_id) if at else None
        self._record.open(self._job.island_rank)
        self._device = self._meet()
        island = self._config.island
        mesh = make_mesh(self._device, island.mesh, is_cast=island.compute.is_cast)
        limit_collectives(island.collective_timeout.seconds)
        data = open_data(self._config)
        # Too many held-out sequences are refused now, not after the training.
        data.evaluation(self._config.evaluation.num_sequences)
        warm, start_step = find_beginning(self._config, self._coordinator_address, connection.io)
        model = self._build_model(shape, mesh, warm)
        if island.compute.compile_backend:
            self._compile(model, mesh, data)
        self._join(connection, model, data, start_step)
        check_optimizer_names(shape, self._config.inner.optimizer)  # the policy may be another
        self._batches = batches = self._build_batches(mesh, data)
        self._trainer = self._build_trainer(model, mesh, data, batches)
        self._outer.loss_of = self._trainer.evaluate
        limit_collectives(island.collective_timeout.seconds)  # optimizers make groups, too
        work = flops_per_token(model.shape, self._config.data.sequence_length)
        self._record.compute = ComputeWork(work, self._job.num_ranks, peak_flops(self._device))
        self._checkpoints = IslandCheckpoints(
            connection,
            self._outer,
            self._trainer,
            batches,
            memory=self._open_memory(),
            receiver=open_state_transfer(connection, self._reply.grant, self._outer.plan),
            mirror=mirror,
            on_event=self._record.write,
        )
        self._checkpoints.take_up(warm)
        self._text = open_text(
            connection,
            batches,
            self._reply.claims_json,
            inner_step=self._outer.inner_step,
            on_event=self._record.write,
        )
        if self._is_leader:
            write_manifest(self._output_dir, self._config, self._outer, self._reply.grant, data)
        logger.info(
            "training begins: %r plan=%s device=%s",
            self._outer,
            self._outer.plan.fingerprint(),
            self._device,
        )

    def _check_launch(self) -> None:
        """Check that the launcher started what the configuration asks for.

        Raises:
            ConfigError: If it did not.
        """
        config, job = self._config, self._job
        if job.num_ranks != config.island.ranks:
            raise ConfigError(
                f"islands.{config.island_id}.ranks = {config.island.ranks}, but the launcher "
                f"started {job.num_ranks} processes (WORLD_SIZE): make them equal"
            )
        if config.island.memory_checkpoint_steps and job.memory is None:
            raise ConfigError(
                f"islands.{config.island_id}.memory_checkpoint_steps = "
                f"{config.island.memory_checkpoint_steps}: copies in memory outlive the ranks in "
                f"their supervisor, and another launcher has started these; start the island with "
                f"`diloco island` and without RANK, WORLD_SIZE and MASTER_ADDR, or set it to 0"
            )

    def _meet(self) -> torch.device:
        """Choose this rank's device, insist that it can do what is asked, and meet the others."""
        config, job = self._config, self._job
        torch.set_num_threads(config.island.threads)
        torch.set_num_interop_threads(1)
        device = rank_device(config.island.device, job, island=config.island_id)
        bind_next_to(device)
        check_async_tp(config.island.mesh, device, job, island=config.island_id)
        check_precision(config.island.precision, device, island=config.island_id)
        check_host_memory(
            config, num_local_ranks=job.num_local_ranks, is_on_cpu=device.type == "cpu"
        )
        backend = backend_of(device)
        meet(
            job,
            backend,
            is_cast=config.island.compute.is_cast,
            collective_s=config.island.collective_timeout.seconds,
        )
        if job.num_ranks > 1:
            self._watch = RankWatch(
                config,
                job,
                self._output_dir,
                recorders=FlightRecorders(has_nccl="nccl" in backend),
                inner_step=lambda: self._outer.inner_step if hasattr(self, "_outer") else 0,
                on_event=self._record.write,
            )
            self._watch.start()
        return device

    def _build_model(
        self, shape: Shape, mesh: IslandMesh, warm: WarmStart | None
    ) -> Model | Pipeline:
        """Build this rank's part of the model; its values are a warm start's, or the seed's."""
        config = self._config
        model = build_part(shape, mesh)
        for part in parts_of(model):
            parallelize(
                part,
                mesh,
                sequence_length=config.data.sequence_length,
                compute=config.island.compute,
            )
            if warm is None:
                initialise_(part, config.run.seed)
        if warm is not None:
            load_parameters_(model, warm.read)
        return model

    def _compile(self, model: Model | Pipeline, mesh: IslandMesh, data: Data) -> None:
        """Compile before the join, as long as nobody waits for this island."""
        island, began = self._config.island, time.monotonic()
        batch_size = island.tokens_per_inner_step // data.sequence_length
        compile_ahead(
            model,
            mesh,
            batch_size=batch_size // (mesh.dp_size * island.micro_batches),
            sequence_length=data.sequence_length,
        )
        logger.info("blocks are compiled, seconds=%.1f", time.monotonic() - began)

    def _join(
        self, connection: Connection, model: Model | Pipeline, data: Data, start_step: int
    ) -> None:
        """Join the run, and take the coordinator's policy.

        Raises:
            FingerprintMismatch: If the text is not the run's; says what of it has changed, if this
                island has trained here before.
        """
        connection.on_join = self._joined
        memory = forecast_rank(self._config, self._config.island, 0)
        try:
            self._outer = DiLoCo(
                model,
                self._config.outer,
                transport=connection,
                start_step=start_step,
                data_digest=data.digest,
                tokenizer_digest=data.tokenizer_digest,
                overwrite_initial=bool(self._config.run.warm_start),
                step_bytes=memory.peak_bytes - memory.parameter_bytes,
            )
        except FingerprintMismatch:
            check_earlier_text(self._output_dir, self._config, data)
            raise
        self._config = connection.config

    def _joined(self, reply: JoinReply) -> None:
        self._reply = reply

    def _build_batches(self, mesh: IslandMesh, data: Data) -> PrefetchedBatches:
        config = self._config
        batches = data.batches(
            slots=(self._outer.island_slot,),
            num_slots=config.max_islands,
            batch_size=config.island.tokens_per_inner_step // data.sequence_length,
            dp_coordinate=mesh.dp_coordinate,
            dp_size=mesh.dp_size,
        )
        return PrefetchedBatches(batches, self._device)

    def _build_trainer(
        self, model: Model | Pipeline, mesh: IslandMesh, data: Data, batches: PrefetchedBatches
    ) -> InnerTrainer:
        config = self._config
        job = self._job
        self._faults = rank_faults(
            os.environ, config.island_id, island_rank=job.island_rank, num_ranks=job.num_ranks
        )
        return InnerTrainer(
            model,
            mesh=mesh,
            batches=self._faults.around(batches),
            evaluation=data.evaluation(config.evaluation.num_sequences),
            config=config.inner,
            batch_size=config.island.tokens_per_inner_step // data.sequence_length,
            micro_batches=config.island.micro_batches,
            inner_steps=config.run.inner_steps,
            clock=time.monotonic,
        )

    def _open_memory(self) -> MemoryCopies | None:
        """Open the memory in which copies of this rank's state outlive it, if there are to be any.

        Raises:
            ConfigError: If the host has not enough of it.
        """
        config, island, job = self._config, self._config.island, self._job
        if job.memory is None or not island.memory_checkpoint_steps:
            return None
        memory = MemoryCopies(
            job.memory,
            model=self._trainer.model,
            optimizer=self._trainer.optimizer,
            about={
                "run": config.run.name,
                "island": config.island_id,
                "timeline": self._outer.timeline,
                "plan_fingerprint": self._outer.plan.fingerprint(),
                "ranks": island.ranks,
                "mesh": island.mesh.model_dump(),
            },
            num_hosts=job.num_hosts,
            copies=min(island.memory_copies, job.num_hosts),
            every=island.memory_checkpoint_steps,
            island=config.island_id,
            on_event=self._record.write,
            collective_s=island.collective_timeout.seconds,
        )
        memory.open()
        return memory

    # -- training --------------------------------------------------------------------------------

    def _train(self) -> None:
        """Make inner steps until the run is over, or until everybody stops."""
        outer, faults = self._outer, self._faults
        while not outer.is_over:
            self._checkpoints.check()
            launched = faults.step(self._trainer, outer.inner_step, outer.schedule_step)
            if launched.is_known:
                outer.log(**_figures(launched))
            else:
                outer.log_later(functools.partial(_figures, launched))
            outer.step(num_tokens=launched.num_tokens, bound=launched.bound)
            if outer.mend is not Mend.NOTHING:
                self._checkpoints.mend(outer.mend)
            if self._text is not None:
                self._text.settle(outer.inner_step)
            if outer.evaluation_due:
                self._evaluate_published()
            if outer.checkpoint_due:
                self._checkpoints.write()
            if outer.is_stopping:
                return
            self._checkpoints.copy()

    def _finish(self) -> None:
        """Evaluate, flush, and evaluate what is published; after a stop, only leave."""
        outer = self._outer
        self._checkpoints.end_training()
        if self._text is not None:
            self._text.close(outer.inner_step)
        if outer.is_stopping:
            outer.finish()
            return
        with self._record.evaluating():
            outer.evaluated(self._trainer.evaluate(), parameters="local")
        outer.finish()
        if not outer.is_leaving:
            self._evaluate_published()

    def _evaluate_published(self) -> None:
        with self._outer.global_parameters():
            self._outer.evaluated(self._trainer.evaluate())


def _figures(launched: LaunchedStep) -> dict[str, float]:
    """Read the figures of an inner step, named as `DiLoCo.log` takes them."""
    metrics = launched.read()
    loads = imbalances(metrics.expert_loads)
    return {
        "loss": metrics.loss,
        "duration_s": metrics.duration_s,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        **{f"expert_imbalance/{name}": value for name, value in loads.items()},
    }


# -- beginning and manifest ----------------------------------------------------------------------


def find_beginning(
    config: Config, coordinator_address: str, io: IoThread
) -> tuple[WarmStart | None, int]:
    """Open the warm start, and say at which inner step the run began or will; collective.

    A run that has published anything, or was resumed, has left it behind: an island that
    returns needs no more than that inner step, and the source may be gone.

    Args:
        config: With an island selected.
        coordinator_address: HOST:PORT.
        io: Where the leader asks.

    Returns:
        The warm start, None where there is none or it lies behind; and the inner step.

    Raises:
        ConfigError: As `find_warm_start`.
        CoordinatorUnavailable: If it does not answer for `transport.unreachable`.
        IslandFailed: On the other ranks, if the leader had no answer.
    """
    if not config.run.warm_start:
        return None, 0
    patience_s = config.transport.unreachable.seconds

    def start_step() -> int | None:
        security = Security.of(config, Role.ISLAND, config.island_id).knowing(coordinator_address)
        transport = security.transport(coordinator_address, Role.COORDINATOR)

        async def ask() -> RunStateReply:
            try:
                return await ask_run_state(transport, config.island_id, patience_s=patience_s)
            finally:
                await transport.close()

        run_state = io.run(ask())
        return run_state.start_step if run_state.timeline or run_state.has_published else None

    # The default group would give up while the leader still waits for the coordinator.
    timeout_s = config.island.collective_timeout.seconds
    groups = make_groups(None, patience_s=patience_s, collective_s=timeout_s)
    told = groups.leader_says("could not learn where the run began", start_step)
    if told is not None:
        return None, told
    warm = find_warm_start(config)
    assert warm is not None
    return warm, warm.start_step


def write_manifest(
    output_dir: Path, config: Config, outer: DiLoCo, grant: Grant, data: Data
) -> None:
    """Write down what this start of the island, which holds `grant`, trains with."""
    manifest = {
        "run": config.run.name,
        "island": config.island_id,
        "island_slot": outer.island_slot,
        "incarnation": grant.incarnation,
        "timeline": grant.timeline,
        "start_step": outer.start_step,
        "config_fingerprint": fingerprint(config),
        "plan_fingerprint": outer.plan.fingerprint(),
        "corpus_sha256": data.digest,
        "corpus_documents": data.num_documents,
        "text": data.content(),
        "threads": config.island.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps(manifest, indent=2) + "\n"
    try:
        write_durably(_manifest_path(output_dir, config), [text.encode()])
    except DiskFull as error:
        logger.error("the manifest of this start is not written, and training goes on: %s", error)


def check_earlier_text(output_dir: Path, config: Config, data: Data) -> None:
    """Say what has changed since this island's last start, if the text has.

    Raises:
        FingerprintMismatch: Naming the source and its part, before and now.
    """
    try:
        before = json.loads(_manifest_path(output_dir, config).read_text())
        content = before["text"] if before["run"] == config.run.name else data.content()
    except (OSError, ValueError, KeyError):
        return  # it never trained here: nothing to compare with
    try:
        data.check_content(content)
    except ConfigError as changed:
        raise FingerprintMismatch(str(changed)) from changed


def _manifest_path(output_dir: Path, config: Config) -> Path:
    return output_dir / f"manifest-{config.island_id}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of one rank; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m diloco.launch.rank", description=__doc__)
    parser.add_argument("--config", required=True, help="resolved TOML file of the run")
    parser.add_argument("--island", required=True, help="name of the island")
    parser.add_argument("--coordinator", required=True, help="HOST:PORT")
    parser.add_argument("--output", required=True, type=Path, help="directory of events and logs")
    parser.add_argument("--rendezvous", default="env://", help="where the ranks meet")
    parser.add_argument("--hosts", default=1, type=int, help="hosts of the island")
    parser.add_argument(
        "--memory", type=int, help="inherited descriptor of the memory for copies of this rank"
    )
    parser.add_argument(
        "--supervised", action="store_true", help="end when standard input is closed"
    )
    options = parser.parse_args(arguments)
    if options.supervised:
        end_with_starter()
    try:
        config = load_config(options.config, island=options.island)
        job = Job.from_environment(
            os.environ,
            rendezvous=options.rendezvous,
            num_hosts=options.hosts,
            memory=options.memory,
        )
    except ConfigError as error:
        logger.error("rank cannot start: %s", error)
        return error.exit_code
    return run_rank(config, job, coordinator_address=options.coordinator, output_dir=options.output)
