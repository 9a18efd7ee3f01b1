"""One rank of an island: builds everything once, trains, and ends with an exit code.

    RANK=0 WORLD_SIZE=2 ... python -m diloco.launch.rank --config resolved.toml --island eu-west
        --coordinator HOST:PORT --output DIR

`diloco island` starts the ranks of one host like this; under torchrun or srun it calls `run_rank`
in the job's own processes. Writes events-ISLAND-RANK.jsonl and ISLAND-RANK.log to DIR, the leader
also manifest-ISLAND.json.

Source: design.md section 2; protocol.md sections 6 and 13.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import random
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.config.classes import fingerprint, identity_json
from diloco.config.load import load_config, with_policy
from diloco.config.schema import Config
from diloco.errors import ConfigError, DilocoError
from diloco.inner.data import TextCorpus, TextData
from diloco.inner.model import Llama, LlamaShape, build_model, initialise_
from diloco.inner.parallelize import IslandMesh, make_mesh, parallelize
from diloco.inner.trainer import InnerTrainer
from diloco.launch.build import build_plan, build_schedule, link_profile
from diloco.launch.carrier_link import carrier_link
from diloco.launch.job import Job, meet
from diloco.launch.record import RankRecord
from diloco.outer.fragments import Plan
from diloco.sync.agreement import Agreement
from diloco.sync.exchange import Exchange, ExchangeRules
from diloco.sync.io_thread import IoThread
from diloco.sync.outer_loop import OuterLoop
from diloco.sync.registration import Island, IslandState, Registration
from diloco.sync.shards import LaneShards, canonical_parameters
from diloco.telemetry.sinks import JsonlSink
from protos.control_pb2 import JoinReply
from transport.contracts import Transport
from transport.grpc_client import GrpcTransport
from transport.link import LinkProfile, LinkState
from transport.retry import RetryPolicy
from transport.shaped import ShapedTransport

logger = logging.getLogger(__name__)

#: Seconds that a failed island spends on telling the coordinator.
_LAST_WORD_S = 5.0
#: Exit code of a rank whose supervisor died.
_ORPHANED = 40


def run_rank(config: Config, job: Job, *, coordinator_address: str, output_dir: Path) -> int:
    """Train as one rank of the selected island until the run is over.

    Args:
        config: With an island selected; the coordinator's policy fields win over its own.
        job: This rank's place.
        coordinator_address: HOST:PORT.
        output_dir: Where events and logs go; made when missing.

    Returns:
        Exit code: 0, or that of the error with which the island stopped.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    _log_to(output_dir / f"{config.island_id}-{job.island_rank}.log")
    rank = _Rank(config, job, coordinator_address, output_dir)
    try:
        rank.start()
        rank.train()
        rank.finish()
    except DilocoError as error:
        logger.error("island stops, exit_code=%d: %s", error.exit_code, error)
        rank.fail(error.exit_code, str(error))
        return error.exit_code
    except Exception as error:
        logger.exception("rank failed, island=%s rank=%d", config.island_id, job.island_rank)
        rank.fail(1, repr(error))
        return 1
    rank.close()
    return 0


