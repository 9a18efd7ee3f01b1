"""Bounds of every number, text and list that a peer says: one table, by message and field.

`RULES` of `launch/access` stands before every handler of coordinator, syncer and baselines,
and has each header checked against this table before anything else looks at it: what cannot be true
of this run is refused (`diloco.transport.errors.OutOfRange`), counted (`Cause.BOUNDS`) and changes
nothing. A field that is not in the table is held to the least of its type, so that a new one is
never unbounded; a test asks for a row of each.

What a contribution counts is judged where its round is known (`Weights`): it is the contribution
that is refused then, with a reason, and the round goes on without it.

Source: PROTOCOL.md, "Bounds of messages".
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from diloco.bounded_text import MOST_ENDING, MOST_TEXT
from diloco.config.fields import MOST_CHECKPOINTS, MOST_STEPS
from diloco.config.schema import Config
from diloco.protocol.rounds.messages import MOST_KEYS
from diloco.protocol.rounds.terms import MOST_NUMBER, MOST_STEP_TOKENS, Weights
from diloco.protocol.run.plan_bytes import MOST_PLAN_BYTES

#: A declared batch may be so many times the largest in the coordinator's file: unequal islands are
#: the point of token weights, and a site's own file decides (`tokens_per_inner_step` is local).
MOST_BATCH_RATIO = 16
#: Bits a second that no link has: what an island says of its own is within it.
MOST_LINK_BPS = 1e15
#: Depth of JSON texts.
_MOST_DEPTH = 32
_MOST_JSON_DIGITS = 20
_MOST_HEADER = 1 << 20
#: Bytes of a header that is read whatever it holds; fields in it that no message of ours has.
_SHORT_BYTES, _MOST_UNKNOWN = 4 << 10, 64
#: Wire types of protocol buffers.
_VARINT, _DELIMITED, _FIXED_BYTES = 0, 2, {1: 8, 5: 4}
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What there can be in one run, by its configuration.

    Args:
        num_fragments: P.
        num_lanes: Of a fragment, at most.
        num_islands: That the run may have.
        num_ranks: Of the largest island; 0: not known.
        num_syncers: Of the run.
        inner_steps: That an island may make; where tokens end the run, any that there can be.
    """

    num_fragments: int = 1 << 16
    num_lanes: int = 1 << 16
    num_islands: int = 1 << 16
    num_ranks: int = 0
    num_syncers: int = 1 << 16
    inner_steps: int = MOST_STEPS

    @property
    def num_keys(self) -> int:
        """Rounds that an island can ask about at once."""
        return MOST_KEYS * self.num_fragments


def limits_of(config: Config) -> RunLimits:
    """Give what there can be in a run."""
    return RunLimits(
        num_fragments=config.outer.num_fragments,
        num_lanes=config.outer.num_lanes,
        num_islands=config.max_islands,
        num_ranks=max(island.ranks for island in config.islands.values()),
        num_syncers=len(config.shares),
        inner_steps=MOST_STEPS if config.outer.is_on_arrival else config.run.inner_steps,
    )


def most_step_tokens_of(config: Config) -> int:
    """Give the largest batch that an island of a run may declare."""
    largest = max(island.tokens_per_inner_step for island in config.islands.values())
    return min(MOST_BATCH_RATIO * largest, MOST_STEP_TOKENS)


def weights_of(config: Config) -> Weights:
    """Give what a contribution to a run may count."""
    return Weights(
        config.outer.inner_steps_per_round,
        limits_of(config).inner_steps,
        most_step_tokens_of(config),
    )


