"""Decides which island sends its inner optimizer to one that has none, and of which checkpoint.

An island that starts without any state of its own asks for one in each of its reports until it
trains. The source sends that of a checkpoint which it has written: the newest run checkpoint, or,
where islands merge on arrival, the cut that is under way (one is begun if there is none). So the
source held a known version of every fragment, and no other state is written. The answer to the
source's own report asks it to put the state at the syncers.

Nothing is durable: after a restart requests come again.

Source: Decoupled DiLoCo (arXiv 2604.21428, App. E.3).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from diloco.bounded_text import bounded_text
from diloco.protocol.run.leases import Lease
from diloco.protocol.run.membership import Change, Membership
from diloco.protos.control_pb2 import ReportReply, StateTransfer, TransferAnswer, TransferPart

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """The request of one start; `checkpoint` 0 and an empty `source`: not chosen yet."""

    incarnation: int
    checkpoint: int = 0
    source: str = ""
    declined: dict[str, str] = field(default_factory=dict)


class StateTransfers:
    """Matches the requests of one run with sources."""

    def __init__(self, membership: Membership, *, change: Change) -> None:
        """Assign only.

        Args:
            membership: Of the run.
            change: Takes a decision, and makes it durable, then true.
        """
        self._membership = membership
        self._change = change
        self._requests: dict[str, _Request] = {}

    async def reported(self, island: str, report: TransferPart, reply: ReportReply) -> None:
        """Take what an island reports of state transfers, and put the answer into `reply`."""
        incarnation = self._membership.members[island].incarnation
        if report.declined:
            self._declined(island, report.declined, bounded_text(report.reason))
        if not report.is_requested:
            self._requests.pop(island, None)
        elif island not in self._requests or self._requests[island].incarnation != incarnation:
            self._requests[island] = _Request(incarnation)
        holders = self._membership.members.holders
        for absent in [i for i in self._requests if i not in holders]:
            del self._requests[absent]  # a next start asks again
        if (request := self._requests.get(island)) is not None:
            reply.transfer.CopyFrom(await self._answer(island, request))
        self._membership.cuts.given = {w.checkpoint for w in self._requests.values()}
        # One after the other: a later request breaks off nothing that is under way.
        asked = [w.checkpoint for w in self._requests.values() if w.source == island]
        reply.provide = min(asked, default=0)

    @property
    def named(self) -> list[StateTransfer]:
        """What is to be given, by whom and to whom: at the syncers nothing else is taken."""
        return [
            StateTransfer(source=request.source, island=island, checkpoint=request.checkpoint)
            for island, request in sorted(self._requests.items())
            if request.source
        ]

    def _declined(self, source: str, checkpoint: int, reason: str) -> None:
        for island, request in self._requests.items():
            if (request.source, request.checkpoint) == (source, checkpoint):
                logger.warning(
                    "%s cannot give %s the inner optimizer of checkpoint %d: %s",
                    source, island, checkpoint, reason,
                )  # fmt: skip
                request.declined[source], request.source = reason, ""

    async def _answer(self, island: str, request: _Request) -> TransferAnswer:
        if not request.checkpoint and (refusal := await self._choose(island, request)):
            return TransferAnswer(refusal=refusal)
        sources = self._sources(island, request)
        if request.source not in sources:
            if request.source:
                request.declined.setdefault(request.source, "it is away")
            # What is given of one checkpoint is there for all; of another it comes after that.
            busy = {w.source for w in self._requests.values() if w.checkpoint != request.checkpoint}
            request.source = max(sources, key=lambda d: (d not in busy, sources[d], d), default="")
            if request.source:
                logger.info(
                    "%s is asked for the inner optimizer of checkpoint %d for %s",
                    request.source, request.checkpoint, island,
                )  # fmt: skip
        if request.source:
            return TransferAnswer(source=request.source, checkpoint=request.checkpoint)
        if self._is_awaited(island, request):
            return TransferAnswer()
        why = "; ".join(
            f"{source}: {reason}" for source, reason in sorted(request.declined.items())
        )
        name = self._membership.checkpoint_name(request.checkpoint)
        return TransferAnswer(
            refusal=bounded_text(f"no island at work can give that of {name}. {why}".strip())
        )

    async def _choose(self, island: str, request: _Request) -> str:
        """Choose the checkpoint; returns why there is none."""
        membership = self._membership
        if membership.is_stopping:
            return "the run is stopping"
        if not self._others(island):
            return "no other island is at work"
        if not membership.rules.is_elastic:
            if not membership.checkpoints:
                return "no run checkpoint is complete yet (checkpoint.every_inner_steps)"
            request.checkpoint = membership.checkpoints[-1]
            return ""
        if (cut := membership.cuts.open(membership.timeline)) is None:
            await self._change(lambda m: () if m.cuts.open(m.timeline) else m.cut())
            cut = membership.cuts.newest(membership.timeline)
        assert cut is not None
        request.checkpoint = cut.number
        return ""

    def _others(self, island: str) -> list[str]:
        """Islands at work that have an inner optimizer."""
        membership = self._membership
        return [
            other
            for other in membership.members.holders
            if other not in {island, *self._requests}
            and membership.members.lease_of(other) is Lease.ACTIVE
        ]

    def _sources(self, island: str, request: _Request) -> dict[str, int]:
        """Islands that have it and can give it, and how far each had come; 0: not known."""
        membership = self._membership
        others = [other for other in self._others(island) if other not in request.declined]
        if not membership.rules.is_elastic:
            return dict.fromkeys(others, 0)
        parts = membership.cuts[request.checkpoint].parts
        return {other: parts[other].inner_step for other in others if other in parts}

    def _is_awaited(self, island: str, request: _Request) -> bool:
        """Whether somebody is still to write the cut that it is of."""
        if not self._membership.rules.is_elastic:
            return False
        owing = self._membership.cuts[request.checkpoint].owing
        return any(o in owing and o not in request.declined for o in self._others(island))
