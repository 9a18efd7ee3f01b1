"""An island's outer state at one inner step, as named tensors for a run checkpoint.

    meta                      int64 [5]: format, then a `Moment`
    reach/{p}                 float64 [2]: how far from the anchor local values may lie (`Reach`)
    ledger/{p}                int64 [15]: counters and what is outstanding of fragment p
    anchor/{p}/{lane}         float32 [lane.numel]
    payload/{p}/{lane}        uint8 [wire bytes]: what is in flight; zeros when nothing is
    residual/{p}/{lane}       float32 [lane.numel], with error feedback only
    residual_after/{p}/{lane} float32 [lane.numel], with error feedback only: of what is in flight

A rank holds the lanes that it carries; `meta`, `reach/{p}` and `ledger/{p}` are equal on all ranks,
so that the union over the ranks serves any number of ranks. Names and shapes follow from the plan,
the codec, error feedback and the lanes alone, never from the moment.

Source: PROTOCOL.md, "Run checkpoints and pins".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from diloco.compression.lanes import lane_codec
from diloco.errors import ConfigError
from diloco.outer.fragments import Plan
from diloco.protocol.island.ledger import FragmentLedger, Outstanding
from diloco.protocol.island.soundness import Reach
from diloco.protocol.rounds.terms import RoundKey

_FORMAT = 3
_LEDGER_NUMBERS = 15
#: What is in flight: a contribution or a decline; and whether its work is in no parameter any more.
_SENT, _DECLINED, _VOID = 1, 2, 4
_ALWAYS: tuple[str, ...] = ("anchor", "payload")
_WITH_FEEDBACK = ("residual", "residual_after")


@dataclass(frozen=True, slots=True)
class Moment:
    """When a state was captured.

    Args:
        timeline: Of the run.
        inner_step: Completed inner steps.
        cut: Number of the cut, where islands merge on arrival; else 0.
        incarnation: Start of the island.
    """

    timeline: int
    inner_step: int
    cut: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class LaneCheckpoint:
    """One fragment's lanes on one rank, by lane id.

    `is_declined`: what is in flight is a decline; `broken_in_a_row`: how many of the last
    pseudo-gradients were not finite.

    The tensors are those in use: they are replaced, never written to. Residuals are empty without
    error feedback.
    """

    anchor: Mapping[int, Tensor]
    payload: Mapping[int, Tensor]
    residual: Mapping[int, Tensor]
    residual_after: Mapping[int, Tensor]
    is_declined: bool
    broken_in_a_row: int


@dataclass(frozen=True, slots=True)
class FragmentCheckpoint:
    """One fragment of an island: its ledger and its lanes.

    Of one that was read, the ledger has what is in flight as the first attempt of the timeline that
    goes on, and `sent_as` is the round that it was sent to.
    """

    ledger: FragmentLedger
    lanes: LaneCheckpoint
    reach: Reach
    sent_as: RoundKey | None = None


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Names, shapes and dtypes of one rank's state; `lanes`: fragment -> lanes that it carries."""

    plan: Plan
    lanes: Mapping[int, Sequence[int]]
    codec: str
    error_feedback: bool

    def expected(self) -> dict[str, tuple[list[int], torch.dtype]]:
        """Return what `to_tensors` gives, name by name."""
        shapes: dict[str, tuple[list[int], torch.dtype]] = {"meta": ([5], torch.int64)}
        for p in self.lanes:
            shapes[f"ledger/{p}"] = ([_LEDGER_NUMBERS], torch.int64)
            shapes[f"reach/{p}"] = ([2], torch.float64)
            for section, lane_id in self._parts(p):
                fragment = self.plan.fragments[p]
                numel = fragment.lanes[lane_id].numel
                shape = [numel], torch.float32
                if section == "payload":
                    codec = lane_codec(self.codec, fragment, lane_id)
                    shape = [codec.wire_bytes(numel)], torch.uint8
                shapes[f"{section}/{p}/{lane_id}"] = shape
        return shapes

    def to_tensors(
        self, moment: Moment, fragments: Sequence[FragmentCheckpoint]
    ) -> dict[str, Tensor]:
        """Return the state of fragments 0, 1, ... under its names."""
        state = {"meta": torch.tensor([_FORMAT, *astuple(moment)])}
        for p, fragment in enumerate(fragments):
            state[f"ledger/{p}"] = torch.tensor(_numbers(fragment))
            state[f"reach/{p}"] = torch.tensor(astuple(fragment.reach), dtype=torch.float64)
            for section, lane_id in self._parts(p):
                state[f"{section}/{p}/{lane_id}"] = getattr(fragment.lanes, section)[lane_id]
        return state

    def from_tensors(
        self, state: Mapping[str, Tensor], timeline: int, copied: Callable[[Tensor], Tensor]
    ) -> tuple[Moment, list[FragmentCheckpoint]]:
        """Read a state into another timeline; lanes of other ranks may be in it too.

        Args:
            state: As `to_tensors` gave it.
            timeline: That goes on.
            copied: Copies float32 values to where they are kept; payloads are on the CPU.

        Returns:
            The moment of it and fragments 0, 1, ...: copies of the tensors; what is in flight as
            the first attempt in `timeline`.

        Raises:
            ConfigError: Naming the first tensor that is missing or of another shape or dtype.
        """
        if "meta" in state and (form := int(state["meta"].view(-1)[0])) != _FORMAT:
            raise ConfigError(
                f"the outer state cannot be resumed: it has format {form}, this version of diloco "
                f"reads {_FORMAT}: resume with the version that wrote it"
            )
        for name, (shape, dtype) in self.expected().items():
            found = state.get(name)
            if found is None or (list(found.shape), found.dtype) != (shape, dtype):
                what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise ConfigError(
                    f"the outer state cannot be resumed: {name!r} must be {dtype} {shape}, found "
                    f"{what}. It was captured with another plan, outer.uplink_codec or "
                    f"outer.error_feedback, by another version of diloco, or lanes of some ranks "
                    f"are missing from it"
                )
        _, *moment = state["meta"].tolist()
        return Moment(*moment), [self._fragment(state, timeline, copied, p) for p in self.lanes]

    def _fragment(
        self, state: Mapping[str, Tensor], timeline: int, copied: Callable[[Tensor], Tensor], p: int
    ) -> FragmentCheckpoint:
        (
            version, tokens, steps, local_steps, sent_until, is_flushed, broken_in_a_row,
            merged_tokens, asks_trial, in_flight, sent_at_inner_step, weight_tokens, weight_steps,
            is_flush, attempt,
        ) = state[f"ledger/{p}"].tolist()  # fmt: skip
        ledger = FragmentLedger(
            timeline,
            p,
            version=version,
            tokens=tokens,
            steps=steps,
            local_steps=local_steps,
            sent_until=sent_until,
            is_flushed=bool(is_flushed),
            merged_tokens=merged_tokens,
            asks_trial=bool(asks_trial),
        )
        sent_as = None
        if in_flight:
            sent_as = RoundKey(int(state["meta"][1]), p, version, attempt)
            key = RoundKey(timeline, p, version, 0)
            ledger.outstanding = Outstanding(
                key, sent_at_inner_step, weight_tokens, weight_steps, bool(is_flush)
            )
            ledger.is_void = in_flight >= _VOID
        parts: dict[str, dict[int, Tensor]] = {name: {} for name in (*_ALWAYS, *_WITH_FEEDBACK)}
        for section, lane_id in self._parts(p):
            values = state[f"{section}/{p}/{lane_id}"].detach()
            parts[section][lane_id] = (
                values.to("cpu").clone(memory_format=torch.contiguous_format)
                if section == "payload"
                else copied(values)
            )
        lanes = LaneCheckpoint(
            **parts,
            is_declined=in_flight % _VOID == _DECLINED,
            broken_in_a_row=broken_in_a_row,
        )
        reach = Reach(*state[f"reach/{p}"].tolist())
        return FragmentCheckpoint(ledger, lanes, reach, sent_as)

    def _parts(self, p: int) -> Iterator[tuple[str, int]]:
        sections = _ALWAYS + (_WITH_FEEDBACK if self.error_feedback else ())
        for section in sections:
            for lane_id in self.lanes[p]:
                yield section, lane_id


def _numbers(fragment: FragmentCheckpoint) -> list[int]:
    ledger, sent = fragment.ledger, fragment.ledger.outstanding
    in_flight = [0] * 6
    if sent is not None:
        in_flight = [
            (_DECLINED if fragment.lanes.is_declined else _SENT) + _VOID * ledger.is_void,
            sent.sent_at_inner_step,
            sent.weight_tokens,
            sent.weight_steps,
            int(sent.is_flush),
            sent.key.attempt,
        ]
    return [
        ledger.version,
        ledger.tokens,
        ledger.steps,
        ledger.local_steps,
        ledger.sent_until,
        int(ledger.is_flushed),
        fragment.lanes.broken_in_a_row,
        ledger.merged_tokens,
        int(ledger.asks_trial),
        *in_flight,
    ]