_Most: TypeAlias = int | str  # a number, or the field of `RunLimits` that says it


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from 0, or `least`, on; `below`: less than `most`."""

    most: _Most = MOST_NUMBER
    below: bool = False
    least: int = 0

    def problem(self, value: int, limits: RunLimits) -> str:
        """Say what is wrong; empty: nothing."""
        most = _number(self.most, limits) - self.below
        return "" if self.least <= value <= most else f"{value}: {self.least} to {most}"


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number in a range; `or_none`: NaN and infinity too, which are only shown."""

    least: float = 0.0
    most: float = float(MOST_NUMBER)
    or_none: bool = False

    def problem(self, value: float, limits: RunLimits) -> str:
        """Say what is wrong; empty: nothing."""
        if self.or_none and not math.isfinite(value):
            return ""
        is_between = self.least <= value <= self.most
        return "" if is_between else f"{value}: {self.least:g} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class Words:
    """A text or bytes of so many characters or bytes, at most."""

    most: int = MOST_TEXT

    def problem(self, value: str | bytes, limits: RunLimits) -> str:
        """Say what is wrong; empty: nothing."""
        return "" if len(value) <= self.most else f"{len(value)} long: at most {self.most}"


@dataclass(frozen=True, slots=True)
class Json:
    """JSON whose numbers are finite and of 64 bits, not deeper than `_MOST_DEPTH`; or empty."""

    most: int = _MOST_HEADER

    def problem(self, value: str, limits: RunLimits) -> str:
        """Say what is wrong; empty: nothing."""
        if len(value) > self.most:
            return f"{len(value)} characters: at most {self.most}"
        try:
            return _too_deep(_read_json(value)) if value else ""
        except (ValueError, RecursionError) as error:
            return f"no JSON that can be: {error}"


@dataclass(frozen=True, slots=True)
class Many:
    """A list, or a map, of so many; each within `each`."""

    most: _Most
    each: Whole | Words | None = None

    def problem(self, value: Any, limits: RunLimits) -> str:  # Any: of either kind
        """Say what is wrong; empty: nothing."""
        if len(value) > (most := _number(self.most, limits)):
            return f"{len(value)} of them: at most {most}"
        if self.each is None:
            return ""
        items: Any = value.items() if hasattr(value, "items") else value
        for item in items:
            for part in item if isinstance(item, tuple) else (item,):
                if words := self.each.problem(part, limits):
                    return words
        return ""


Bound: TypeAlias = Whole | Real | Words | Json | Many

_COUNT = Whole()
_STEP = Whole("inner_steps")
_FRAGMENT = Whole("num_fragments", below=True)
_LANE = Whole("num_lanes", below=True)
_ATTEMPT = Whole(2**31)
_NAME = Words(100)
_DIGEST = Words(64)
_SAID = Words(MOST_ENDING)  # shown, and cut there
_SPEAKS = {"protocol_version": Whole(2**32 - 1)}  # compared before
_EXIT = Whole(255)
_WAIT = Real(0.0, 3600.0)
_RATE = Real(0.0, MOST_LINK_BPS)
_MEMORY = Whole(1 << 50)
_JUDGED = Whole(2**64 - 1)  # with the contribution: `Weights`
_OF_A_LANE = {**_SPEAKS, "fragment_id": _FRAGMENT, "lane_id": _LANE}

