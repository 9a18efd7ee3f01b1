"""The peer of an island under the virtual clock: to its own island it is the syncer.

It polls the decider, and answers its island as `diloco.island.peer.peer` does; what goes on between
the peers is `diloco.simulations.runs.fragment_peer`, which says what the real one would take. It
ends with its island, and begins with its next start.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import simpy

from diloco.island.peer.fragment import Own
from diloco.outer.fragments import Fragment
from diloco.protocol.island.ledger import Outstanding
from diloco.protocol.rounds.messages import key_message, outcome_message
from diloco.protocol.rounds.terms import Admission, RoundKey
from diloco.protos import fragment_pb2 as wire
from diloco.simulations.engine.clock import Crew, Signal, Steps
from diloco.simulations.runs.actors import left_over
from diloco.simulations.runs.fragment_peer import PeerSetting, SimulatedFragmentPeer
from diloco.simulations.runs.islands import Sums
from diloco.syncer.polls import is_news


class SimulatedPeer:
    """All fragments of an island; `sums`, the island's, count what crosses its line."""

    def __init__(self, setting: PeerSetting, name: str, fragments: Iterable[Fragment]) -> None:
        """Hold version 0 of every fragment, and become one of the setting's peers."""
        self._setting, self.name = setting, name
        self.sums = Sums()
        self.changed = Signal(setting.engine)
        self._crew = Crew(setting.engine)
        self._worker = simpy.Resource(setting.engine, 1)
        lines = {other: simpy.Resource(setting.engine, 1) for other in setting.islands}
        self._fragments = {
            fragment.fragment_id: SimulatedFragmentPeer(
                setting, name, fragment, self._worker, lines, self.sums, on_change=self._on_change
            )
            for fragment in fragments
        }
        setting.peers[name] = self._fragments

    def _on_change(self) -> None:
        self.changed.set()

    def granted(self, island: str, incarnation: int) -> None:
        """Begin, with this start of the island."""
        for fragment in self._fragments.values():
            fragment.begin(incarnation)
        self._crew.spawn(self._polling(incarnation))

    def stop(self) -> None:
        """End without a word; what is durable stays."""
        self._crew.stop()
        for fragment in self._fragments.values():
            fragment.stop()

    # -- what its island asks --------------------------------------------------------------------

    @property
    def fragment_ids(self) -> tuple[int, ...]:
        """All fragments."""
        return tuple(self._fragments)

    def states(self, island: str) -> list[wire.FragmentState]:
        """What its island sees of every fragment."""
        return [fragment.state() for fragment in self._fragments.values()]

    @property
    def is_steady(self) -> bool:
        """Whether what is published stays the newest until this island contributes, or for good."""
        return all(state.is_open or state.is_flush for state in self.states(self.name))

    def stepped(self, island: str, step_s: float) -> None:
        """Ignore how long inner steps take: no deadline of an all-reduce depends on it."""

    def fetched(self, island: str, fragment_id: int, version: int) -> None:
        """Record that the island has a version; nothing waits for it here."""

    def answer(
        self, request: wire.PollRequest, island: str, incarnation: int, keys: Iterable[RoundKey]
    ) -> wire.PollReply | None:
        """Answer a poll; None: there is nothing new, and it waits for `changed`."""
        reply = wire.PollReply(syncer_epoch=incarnation, fragments=self.states(island))
        for key in keys:
            own = self._fragments[key.fragment_id].own
            if own is not None and own.key == key and own.outcome is not None:
                reply.outcomes.append(outcome_message(own.outcome))
        return reply if is_news(request, reply) else None

    def receive(
        self, island: str, incarnation: int, sent: Outstanding, spread_s: float = 0.0
    ) -> Generator[simpy.Event, Any, Admission]:  # what it is sent is of the events' own types
        """Take the island's contribution, and declare it to the decider."""
        peer = self._fragments[sent.key.fragment_id]
        own = peer.own
        if own is not None and sent.key <= own.key and own.end_of(sent.key) is not None:
            return Admission.OVER
        if sent.key.version > peer.version:
            return Admission.NOT_OPEN
        n, num_lanes = peer.fragment.padded_numel, len(peer.fragment.lanes)
        verify_s = self._setting.costs.of(n, num_lanes).verify_s * n
        with self._worker.request() as turn:
            yield turn
            left_s = left_over(verify_s, spread_s, num_lanes)
            yield self._setting.engine.timeout(left_s)
        header = wire.SubmitHeader(
            key=key_message(sent.key),
            weight_tokens=sent.weight_tokens,
            weight_steps=sent.weight_steps,
            sent_at_inner_step=sent.sent_at_inner_step,
            is_flush=sent.is_flush,
        )
        peer.contribute(Own(sent.key, header))
        return Admission.ACCEPTED

    def refuse(self, island: str, incarnation: int, key: RoundKey, reason: str) -> None:
        """Take a decline."""
        self._fragments[key.fragment_id].contribute(Own(key, decline_reason=reason))

    # -- the decider -----------------------------------------------------------------------------

    def _polling(self, incarnation: int) -> Steps:
        """Ask the decider what is new, again and again."""
        engine, decider, sequence = self._setting.engine, self._setting.decider, -1
        up_s, down_s = self._setting.mesh.control_s(self.name)
        while True:
            owned = [fragment.own for fragment in self._fragments.values()]
            keys = [own.key for own in owned if own is not None and own.outcome is None]
            yield engine.timeout(up_s + self._setting.costs.peer_call_s)
            news = yield from decider.poll(sequence, keys, self.name, incarnation)
            yield engine.timeout(down_s)
            sequence = news.sequence
            for p, peer in self._fragments.items():
                peer.on_announced(news.announced[p], is_open=news.is_open[p])
            for outcome in news.outcomes:
                self._fragments[outcome.key.fragment_id].take_outcome(outcome)