class _Rank:
    """The parts of one rank, in the order in which they come to be."""

    def __init__(
        self, config: Config, job: Job, coordinator_address: str, output_dir: Path
    ) -> None:
        self._config = config
        self._job = job
        self._coordinator_address = coordinator_address
        self._output_dir = output_dir
        self._is_leader = job.island_rank == 0
        self._io = IoThread()
        self._rng = random.Random(secrets.randbits(64))
        self._registration: Registration | None = None
        self._record = RankRecord(
            JsonlSink(
                output_dir / f"events-{config.island_id}-{job.island_rank}.jsonl",
                {"island": config.island_id, "island_rank": job.island_rank},
                time.time,
            ),
            is_leader=self._is_leader,
            clock=time.monotonic,
        )

    # -- start -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Meet the other ranks, join the run, and agree with it on version 0."""
        config, job = self._config, self._job
        if job.num_ranks != config.island.ranks:
            raise ConfigError(
                f"islands.{config.island_id}.ranks = {config.island.ranks}, but the launcher "
                f"started {job.num_ranks} processes (WORLD_SIZE): make them equal"
            )
        profile = link_profile(config)
        self._record.open()
        self._io.start()
        torch.set_num_threads(config.island.threads)
        torch.set_num_interop_threads(1)
        # The leader may wait that long for the coordinator, and again for a syncer.
        patience_s = 2 * (config.transport.unreachable_s + config.transport.rpc_timeout_s)
        self._groups = meet(job, patience_s=patience_s)
        mesh = make_mesh(torch.device("cpu"), **config.island.mesh.model_dump())
        model = build_model(LlamaShape.from_config(config.model))
        parallelize(model, mesh, sequence_length=config.data.sequence_length)
        parameters = canonical_parameters(model)
        plan = build_plan(config, parameters)
        corpus = TextCorpus.from_stdlib()
        length = config.data.sequence_length
        data = TextData(corpus, sequence_length=length, seed=config.run.seed)
        # Too many held-out sequences are refused now, not after the training.
        data.evaluation(config.evaluation.num_sequences)
        reply = self._join(plan, corpus)
        self._config = with_policy(config, reply.policy_json)
        data.evaluation(self._config.evaluation.num_sequences)
        initialise_(model, config.run.seed)
        if self._is_leader:
            self._write_manifest(corpus, reply, plan)
        self._trainer = self._build_trainer(model, mesh, data, reply.island_slot)
        self._session = self._build_session(plan, parameters, reply, profile)
        self._io.drive(self._session.starting())
        if self._groups.start is not None:
            dist.barrier(self._groups.start)
        logger.info("training begins, island=%s plan=%s", config.island_id, plan.fingerprint())

    def _join(self, plan: Plan, corpus: TextCorpus) -> JoinReply:
        """Let the leader join and everybody have the answer."""
        answer: list[bytes | None] = [None]
        if self._is_leader:
            config, retry = self._config, self._config.transport.retry
            island = Island(
                run=config.run.name,
                island_id=config.island_id,
                identity_json=identity_json(config),
                plan_json=plan.to_json(),
                corpus_sha256=corpus.sha256,
                num_ranks=self._job.num_ranks,
                start_id=secrets.token_hex(16),
            )
            # The coordinator's channel is not shaped: it carries a few hundred bytes a second.
            self._registration = Registration(
                self._connect(self._coordinator_address, None),
                island,
                rpc_deadline_s=config.transport.rpc_timeout_s,
                policy=RetryPolicy(
                    first_wait_s=retry.first_wait_s,
                    max_wait_s=retry.max_wait_s,
                    budget_s=config.transport.unreachable_s,
                ),
                rng=self._rng,
            )
            answer = [self._io.run(self._registration.join()).SerializeToString()]
        if self._groups.start is not None:
            dist.broadcast_object_list(answer, src=0, group=self._groups.start)
        assert answer[0] is not None
        return JoinReply.FromString(answer[0])

    def _write_manifest(self, corpus: TextCorpus, reply: JoinReply, plan: Plan) -> None:
        """Write down what this start of the island trains with."""
        manifest = {
            "run": self._config.run.name,
            "island": self._config.island_id,
            "island_slot": reply.island_slot,
            "incarnation": reply.grant.incarnation,
            "timeline": reply.grant.timeline,
            "config_fingerprint": fingerprint(self._config),
            "plan_fingerprint": plan.fingerprint(),
            "corpus_sha256": corpus.sha256,
            "corpus_documents": corpus.num_documents,
            "threads": self._config.island.threads,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        path = self._output_dir / f"manifest-{self._config.island_id}.json"
        path.write_text(json.dumps(manifest, indent=2) + "\n")

    def _build_trainer(
        self, model: Llama, mesh: IslandMesh, data: TextData, island_slot: int
    ) -> InnerTrainer:
        config = self._config
        return InnerTrainer(
            model,
            mesh=mesh,
            data=data,
            config=config.inner,
            island_slot=island_slot,
            batch_size=config.island.tokens_per_inner_step // data.sequence_length,
            inner_steps=config.run.inner_steps,
            clock=time.monotonic,
        )

    def _build_session(
        self,
        plan: Plan,
        parameters: Mapping[str, Tensor],
        reply: JoinReply,
        profile: LinkProfile | None,
    ) -> OuterLoop:
        config, groups, retry = self._config, self._groups, self._config.transport.retry
        shards = LaneShards(plan, parameters, group=groups.shards)
        link = None if profile is None else self._shape(profile, plan, shards)
        address = reply.syncers[0].address
        exchange = self._exchange = Exchange(
            plan,
            {f.fragment_id: shards.lanes_of(f.fragment_id) for f in plan.fragments},
            control=self._connect(address, link),
            data=self._connect(address, link),
            grant=reply.grant,
            rules=ExchangeRules(
                uplink_codec=config.outer.uplink_codec,
                error_feedback=config.outer.error_feedback,
                rpc_deadline_s=config.transport.rpc_timeout_s,
                unreachable_s=config.transport.unreachable_s,
                first_wait_s=retry.first_wait_s,
                max_wait_s=retry.max_wait_s,
            ),
            rng=self._rng,
            on_event=self._record.write,
        )
        if self._registration is not None:
            reporting = self._registration.start_reporting
            self._io.post(reporting, lambda: self._record.progress, exchange.fail)
        return OuterLoop(
            plan,
            build_schedule(config),
            shards,
            exchange,
            self._io,
            Agreement(groups.agreement),
            timeline=reply.grant.timeline,
            local_mix=config.outer.local_mix,
            clock=time.monotonic,
            on_event=self._record.write,
        )

    def _shape(
        self, profile: LinkProfile, plan: Plan, shards: LaneShards
    ) -> tuple[LinkState, LinkState]:
        """Give this rank its part of the island's link; both planes use it."""
        part = carrier_link(
            profile,
            (
                shards.carrier(fragment.fragment_id, lane.lane_id)
                for fragment in plan.fragments
                for lane in fragment.lanes
            ),
        )
        name = f"{self._config.run.seed}/{self._config.island_id}/{self._job.island_rank}"
        return part.states(random.Random(name).getrandbits(64))

    def _connect(self, address: str, link: tuple[LinkState, LinkState] | None) -> Transport:
        transport = GrpcTransport(address, chunk_bytes=self._config.transport.chunk_bytes)
        return transport if link is None else ShapedTransport(transport, *link)

    # -- training --------------------------------------------------------------------------------

    def train(self) -> None:
        """Make all inner steps, the outer loop after each."""
        session, record, config = self._session, self._record, self._config
        record.begin()
        schedule = build_schedule(config)
        for inner_step in range(1, config.run.inner_steps + 1):
            is_quiet = session.num_in_flight == 0
            metrics = self._trainer.inner_step(inner_step - 1)
            record.step(metrics, is_quiet=is_quiet)
            self._io.drive(session.stepping(metrics.num_tokens))
            if schedule.due(inner_step):  # no collective in a step that has none anyway
                self._sum_bytes()
            record.renew(IslandState.TRAINING, session)
            if self._is_evaluated_after(inner_step):
                self._evaluate("published", session.global_parameters())

    def finish(self) -> None:
        """Evaluate, flush, evaluate what is published, and leave."""
        session, record = self._session, self._record
        self._evaluate("local", contextlib.nullcontext())
        record.renew(IslandState.FLUSHING, session)
        self._io.drive(session.finishing())
        wall_s = record.wall_s
        self._evaluate("published", session.global_parameters())
        self._io.run(self._exchange.stop())
        record.ended(session, self._exchange, wall_s=wall_s)
        record.renew(IslandState.FINISHED, session)
        # All ranks have stopped their exchange when the leader leaves and the run may end.
        self._sum_bytes()
        self._leave(0, "finished", self._config.transport.unreachable_s)

    def _is_evaluated_after(self, inner_step: int) -> bool:
        every = self._config.evaluation.every_inner_steps
        is_last = inner_step == self._config.run.inner_steps
        return every > 0 and inner_step % every == 0 and not is_last

    def _evaluate(self, parameters: str, in_place: AbstractContextManager[None]) -> None:
        """Measure the held-out loss of the parameters that are the model's in a context."""
        with self._record.evaluating(), in_place:
            loss = self._trainer.evaluate(self._config.evaluation.num_sequences)
        self._record.evaluated(self._session.inner_step, parameters, loss)

    def _sum_bytes(self) -> None:
        """Sum the bytes that all ranks have moved, for the leader's reports; collective."""
        moved = torch.tensor([self._exchange.bytes_up, self._exchange.bytes_down])
        if self._groups.shards is not None:
            dist.all_reduce(moved, group=self._groups.shards)
        self._record.moved(*moved.tolist())

    # -- end -------------------------------------------------------------------------------------

    def fail(self, exit_code: int, reason: str) -> None:
        """Tell the coordinator, as far as it listens."""
        self._record.failed()
        self._leave(exit_code, reason, _LAST_WORD_S)
        self._record.close()

    def close(self) -> None:
        """Release everything, in order, after `finish`."""
        self._io.stop()
        self._record.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _leave(self, exit_code: int, reason: str, at_most_s: float) -> None:
        if self._registration is not None:
            self._io.run(
                self._registration.leave(
                    exit_code, reason, last=self._record.progress, at_most_s=at_most_s
                )
            )


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def exit_at_once(code: int) -> NoReturn:
    """End this process, whatever its threads wait for.

    The destructor of a process group waits for collectives that a failed rank will never join.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_supervisor() -> None:
    """Wait for the end of standard input, which the supervisor holds open while it lives."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(_ORPHANED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of one rank; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m diloco.launch.rank", description=__doc__)
    parser.add_argument("--config", required=True, help="resolved TOML file of the run")
    parser.add_argument("--island", required=True, help="name of the island")
    parser.add_argument("--coordinator", required=True, help="HOST:PORT")
    parser.add_argument("--output", required=True, type=Path, help="directory of events and logs")
    parser.add_argument("--rendezvous", default="env://", help="where the ranks meet")
    parser.add_argument(
        "--supervised", action="store_true", help="end when standard input is closed"
    )
    options = parser.parse_args(arguments)
    if options.supervised:
        threading.Thread(target=_die_with_supervisor, daemon=True).start()
    try:
        config = load_config(options.config, island=options.island)
        job = Job.from_environment(os.environ, rendezvous=options.rendezvous)
    except ConfigError as error:
        logger.error("rank cannot start: %s", error)
        return error.exit_code
    return run_rank(config, job, coordinator_address=options.coordinator, output_dir=options.output)


if __name__ == "__main__":
    exit_at_once(main())
