"""Compute utilisation of a scenario, by events: who waits how long for which fragment.

The steps at which fragments are sent and merged are the product's (`diloco.outer.schedule`), what
is in a fragment its plan (`diloco.outer.fragments`), who of decoupled islands is counted its rounds
(`diloco.simulations.runs.actors`, `islands`); links are `diloco.simulations.engine.network`. A
payload is released piece by piece while the backward pass of the sending step reaches its layers;
an island's pieces leave its line one after the other; an island stands still at the merge until
everything is there.

Source: Streaming DiLoCo (arXiv 2501.18512), its model of compute utilisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import simpy

from diloco.baseline.time_model import MSS_BYTES, PACKET_BYTES, Reduction
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.outer.schedule import Schedule
from diloco.simulations.engine.clock import Engine, Steps
from diloco.simulations.engine.network import Network, Path, Pipe, Tcp
from diloco.simulations.engine.timeline import Span, SpanKind
from diloco.simulations.runs.islands import StepDraws
from diloco.simulations.scenarios.decoupled import decoupled_pace
from diloco.simulations.scenarios.scenario import Scenario
from diloco.simulations.scenarios.wallclock import FORWARD_SHARE, ring_latency_s
from diloco.transport.shaping.link import LinkProfile

#: Rounds, and how many of them warm up, where one fragment at a time is under way; and where
#: several are, which fill a link that is a little too thin only after tau steps more than it has.
_ONE_AT_A_TIME, _SEVERAL = (3, 1), (32, 16)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """What a scenario comes to, in the rounds after those that warm up.

    Attributes:
        utilisation: Share of the time in inner steps, mean over islands.
        stall_s: Seconds a round for which the slowest island stood still.
        round_s: Wall time of a round.
        bits_up: Payload that the busiest island's line sends a round, its own syncer's included.
        bits_down: Payload that it receives.
        pace: Versions that were published over those that the schedule has; 1 where islands wait.
        spans: What happened when, of the whole simulation.
    """

    utilisation: float
    stall_s: float
    round_s: float
    bits_up: float
    bits_down: float
    pace: float = 1.0
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def useful(self) -> float:
        """Share of the time in inner steps, where rounds keep pace; what bandwidth is needed for.

        Islands of a decoupled run train at any bandwidth; it decides how often they hear of each
        other.
        """
        return min(self.utilisation, self.pace)


def simulate(
    scenario: Scenario,
    *,
    link: LinkProfile | None = None,
    seed: int = 0,
    rounds: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Utilisation:
    """Simulate some rounds of a scenario.

    Args:
        scenario: What is simulated.
        link: The line of every island in place of the scenario's.
        seed: Of steps, jitter and loss.
        rounds: At least 2, of which the first is not counted; 0: as many as it takes to be steady.
        on_progress: Told (inner steps made, of how many), where islands wait for each other.
    """
    profile = link or scenario.profile
    if scenario.method == "decoupled":
        plan = layered_plan(scenario)
        pace, share = decoupled_pace(scenario, profile, plan, seed, rounds or _ONE_AT_A_TIME[0])
        return Utilisation(
            utilisation=pace.utilisation,
            stall_s=pace.round_s * (1 - pace.utilisation),
            round_s=pace.round_s,
            bits_up=pace.bits_up,
            bits_down=pace.bits_down,
            pace=share,
            spans=pace.spans,
        )
    return _Simulation(scenario, profile, seed, rounds, on_progress).run()


def layered_plan(scenario: Scenario) -> Plan:
    """Cut a model of equal layers into fragments, as the product does."""
    shape = (scenario.layer_numel,)
    return make_plan(
        [TensorSpec(f"layers.{layer}.weight", shape) for layer in range(scenario.layers)],
        num_fragments=scenario.fragments,
        pattern=scenario.fragment_pattern,
        num_lanes=1,
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a fragment: when it is released, as a share of the sending step, and its values."""

    share: float
    numel: float


class _Exchange:
    """One round of one fragment, over all islands."""

    def __init__(self, engine: Engine, islands: int) -> None:
        self.num_arrived = 0
        self.done = [engine.event() for _ in range(islands)]