#: Message -> field -> bound. Flags, enums and messages within messages need none: they are checked
#: by their type.
BOUNDS: Mapping[str, Mapping[str, Bound]] = {
    "diloco.control.v1.Grant": {
        "run": _SAID,
        "timeline": _COUNT,
        "island": _SAID,
        "incarnation": _COUNT,
        "roles": Many(8),
        "expiry_unix_s": Real(),
        "mac": _DIGEST,
        "tokens_per_inner_step": Whole(MOST_STEP_TOKENS),
    },
    "diloco.control.v1.JoinRequest": {
        **_SPEAKS,
        "run": _SAID,
        "island": _SAID,
        "identity_json": Json(),
        "plan": Words(MOST_PLAN_BYTES),
        "num_ranks": Whole(1 << 20),
        "start_id": Words(64),
        "corpus_sha256": _SAID,
        "start_step": Whole(MOST_STEPS),
        "tokenizer_digest": _SAID,
        "tokens_per_inner_step": Whole(MOST_STEP_TOKENS),
    },
    "diloco.control.v1.ReportRequest": {
        **_SPEAKS,
        "inner_step": _STEP,
        "loss_nats": Real(-MOST_NUMBER, MOST_NUMBER, or_none=True),
        "tokens_per_s": Real(or_none=True),
        "tokens": _COUNT,
        "fragments_in_flight": Whole("num_fragments"),
        "bytes_up": Whole(2**63),
        "bytes_down": Whole(2**63),
        "blocked_s": Real(),
        "utilisation": Real(or_none=True),
        "state": Words(MOST_TEXT),
        "message": Words(_MOST_HEADER),
        "hold_step": _STEP,
        "checkpoint_steps": Many(MOST_CHECKPOINTS, _STEP),
        "step_s": Real(0.0, _DAY_S),
        "left_s": Real(),
        "position_json": Json(),
        "resident_bytes": _MEMORY,
        "device_bytes": _MEMORY,
        "mfu": Real(0.0, 1.0),
        "alarms": Many(1 << 10),
        "held_out": Many(MOST_CHECKPOINTS),
    },
    "diloco.control.v1.LinkUse": {
        "interval_s": Real(),
        "syncers": Many("num_syncers"),
        "up_capacity_bps": _RATE,
        "down_capacity_bps": _RATE,
    },
    "diloco.control.v1.SyncerLinkUse": {
        "up_bps": _RATE,
        "down_bps": _RATE,
        "round_trip_s": Real(0.0, _DAY_S),
        "failed_calls": _COUNT,
        "recent_failed_calls": _COUNT,
    },
    "diloco.control.v1.HeldOut": {
        "checkpoint": _COUNT,
        "nats_per_byte": Real(-MOST_NUMBER, or_none=True),
    },
    "diloco.control.v1.TransferPart": {"declined": _COUNT, "reason": _SAID},
    "diloco.control.v1.CutPart": {
        "number": _COUNT,
        "versions": Many("num_fragments", _COUNT),
        "inner_step": _STEP,
        "text_json": Json(),
    },
    "diloco.control.v1.LeaveRequest": {
        **_SPEAKS,
        "exit_code": _EXIT,
        "reason": Words(_MOST_HEADER),
    },
    "diloco.control.v1.Alarm": {
        "kind": _SAID,
        "island": _SAID,
        "fragment_id": Whole("num_fragments", below=True, least=-1),
        "text": _SAID,
        "count": _COUNT,
    },
    "diloco.control.v1.StatusRequest": _SPEAKS,
    "diloco.control.v1.ClockRequest": _SPEAKS,
    "diloco.control.v1.RunStateRequest": {**_SPEAKS, "island": _SAID},
    "diloco.control.v1.OperateRequest": {
        **_SPEAKS,
        "command": _SAID,
        "arguments": Many(64, Words(MOST_ENDING)),
    },
    "diloco.control.v1.SyncerHelloRequest": {
        **_SPEAKS,
        "address": _SAID,
        "syncer_epoch": _COUNT,
        "pid": _COUNT,
        "syncer_id": Whole("num_syncers", below=True),
        "reason": Words(MOST_ENDING),
        "moves": Many("num_fragments"),
    },
    "diloco.control.v1.FragmentMove": {
        "fragment_id": _FRAGMENT,
        "number": _COUNT,
        "copied_bytes": _COUNT,
        "total_bytes": _COUNT,
        "waits": _SAID,
    },
    "diloco.control.v1.FragmentStatus": {
        "fragment_id": _FRAGMENT,
        "version": _COUNT,
        "attempt": _ATTEMPT,
        "digest": _SAID,
        "contributors": Many("num_islands", _SAID),
        "num_contributors": _COUNT,
        "age_s": Real(),
        "phase": _SAID,
        "merged_tokens": _COUNT,
        "rounds": _COUNT,
        "solo_rounds": _COUNT,
        "damage": _SAID,
        "lost_version": _COUNT,
        "holders": Many("num_islands", _SAID),
        "waits_for": Many("num_islands", _SAID),
        "num_waits_for": _COUNT,
        "left_s": Real(),
    },
    "diloco.control.v1.RefusalCount": {
        "service": _SAID,
        "island": _SAID,
        "cause": _SAID,
        "count": _COUNT,
    },
    "diloco.control.v1.Expiry": {
        "fragment_id": _FRAGMENT,
        "version": _COUNT,
        "attempt": _ATTEMPT,
        "missing": Many("num_islands", _SAID),
        "reason": Words(_MOST_HEADER),
    },
    "diloco.control.v1.RoundReport": {
        **_SPEAKS,
        "syncer_epoch": _COUNT,
        "fragments": Many("num_fragments"),
        "record_json": Json(),
        "fatal_reason": Words(_MOST_HEADER),
        "fatal_exit_code": _EXIT,
        "refusals": Many(1 << 16),
        "alarms": Many(1 << 10),
        "pinned_cut": _COUNT,
        "syncer_id": Whole("num_syncers", below=True),
    },
    "diloco.fragment.v1.RoundKey": {
        "timeline": _COUNT,
        "fragment_id": _FRAGMENT,
        "version": _COUNT,
        "attempt": _ATTEMPT,
    },
    "diloco.fragment.v1.SubmitHeader": {
        **_SPEAKS,
        "sent_at_inner_step": _JUDGED,
        "weight_tokens": _JUDGED,
        "weight_steps": _JUDGED,
        "lane_id": _LANE,
        "codec": Words(_MOST_HEADER),
        "digest": Words(_MOST_HEADER),
    },
    "diloco.fragment.v1.DeclineRequest": {**_SPEAKS, "reason": Words(_MOST_HEADER)},
    "diloco.fragment.v1.UploadHeader": {**_OF_A_LANE, "digest": _SAID, "version": _COUNT},
    "diloco.fragment.v1.FragmentState": {
        "fragment_id": _FRAGMENT,
        "version": _COUNT,
        "attempt": _ATTEMPT,
        "digest": _DIGEST,
        "lane_digests": Many("num_lanes", _DIGEST),
        "contributors": Many("num_islands", _NAME),
        "payload_codec": _SAID,
        "sent_at_inner_step": _STEP,
        "members": Many("num_islands", _NAME),
        "merged_tokens": _COUNT,
        "counted_version": _COUNT,
        "counted_attempt": _ATTEMPT,
        "asked": _COUNT,
        "wanted_version": _COUNT,
        "num_held": _COUNT,
    },
    "diloco.fragment.v1.Pinned": {"fragment_id": _FRAGMENT, "version": _COUNT},
    "diloco.fragment.v1.PinRequest": {
        **_SPEAKS,
        "checkpoint_step": _STEP,
        "versions": Many("num_fragments"),
    },
    "diloco.fragment.v1.PollRequest": {
        **_SPEAKS,
        "known_epoch": _COUNT,
        "known": Many("num_fragments"),
        "outstanding": Many("num_keys"),
        "wait_s": _WAIT,
        "step_s": Real(0.0, _DAY_S),
        "sent_by": _COUNT,
    },
    "diloco.fragment.v1.FetchHeader": {
        **_SPEAKS,
        "fragment_id": _FRAGMENT,
        "version": _COUNT,
        "lane_ids": Many("num_lanes", _LANE),
    },
    "diloco.fragment.v1.StatePutHeader": {**_OF_A_LANE, "checkpoint": _COUNT, "digest": _SAID},
    "diloco.fragment.v1.StateGetHeader": {**_OF_A_LANE, "source": _SAID, "checkpoint": _COUNT},
    "diloco.payload.v1.ObjectCall": {
        **_SPEAKS,
        "method": Words(MOST_TEXT),
        "header": Words(_MOST_HEADER),
        "transfer": _DIGEST,
        "payload_bytes": _COUNT,
        "digest": _DIGEST,
        "lost": _DIGEST,
    },
    "diloco.baseline.v1.VectorHeader": {
        **_SPEAKS,
        "start": _SAID,
        "island": _SAID,
        "island_rank": Whole(1 << 20),
        "reduction": _COUNT,
        "chunk": Whole(1 << 31),
        "hop": Whole(1 << 20),
    },
}


def problem_of(message: Message, limits: RunLimits) -> str:
    """Say which field of a message, or of those in it, cannot be so; empty if all can."""
    return next(_problems(message, limits), "")


def surplus_of(header: bytes, descriptor: Descriptor, limits: RunLimits) -> str:
    """Say which list of a message is longer than it can be, before the message is read.

    A million empty messages are two megabytes, and take fifty times that and a tenth of a second to
    be read. The fields are counted where they are, no further than to one too many; what is short
    is read without that.
    """
    if len(header) <= _SHORT_BYTES:
        return ""
    allowed = _allowed(descriptor, limits)
    counts: Counter[int] = Counter()
    at = 0
    try:
        while at < len(header):
            tag, at = _read_varint(header, at)
            number, kind = tag >> 3, tag & 7
            name, most = allowed.get(number, ("unknown", _MOST_UNKNOWN))
            number = number if number in allowed else 0
            counts[number] += 1
            if counts[number] > most:
                return f"{descriptor.name}.{name} = {counts[number]} of them: at most {most}"
            if kind == _VARINT:
                _, at = _read_varint(header, at)
            elif kind == _DELIMITED:
                size, at = _read_varint(header, at)
                at += size
            elif kind in _FIXED_BYTES:
                at += _FIXED_BYTES[kind]
            else:
                return f"{descriptor.name} with a field of wire type {kind}: none has one"
    except IndexError:
        pass  # torn: it cannot be read either
    return ""


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, at
        shift += 7