class _Simulation:
    """One scenario whose islands wait for each other."""

    def __init__(
        self,
        scenario: Scenario,
        profile: LinkProfile,
        seed: int,
        rounds: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._on_progress = on_progress
        self._scenario, self._profile = scenario, profile
        self._engine = Engine(seed)
        self._network = Network(self._engine)
        self._pieces = _pieces(scenario, layered_plan(scenario))
        period, tau = scenario.inner_steps_per_round, scenario.overlap_steps

        def scheduled(num_rounds: int) -> Schedule:
            return Schedule.make(
                inner_steps_per_round=period,
                num_fragments=scenario.fragments,
                overlap_steps=tau,
                inner_steps=num_rounds * period + tau,
                flush=False,
            )

        usual = _ONE_AT_A_TIME if scheduled(1).is_one_at_a_time else _SEVERAL
        self._rounds, self._warm_up = (rounds, 1) if rounds else usual
        self._schedule = scheduled(self._rounds)
        # One fragment of all that are sent after the same inner steps.
        self._leads = {phase % period: p for p, phase in enumerate(self._schedule.phases)}.values()
        self._exchanges: dict[tuple[int, int], _Exchange] = {}
        self._lines = [simpy.Resource(self._engine, 1) for _ in range(scenario.islands)]
        self._insides = [simpy.Resource(self._engine, 1) for _ in range(scenario.islands)]
        rtt_s = profile.up.delay_s + profile.down.delay_s
        self._rtt_s = rtt_s
        self._hub = [Pipe(side, scenario.syncer_bps) for side in ("hub-in", "hub-out")]
        self._outs = [Pipe(f"{i}-up", profile.up.bandwidth_bps) for i in range(scenario.islands)]
        self._ins = [Pipe(f"{i}-down", profile.down.bandwidth_bps) for i in range(scenario.islands)]
        self._tcp = Tcp(scenario.tcp_loss, scenario.window_bytes) if scenario.has_tcp else None
        self._jitter = self._engine.stream("jitter")
        # Inside an island a rate is of payload: the line's TCP headers take nothing of it.
        inside_bps = scenario.inside_bps * (PACKET_BYTES / MSS_BYTES if self._tcp else 1.0)
        self._ranks = [Pipe(f"{i}-ranks", inside_bps) for i in range(scenario.islands)]
        self.spans: list[Span] = []
        self._bits_up = [0.0] * scenario.islands
        self._bits_down = [0.0] * scenario.islands

    def run(self) -> Utilisation:
        """Run to the end of all islands."""
        scenario = self._scenario
        marks: list[list[tuple[float, float]]] = [[] for _ in range(scenario.islands)]
        ends = [self._engine.process(self._train(i, marks[i])) for i in range(scenario.islands)]
        self._engine.run(self._engine.all_of(ends))
        shares, stalls, walls = [], [], []
        for mark in marks:
            (first, compute_before), (last, compute_after) = mark[self._warm_up - 1], mark[-1]
            wall_s, compute_s = last - first, compute_after - compute_before
            shares.append(compute_s / wall_s)
            stalls.append((wall_s - compute_s) / (self._rounds - self._warm_up))
            walls.append(wall_s / (self._rounds - self._warm_up))
        return Utilisation(
            utilisation=sum(shares) / len(shares),
            stall_s=max(stalls),
            round_s=max(walls),
            bits_up=max(self._bits_up) / self._rounds,
            bits_down=max(self._bits_down) / self._rounds,
            spans=tuple(self.spans),
        )

    def _train(self, island: int, marks: list[tuple[float, float]]) -> Steps:
        """Compute to the next step that sends or merges; mark the ends of whole rounds."""
        schedule, engine = self._schedule, self._engine
        period, step_s = schedule.inner_steps_per_round, self._steps(island)
        last = self._rounds * period
        step, compute_s, outstanding = 0, 0.0, list[tuple[int, int]]()
        while step < schedule.inner_steps:
            following = self._boundary(step, [merge for merge, _ in outstanding])
            began = engine.now
            idle_s = sum(step_s() for _ in range(following - step - 1))
            if idle_s:
                yield engine.timeout(idle_s)
            own_s = step_s()
            due = schedule.due(following)
            for p in due:
                engine.process(self._send(island, p, following, own_s))
            yield engine.timeout(own_s)
            compute_s += idle_s + own_s
            step = following
            self._span(island, None, "compute", began)
            if island == 0:
                self._on_progress(step, schedule.inner_steps)
            outstanding += [(schedule.merge_step(step), p) for p in due]
            for merge, p in [each for each in outstanding if each[0] <= step]:
                outstanding.remove((merge, p))
                yield from self._merge(island, p, merge - schedule.overlap_steps)
            if step % period == 0 and step <= last:
                marks.append((engine.now, compute_s))

    def _boundary(self, step: int, merges: Sequence[int]) -> int:
        schedule = self._schedule
        period = schedule.inner_steps_per_round
        dues = [schedule.next_due(p, step) for p in self._leads]
        steps = [due for due in dues if due is not None]
        return min([*steps, *merges, schedule.inner_steps, (step // period + 1) * period])

    def _steps(self, island: int) -> Callable[[], float]:
        scenario, stream = self._scenario, self._engine.stream("step", str(island))
        skew = 1 + scenario.step_skew * island / (scenario.islands - 1)
        return StepDraws(scenario.step_s * skew, scenario.step_noise, stream)

    def _merge(self, island: int, p: int, due: int) -> Steps:
        began = self._engine.now
        done = self._exchange(p, due).done[island]
        if not done.processed:
            yield done
        if self._engine.now > began:
            self._span(island, p, "wait", began)

    def _exchange(self, p: int, due: int) -> _Exchange:
        return self._exchanges.setdefault((p, due), _Exchange(self._engine, self._scenario.islands))

    # -- transfers -------------------------------------------------------------------------------

    def _send(self, island: int, p: int, due: int, step_s: float) -> Steps:
        """Release the pieces of a fragment during the step that begins now, and exchange them."""
        scenario, engine = self._scenario, self._engine
        began, exchange = engine.now, self._exchange(p, due)
        pieces = self._pieces[p]
        leaving = []
        for piece in pieces:
            until = began + piece.share * step_s
            if until > engine.now:
                yield engine.timeout(until - engine.now)
            leaving.append(engine.process(self._leave(island, p, piece, len(pieces))))
        released = began + pieces[0].share * step_s
        yield engine.all_of(leaving)
        latency_s = self._latency_s() + self._jitter.uniform(0.0, self._profile.up.jitter_s)
        if latency_s:
            yield engine.timeout(latency_s)
        self._span(island, p, "send", released)
        exchange.num_arrived += 1
        if exchange.num_arrived == scenario.islands:
            numel = sum(each.numel for each in pieces)
            for other in range(scenario.islands):
                engine.process(self._publish(other, p, due, numel))

    def _leave(self, island: int, p: int, piece: _Piece, num_pieces: int) -> Steps:
        """Have a piece leave an island; one after the other, in the order of their release."""
        scenario = self._scenario
        bits = piece.numel * scenario.bits_up
        ring = self._ring(bits)
        if scenario.method == "hierarchical" and ring.inside_s:
            with self._insides[island].request() as turn:
                yield turn
                yield self._engine.timeout(ring.inside_s)
        path = self._way_up(island, p)
        if path is None:
            return
        with self._lines[island].request() as turn:
            yield turn
            sent_bits = self._sent_bits(bits, piece.numel)
            self._bits_up[island] += sent_bits
            if scenario.topology == "allreduce":
                self._bits_down[island] += sent_bits
            elif scenario.topology == "sites":
                self._bits_down[p % scenario.islands] += sent_bits
            yield self._network.send(path, sent_bits / 8, scenario.streams)

    def _sent_bits(self, bits: float, numel: float) -> float:
        """Bits of a piece on the line of an island."""
        scenario = self._scenario
        if scenario.method == "data-parallel":
            n = scenario.islands * scenario.ranks
            return bits * 2 * (n - 1) / n
        share = (scenario.islands - 1) / scenario.islands
        if scenario.method == "hierarchical":
            return bits * 2 * share
        if scenario.topology == "allreduce":
            return (bits + numel * scenario.down_bits) * share
        return bits

    def _latency_s(self) -> float:
        """Delay from the last piece's leaving until it counts."""
        scenario = self._scenario
        if scenario.method == "data-parallel":
            return ring_latency_s(scenario.islands, scenario.ranks, self._rtt_s)
        if scenario.method == "hierarchical":
            return self._ring(0.0).latency_s
        return self._rtt_s if scenario.topology == "allreduce" else self._profile.up.delay_s

    def _ring(self, bits: float) -> Reduction:
        scenario = self._scenario
        return Reduction(
            num_islands=scenario.islands,
            num_ranks=scenario.ranks,
            num_bytes=round(bits / 8),
            wan_bps=1.0,
            rtt_s=self._rtt_s,
            inside_bps=scenario.inside_bps,
        )

    def _way_up(self, island: int, p: int) -> Path | None:
        """Where an island's pieces go; None: nowhere, its own site merges them."""
        scenario, up = self._scenario, self._profile.up
        if scenario.topology != "star":  # from one line into another
            down_bps = self._profile.down.bandwidth_bps
            up = replace(up, bandwidth_bps=min(up.bandwidth_bps, down_bps))
        out, pipes = self._outs[island], tuple[Pipe, ...]()
        if scenario.topology == "sites":
            home = p % scenario.islands
            if home == island:
                return None
            pipes = (out, self._ins[home])
        elif scenario.topology == "star":
            pipes = (out, self._hub[0])
        else:  # to the next one of a ring, which for data parallel goes through its ranks, too
            pipes = (out, self._ins[(island + 1) % scenario.islands])
            if scenario.method == "data-parallel":
                pipes = (*pipes, self._ranks[island])
        return Path(f"{island}-up-{p}", pipes, up, self._rtt_s, self._tcp)

    def _publish(self, island: int, p: int, due: int, numel: float) -> Steps:
        """Bring what was merged to an island."""
        scenario, exchange = self._scenario, self._exchange(p, due)
        home = p % scenario.islands
        is_home = scenario.topology == "sites" and home == island
        if scenario.topology != "allreduce" and not is_home:
            source = self._hub[1] if scenario.topology == "star" else self._outs[home]
            pipes = (source, self._ins[island])
            down = Path(f"{island}-down", pipes, self._profile.down, self._rtt_s, self._tcp)
            bits, began = numel * scenario.down_bits, self._engine.now
            self._bits_down[island] += bits
            if scenario.topology == "sites":
                self._bits_up[home] += bits
            yield self._network.cross(down, bits / 8, scenario.streams)
            self._span(island, p, "fetch", began)
        exchange.done[island].succeed()

    def _span(self, island: int, fragment: int | None, kind: SpanKind, began: float) -> None:
        if self._engine.now > began:
            name = f"island-{island}"
            self.spans.append(Span(name, None, fragment, kind, began, self._engine.now))


def _pieces(scenario: Scenario, plan: Plan) -> list[list[_Piece]]:
    """Cut every fragment into what is released together, in the order of the backward pass."""
    return [_pieces_of(scenario, plan, p) for p in range(len(plan.fragments))]


def _pieces_of(scenario: Scenario, plan: Plan, fragment_id: int) -> list[_Piece]:
    fragment = plan.fragments[fragment_id]
    if scenario.buckets:
        numel = fragment.numel / scenario.buckets
        reached = [_Piece((j + 1) / scenario.buckets, numel) for j in range(scenario.buckets)]
    else:
        reached = [
            _Piece(1 - int(entry.name.split(".")[1]) / scenario.layers, entry.end - entry.start)
            for entry in fragment.entries
        ]
    reached.sort(key=lambda piece: piece.share)
    if scenario.release == "step":
        return [replace(piece, share=1.0) for piece in reached]
    return [
        replace(piece, share=FORWARD_SHARE + piece.share * (1 - FORWARD_SHARE)) for piece in reached
    ]