@lru_cache(maxsize=1 << 10)
def _allowed(descriptor: Descriptor, limits: RunLimits) -> Mapping[int, tuple[str, int]]:
    """Give name and largest count of each field, by its number."""
    found = {}
    for field in descriptor.fields:
        bound = bound_of(field) or _least(field)
        most = _number(bound.most, limits) if isinstance(bound, Many) else 1
        found[field.number] = field.name, most
    return found


def bound_of(field: FieldDescriptor) -> Bound | None:
    """Give the row of a field; None: it has none, and none is needed or `_least` holds."""
    owner = field.containing_type
    return None if owner is None else BOUNDS.get(owner.full_name, {}).get(field.name)


def is_bounded_by_type(field: FieldDescriptor) -> bool:
    """Whether a field needs no row: a flag, an enum, or one message, which has rows of its own."""
    is_one = not field.is_repeated
    kinds = FieldDescriptor.CPPTYPE_BOOL, FieldDescriptor.CPPTYPE_ENUM, _MESSAGE
    return is_one and field.cpp_type in kinds


def _problems(message: Message, limits: RunLimits) -> Iterator[str]:
    for field, value in message.ListFields():  # what is not said is 0, or empty
        bound = bound_of(field) or _least(field)
        if bound is not None and (words := bound.problem(value, limits)):
            yield f"{message.DESCRIPTOR.name}.{field.name} = {words}"
        elif field.cpp_type == _MESSAGE and not _is_map(field):
            for each in value if field.is_repeated else (value,):
                yield from _problems(each, limits)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _least(field: FieldDescriptor) -> Bound | None:
    """Bound a field that has no row."""
    if is_bounded_by_type(field):
        return None
    if field.is_repeated:
        return Many(1 << 10)
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return Words()
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return Real(-MOST_NUMBER)
    return _COUNT


_MESSAGE = FieldDescriptor.CPPTYPE_MESSAGE


def _number(most: _Most, limits: RunLimits) -> int:
    if isinstance(most, int):
        return most
    found: int = getattr(limits, most)
    return found


def _read_json(text: str) -> Any:  # whatever it says
    return json.loads(text, parse_constant=_refuse, parse_int=_read_int, parse_float=_read_float)


def _read_int(digits: str) -> int:
    if len(digits) > _MOST_JSON_DIGITS or abs(number := int(digits)) >= 2**64:
        _refuse(digits)
    return number


def _read_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        _refuse(digits)
    return number


def _refuse(digits: str) -> NoReturn:
    raise ValueError(f"the number {digits[:_MOST_JSON_DIGITS]}")


def _too_deep(value: Any) -> str:  # JSON values
    level = [value]
    for _ in range(_MOST_DEPTH):
        nested = [each for each in level if isinstance(each, dict | list)]
        values = (each.values() if isinstance(each, dict) else each for each in nested)
        level = [inner for each in values for inner in each]
        if not level:
            return ""
    return f"JSON deeper than {_MOST_DEPTH}"
