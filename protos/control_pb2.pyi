from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ISLAND: _ClassVar[Role]
    ROLE_SYNCER: _ClassVar[Role]
    ROLE_OPERATOR: _ClassVar[Role]

class JoinStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOIN_STATUS_UNSPECIFIED: _ClassVar[JoinStatus]
    JOIN_STATUS_ACCEPTED: _ClassVar[JoinStatus]
    JOIN_STATUS_FINGERPRINT_MISMATCH: _ClassVar[JoinStatus]
    JOIN_STATUS_PLAN_MISMATCH: _ClassVar[JoinStatus]
    JOIN_STATUS_UNKNOWN_ISLAND: _ClassVar[JoinStatus]
    JOIN_STATUS_WRONG_RUN: _ClassVar[JoinStatus]
    JOIN_STATUS_VERSION_MISMATCH: _ClassVar[JoinStatus]
    JOIN_STATUS_RUN_STOPPED: _ClassVar[JoinStatus]
    JOIN_STATUS_RUN_FULL: _ClassVar[JoinStatus]
    JOIN_STATUS_BATCH_TOO_LARGE: _ClassVar[JoinStatus]
    JOIN_STATUS_KICKED: _ClassVar[JoinStatus]

class MoveStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_STAGE_UNSPECIFIED: _ClassVar[MoveStage]
    MOVE_STAGE_COPYING: _ClassVar[MoveStage]
    MOVE_STAGE_READY: _ClassVar[MoveStage]
    MOVE_STAGE_TAKEN: _ClassVar[MoveStage]
    MOVE_STAGE_SERVED: _ClassVar[MoveStage]
    MOVE_STAGE_WITHDRAWN: _ClassVar[MoveStage]
ROLE_UNSPECIFIED: Role
ROLE_ISLAND: Role
ROLE_SYNCER: Role
ROLE_OPERATOR: Role
JOIN_STATUS_UNSPECIFIED: JoinStatus
JOIN_STATUS_ACCEPTED: JoinStatus
JOIN_STATUS_FINGERPRINT_MISMATCH: JoinStatus
JOIN_STATUS_PLAN_MISMATCH: JoinStatus
JOIN_STATUS_UNKNOWN_ISLAND: JoinStatus
JOIN_STATUS_WRONG_RUN: JoinStatus
JOIN_STATUS_VERSION_MISMATCH: JoinStatus
JOIN_STATUS_RUN_STOPPED: JoinStatus
JOIN_STATUS_RUN_FULL: JoinStatus
JOIN_STATUS_BATCH_TOO_LARGE: JoinStatus
JOIN_STATUS_KICKED: JoinStatus
MOVE_STAGE_UNSPECIFIED: MoveStage
MOVE_STAGE_COPYING: MoveStage
MOVE_STAGE_READY: MoveStage
MOVE_STAGE_TAKEN: MoveStage
MOVE_STAGE_SERVED: MoveStage
MOVE_STAGE_WITHDRAWN: MoveStage

class Grant(_message.Message):
    __slots__ = ("run", "timeline", "island", "incarnation", "roles", "expiry_unix_s", "mac", "tokens_per_inner_step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    timeline: int
    island: str
    incarnation: int
    roles: _containers.RepeatedScalarFieldContainer[Role]
    expiry_unix_s: float
    mac: bytes
    tokens_per_inner_step: int
    def __init__(self, run: _Optional[str] = ..., timeline: _Optional[int] = ..., island: _Optional[str] = ..., incarnation: _Optional[int] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., expiry_unix_s: _Optional[float] = ..., mac: _Optional[bytes] = ..., tokens_per_inner_step: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol_version", "run", "island", "identity_json", "plan", "num_ranks", "start_id", "corpus_sha256", "start_step", "tokenizer_digest", "tokens_per_inner_step")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_JSON_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    START_ID_FIELD_NUMBER: _ClassVar[int]
    CORPUS_SHA256_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run: str
    island: str
    identity_json: str
    plan: bytes
    num_ranks: int
    start_id: str
    corpus_sha256: str
    start_step: int
    tokenizer_digest: str
    tokens_per_inner_step: int
    def __init__(self, protocol_version: _Optional[int] = ..., run: _Optional[str] = ..., island: _Optional[str] = ..., identity_json: _Optional[str] = ..., plan: _Optional[bytes] = ..., num_ranks: _Optional[int] = ..., start_id: _Optional[str] = ..., corpus_sha256: _Optional[str] = ..., start_step: _Optional[int] = ..., tokenizer_digest: _Optional[str] = ..., tokens_per_inner_step: _Optional[int] = ...) -> None: ...

class SyncerAssignment(_message.Message):
    __slots__ = ("address", "fragment_ids")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    address: str
    fragment_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, address: _Optional[str] = ..., fragment_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("status", "message", "grant", "island_slot", "syncers", "policy_json", "is_resumed", "resume_step", "last_inner_step", "total_tokens", "lease_s", "claims_json", "has_bucket")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ISLAND_SLOT_FIELD_NUMBER: _ClassVar[int]
    SYNCERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_RESUMED_FIELD_NUMBER: _ClassVar[int]
    RESUME_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_JSON_FIELD_NUMBER: _ClassVar[int]
    HAS_BUCKET_FIELD_NUMBER: _ClassVar[int]
    status: JoinStatus
    message: str
    grant: Grant
    island_slot: int
    syncers: _containers.RepeatedCompositeFieldContainer[SyncerAssignment]
    policy_json: str
    is_resumed: bool
    resume_step: int
    last_inner_step: int
    total_tokens: int
    lease_s: float
    claims_json: str
    has_bucket: bool
    def __init__(self, status: _Optional[_Union[JoinStatus, str]] = ..., message: _Optional[str] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., island_slot: _Optional[int] = ..., syncers: _Optional[_Iterable[_Union[SyncerAssignment, _Mapping]]] = ..., policy_json: _Optional[str] = ..., is_resumed: _Optional[bool] = ..., resume_step: _Optional[int] = ..., last_inner_step: _Optional[int] = ..., total_tokens: _Optional[int] = ..., lease_s: _Optional[float] = ..., claims_json: _Optional[str] = ..., has_bucket: _Optional[bool] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "inner_step", "loss_nats", "tokens_per_s", "tokens", "fragments_in_flight", "bytes_up", "bytes_down", "blocked_s", "utilisation", "state", "message", "has_hold", "hold_step", "checkpoint_steps", "step_s", "position_json", "left_s", "cut", "transfer", "link", "resident_bytes", "device_bytes", "mfu", "alarms", "held_out")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_NATS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_S_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HAS_HOLD_FIELD_NUMBER: _ClassVar[int]
    HOLD_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    POSITION_JSON_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MFU_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: Grant
    inner_step: int
    loss_nats: float
    tokens_per_s: float
    tokens: int
    fragments_in_flight: int
    bytes_up: int
    bytes_down: int
    blocked_s: float
    utilisation: float
    state: str
    message: str
    has_hold: bool
    hold_step: int
    checkpoint_steps: _containers.RepeatedScalarFieldContainer[int]
    step_s: float
    position_json: str
    left_s: float
    cut: CutPart
    transfer: TransferPart
    link: LinkUse
    resident_bytes: int
    device_bytes: int
    mfu: float
    alarms: _containers.RepeatedCompositeFieldContainer[Alarm]
    held_out: _containers.RepeatedCompositeFieldContainer[HeldOut]
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., inner_step: _Optional[int] = ..., loss_nats: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., tokens: _Optional[int] = ..., fragments_in_flight: _Optional[int] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., blocked_s: _Optional[float] = ..., utilisation: _Optional[float] = ..., state: _Optional[str] = ..., message: _Optional[str] = ..., has_hold: _Optional[bool] = ..., hold_step: _Optional[int] = ..., checkpoint_steps: _Optional[_Iterable[int]] = ..., step_s: _Optional[float] = ..., position_json: _Optional[str] = ..., left_s: _Optional[float] = ..., cut: _Optional[_Union[CutPart, _Mapping]] = ..., transfer: _Optional[_Union[TransferPart, _Mapping]] = ..., link: _Optional[_Union[LinkUse, _Mapping]] = ..., resident_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., mfu: _Optional[float] = ..., alarms: _Optional[_Iterable[_Union[Alarm, _Mapping]]] = ..., held_out: _Optional[_Iterable[_Union[HeldOut, _Mapping]]] = ...) -> None: ...

class LinkUse(_message.Message):
    __slots__ = ("interval_s", "syncers", "up_capacity_bps", "down_capacity_bps", "has_bucket")
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SYNCERS_FIELD_NUMBER: _ClassVar[int]
    UP_CAPACITY_BPS_FIELD_NUMBER: _ClassVar[int]
    DOWN_CAPACITY_BPS_FIELD_NUMBER: _ClassVar[int]
    HAS_BUCKET_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    syncers: _containers.RepeatedCompositeFieldContainer[SyncerLinkUse]
    up_capacity_bps: float
    down_capacity_bps: float
    has_bucket: bool
    def __init__(self, interval_s: _Optional[float] = ..., syncers: _Optional[_Iterable[_Union[SyncerLinkUse, _Mapping]]] = ..., up_capacity_bps: _Optional[float] = ..., down_capacity_bps: _Optional[float] = ..., has_bucket: _Optional[bool] = ...) -> None: ...

class SyncerLinkUse(_message.Message):
    __slots__ = ("up_bps", "down_bps", "round_trip_s", "failed_calls", "recent_failed_calls")
    UP_BPS_FIELD_NUMBER: _ClassVar[int]
    DOWN_BPS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_CALLS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FAILED_CALLS_FIELD_NUMBER: _ClassVar[int]
    up_bps: float
    down_bps: float
    round_trip_s: float
    failed_calls: int
    recent_failed_calls: int
    def __init__(self, up_bps: _Optional[float] = ..., down_bps: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., failed_calls: _Optional[int] = ..., recent_failed_calls: _Optional[int] = ...) -> None: ...

class Alarm(_message.Message):
    __slots__ = ("kind", "island", "fragment_id", "text", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    island: str
    fragment_id: int
    text: str
    count: int
    def __init__(self, kind: _Optional[str] = ..., island: _Optional[str] = ..., fragment_id: _Optional[int] = ..., text: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class HeldOut(_message.Message):
    __slots__ = ("checkpoint", "nats_per_byte")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NATS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    checkpoint: int
    nats_per_byte: float
    def __init__(self, checkpoint: _Optional[int] = ..., nats_per_byte: _Optional[float] = ...) -> None: ...

class AlarmStatus(_message.Message):
    __slots__ = ("alarm", "reporter", "first_age_s", "last_age_s", "holds")
    ALARM_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    FIRST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    LAST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    alarm: Alarm
    reporter: str
    first_age_s: float
    last_age_s: float
    holds: bool
    def __init__(self, alarm: _Optional[_Union[Alarm, _Mapping]] = ..., reporter: _Optional[str] = ..., first_age_s: _Optional[float] = ..., last_age_s: _Optional[float] = ..., holds: _Optional[bool] = ...) -> None: ...

class TransferPart(_message.Message):
    __slots__ = ("is_requested", "declined", "reason")
    IS_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    is_requested: bool
    declined: int
    reason: str
    def __init__(self, is_requested: _Optional[bool] = ..., declined: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class TransferAnswer(_message.Message):
    __slots__ = ("source", "checkpoint", "refusal")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    source: str
    checkpoint: int
    refusal: str
    def __init__(self, source: _Optional[str] = ..., checkpoint: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class CutPart(_message.Message):
    __slots__ = ("number", "versions", "inner_step", "text_json", "is_being_written")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    TEXT_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_BEING_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    inner_step: int
    text_json: str
    is_being_written: bool
    def __init__(self, number: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., inner_step: _Optional[int] = ..., text_json: _Optional[str] = ..., is_being_written: _Optional[bool] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("stop", "reason", "exit_code", "hold", "has_stop_step", "stop_step", "checkpoint_steps", "policy_json", "policy_revision", "drain", "claims_json", "cut", "is_last_cut", "transfer", "away", "provide")
    STOP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    HAS_STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEPS_FIELD_NUMBER: _ClassVar[int]
    POLICY_JSON_FIELD_NUMBER: _ClassVar[int]
    POLICY_REVISION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_JSON_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_CUT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    PROVIDE_FIELD_NUMBER: _ClassVar[int]
    stop: bool
    reason: str
    exit_code: int
    hold: bool
    has_stop_step: bool
    stop_step: int
    checkpoint_steps: _containers.RepeatedScalarFieldContainer[int]
    policy_json: str
    policy_revision: int
    drain: bool
    claims_json: str
    cut: int
    is_last_cut: bool
    transfer: TransferAnswer
    away: _containers.RepeatedScalarFieldContainer[str]
    provide: int
    def __init__(self, stop: _Optional[bool] = ..., reason: _Optional[str] = ..., exit_code: _Optional[int] = ..., hold: _Optional[bool] = ..., has_stop_step: _Optional[bool] = ..., stop_step: _Optional[int] = ..., checkpoint_steps: _Optional[_Iterable[int]] = ..., policy_json: _Optional[str] = ..., policy_revision: _Optional[int] = ..., drain: _Optional[bool] = ..., claims_json: _Optional[str] = ..., cut: _Optional[int] = ..., is_last_cut: _Optional[bool] = ..., transfer: _Optional[_Union[TransferAnswer, _Mapping]] = ..., away: _Optional[_Iterable[str]] = ..., provide: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "exit_code", "reason", "is_stopped", "is_early")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_STOPPED_FIELD_NUMBER: _ClassVar[int]
    IS_EARLY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: Grant
    exit_code: int
    reason: str
    is_stopped: bool
    is_early: bool
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., exit_code: _Optional[int] = ..., reason: _Optional[str] = ..., is_stopped: _Optional[bool] = ..., is_early: _Optional[bool] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("protocol_version", "watches")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WATCHES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    watches: bool
    def __init__(self, protocol_version: _Optional[int] = ..., watches: _Optional[bool] = ...) -> None: ...

class IslandStatus(_message.Message):
    __slots__ = ("island", "incarnation", "last_report", "report_age_s", "island_slot", "lease", "lease_left_s")
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_REPORT_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    ISLAND_SLOT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    island: str
    incarnation: int
    last_report: ReportRequest
    report_age_s: float
    island_slot: int
    lease: str
    lease_left_s: float
    def __init__(self, island: _Optional[str] = ..., incarnation: _Optional[int] = ..., last_report: _Optional[_Union[ReportRequest, _Mapping]] = ..., report_age_s: _Optional[float] = ..., island_slot: _Optional[int] = ..., lease: _Optional[str] = ..., lease_left_s: _Optional[float] = ...) -> None: ...

class FragmentStatus(_message.Message):
    __slots__ = ("fragment_id", "version", "attempt", "digest", "contributors", "num_contributors", "age_s", "phase", "merged_tokens", "rounds", "solo_rounds", "damage", "lost_version", "holders", "wants_header", "waits_for", "num_waits_for", "left_s")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MERGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SOLO_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    LOST_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    WANTS_HEADER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    version: int
    attempt: int
    digest: str
    contributors: _containers.RepeatedScalarFieldContainer[str]
    num_contributors: int
    age_s: float
    phase: str
    merged_tokens: int
    rounds: int
    solo_rounds: int
    damage: str
    lost_version: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    wants_header: bool
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    num_waits_for: int
    left_s: float
    def __init__(self, fragment_id: _Optional[int] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., digest: _Optional[str] = ..., contributors: _Optional[_Iterable[str]] = ..., num_contributors: _Optional[int] = ..., age_s: _Optional[float] = ..., phase: _Optional[str] = ..., merged_tokens: _Optional[int] = ..., rounds: _Optional[int] = ..., solo_rounds: _Optional[int] = ..., damage: _Optional[str] = ..., lost_version: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ..., wants_header: _Optional[bool] = ..., waits_for: _Optional[_Iterable[str]] = ..., num_waits_for: _Optional[int] = ..., left_s: _Optional[float] = ...) -> None: ...

class RefusalCount(_message.Message):
    __slots__ = ("service", "island", "cause", "count")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    service: str
    island: str
    cause: str
    count: int
    def __init__(self, service: _Optional[str] = ..., island: _Optional[str] = ..., cause: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run", "timeline", "islands", "fragments", "syncer_address", "syncer_epoch", "state", "message", "inner_steps", "checkpoint_steps", "start_step", "has_published", "refusals", "generation", "is_paused", "total_tokens", "syncers", "alarms", "exit_code", "away", "moves")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    ISLANDS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    SYNCER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SYNCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEPS_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SYNCERS_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    run: str
    timeline: int
    islands: _containers.RepeatedCompositeFieldContainer[IslandStatus]
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentStatus]
    syncer_address: str
    syncer_epoch: int
    state: str
    message: str
    inner_steps: int
    checkpoint_steps: _containers.RepeatedScalarFieldContainer[int]
    start_step: int
    has_published: bool
    refusals: _containers.RepeatedCompositeFieldContainer[RefusalCount]
    generation: int
    is_paused: bool
    total_tokens: int
    syncers: _containers.RepeatedCompositeFieldContainer[SyncerStatus]
    alarms: _containers.RepeatedCompositeFieldContainer[AlarmStatus]
    exit_code: int
    away: _containers.RepeatedScalarFieldContainer[str]
    moves: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., timeline: _Optional[int] = ..., islands: _Optional[_Iterable[_Union[IslandStatus, _Mapping]]] = ..., fragments: _Optional[_Iterable[_Union[FragmentStatus, _Mapping]]] = ..., syncer_address: _Optional[str] = ..., syncer_epoch: _Optional[int] = ..., state: _Optional[str] = ..., message: _Optional[str] = ..., inner_steps: _Optional[int] = ..., checkpoint_steps: _Optional[_Iterable[int]] = ..., start_step: _Optional[int] = ..., has_published: _Optional[bool] = ..., refusals: _Optional[_Iterable[_Union[RefusalCount, _Mapping]]] = ..., generation: _Optional[int] = ..., is_paused: _Optional[bool] = ..., total_tokens: _Optional[int] = ..., syncers: _Optional[_Iterable[_Union[SyncerStatus, _Mapping]]] = ..., alarms: _Optional[_Iterable[_Union[AlarmStatus, _Mapping]]] = ..., exit_code: _Optional[int] = ..., away: _Optional[_Iterable[str]] = ..., moves: _Optional[_Iterable[str]] = ...) -> None: ...

class SyncerStatus(_message.Message):
    __slots__ = ("syncer_id", "address", "syncer_epoch", "fragment_ids", "age_s", "name")
    SYNCER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SYNCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    syncer_id: int
    address: str
    syncer_epoch: int
    fragment_ids: _containers.RepeatedScalarFieldContainer[int]
    age_s: float
    name: str
    def __init__(self, syncer_id: _Optional[int] = ..., address: _Optional[str] = ..., syncer_epoch: _Optional[int] = ..., fragment_ids: _Optional[_Iterable[int]] = ..., age_s: _Optional[float] = ..., name: _Optional[str] = ...) -> None: ...

class OperateRequest(_message.Message):
    __slots__ = ("protocol_version", "command", "arguments")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    command: str
    arguments: _containers.ScalarMap[str, str]
    def __init__(self, protocol_version: _Optional[int] = ..., command: _Optional[str] = ..., arguments: _Optional[_Mapping[str, str]] = ...) -> None: ...

class OperateReply(_message.Message):
    __slots__ = ("is_done", "message")
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    is_done: bool
    message: str
    def __init__(self, is_done: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class RunStateRequest(_message.Message):
    __slots__ = ("protocol_version", "island")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    island: str
    def __init__(self, protocol_version: _Optional[int] = ..., island: _Optional[str] = ...) -> None: ...

class RunStateReply(_message.Message):
    __slots__ = ("run", "timeline", "state", "start_step", "has_published", "inner_steps", "island", "syncer_addresses", "fragment_syncers")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    SYNCER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_SYNCERS_FIELD_NUMBER: _ClassVar[int]
    run: str
    timeline: int
    state: str
    start_step: int
    has_published: bool
    inner_steps: int
    island: IslandStatus
    syncer_addresses: _containers.RepeatedScalarFieldContainer[str]
    fragment_syncers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., timeline: _Optional[int] = ..., state: _Optional[str] = ..., start_step: _Optional[int] = ..., has_published: _Optional[bool] = ..., inner_steps: _Optional[int] = ..., island: _Optional[_Union[IslandStatus, _Mapping]] = ..., syncer_addresses: _Optional[_Iterable[str]] = ..., fragment_syncers: _Optional[_Iterable[int]] = ...) -> None: ...

class SyncerHelloRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "address", "syncer_epoch", "pid", "syncer_id", "has_ended", "reason", "moves")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SYNCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SYNCER_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: Grant
    address: str
    syncer_epoch: int
    pid: int
    syncer_id: int
    has_ended: bool
    reason: str
    moves: _containers.RepeatedCompositeFieldContainer[FragmentMove]
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., address: _Optional[str] = ..., syncer_epoch: _Optional[int] = ..., pid: _Optional[int] = ..., syncer_id: _Optional[int] = ..., has_ended: _Optional[bool] = ..., reason: _Optional[str] = ..., moves: _Optional[_Iterable[_Union[FragmentMove, _Mapping]]] = ...) -> None: ...

class FragmentMove(_message.Message):
    __slots__ = ("fragment_id", "number", "stage", "copied_bytes", "total_bytes", "waits")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    number: int
    stage: MoveStage
    copied_bytes: int
    total_bytes: int
    waits: str
    def __init__(self, fragment_id: _Optional[int] = ..., number: _Optional[int] = ..., stage: _Optional[_Union[MoveStage, str]] = ..., copied_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., waits: _Optional[str] = ...) -> None: ...

class SyncerHelloReply(_message.Message):
    __slots__ = ("plan", "islands", "fragment_ids", "num_indexed", "indexed_digests", "incarnations", "timeline", "lease", "ends", "policy_digest", "takes", "elsewhere", "withdrawn")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ISLANDS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_INDEXED_FIELD_NUMBER: _ClassVar[int]
    INDEXED_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    islands: _containers.RepeatedScalarFieldContainer[str]
    fragment_ids: _containers.RepeatedScalarFieldContainer[int]
    num_indexed: _containers.RepeatedScalarFieldContainer[int]
    indexed_digests: _containers.RepeatedScalarFieldContainer[str]
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    timeline: int
    lease: int
    ends: bool
    policy_digest: str
    takes: _containers.RepeatedCompositeFieldContainer[FragmentSource]
    elsewhere: _containers.RepeatedScalarFieldContainer[int]
    withdrawn: _containers.RepeatedCompositeFieldContainer[FragmentSource]
    def __init__(self, plan: _Optional[bytes] = ..., islands: _Optional[_Iterable[str]] = ..., fragment_ids: _Optional[_Iterable[int]] = ..., num_indexed: _Optional[_Iterable[int]] = ..., indexed_digests: _Optional[_Iterable[str]] = ..., incarnations: _Optional[_Iterable[int]] = ..., timeline: _Optional[int] = ..., lease: _Optional[int] = ..., ends: _Optional[bool] = ..., policy_digest: _Optional[str] = ..., takes: _Optional[_Iterable[_Union[FragmentSource, _Mapping]]] = ..., elsewhere: _Optional[_Iterable[int]] = ..., withdrawn: _Optional[_Iterable[_Union[FragmentSource, _Mapping]]] = ...) -> None: ...

class FragmentSource(_message.Message):
    __slots__ = ("fragment_id", "syncer", "number", "is_held")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SYNCER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    syncer: str
    number: int
    is_held: bool
    def __init__(self, fragment_id: _Optional[int] = ..., syncer: _Optional[str] = ..., number: _Optional[int] = ..., is_held: _Optional[bool] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("protocol_version", "grant", "syncer_epoch", "fragments", "record_json", "fatal_reason", "fatal_exit_code", "refusals", "pinned_cut", "syncer_id", "expiry", "alarms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SYNCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    FATAL_REASON_FIELD_NUMBER: _ClassVar[int]
    FATAL_EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    PINNED_CUT_FIELD_NUMBER: _ClassVar[int]
    SYNCER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: Grant
    syncer_epoch: int
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentStatus]
    record_json: str
    fatal_reason: str
    fatal_exit_code: int
    refusals: _containers.RepeatedCompositeFieldContainer[RefusalCount]
    pinned_cut: int
    syncer_id: int
    expiry: Expiry
    alarms: _containers.RepeatedCompositeFieldContainer[Alarm]
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., syncer_epoch: _Optional[int] = ..., fragments: _Optional[_Iterable[_Union[FragmentStatus, _Mapping]]] = ..., record_json: _Optional[str] = ..., fatal_reason: _Optional[str] = ..., fatal_exit_code: _Optional[int] = ..., refusals: _Optional[_Iterable[_Union[RefusalCount, _Mapping]]] = ..., pinned_cut: _Optional[int] = ..., syncer_id: _Optional[int] = ..., expiry: _Optional[_Union[Expiry, _Mapping]] = ..., alarms: _Optional[_Iterable[_Union[Alarm, _Mapping]]] = ...) -> None: ...

class Expiry(_message.Message):
    __slots__ = ("fragment_id", "version", "attempt", "missing", "reason")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    version: int
    attempt: int
    missing: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, fragment_id: _Optional[int] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., missing: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class RoundReportReply(_message.Message):
    __slots__ = ("checkpoint_steps", "roster", "policy_json", "policy_revision", "cut", "cut_versions", "repairs", "transfers")
    CHECKPOINT_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    POLICY_JSON_FIELD_NUMBER: _ClassVar[int]
    POLICY_REVISION_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    CUT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    checkpoint_steps: _containers.RepeatedScalarFieldContainer[int]
    roster: Roster
    policy_json: str
    policy_revision: int
    cut: int
    cut_versions: _containers.RepeatedScalarFieldContainer[int]
    repairs: _containers.RepeatedCompositeFieldContainer[Repair]
    transfers: _containers.RepeatedCompositeFieldContainer[StateTransfer]
    def __init__(self, checkpoint_steps: _Optional[_Iterable[int]] = ..., roster: _Optional[_Union[Roster, _Mapping]] = ..., policy_json: _Optional[str] = ..., policy_revision: _Optional[int] = ..., cut: _Optional[int] = ..., cut_versions: _Optional[_Iterable[int]] = ..., repairs: _Optional[_Iterable[_Union[Repair, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[StateTransfer, _Mapping]]] = ...) -> None: ...

class StateTransfer(_message.Message):
    __slots__ = ("source", "island", "checkpoint")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    source: str
    island: str
    checkpoint: int
    def __init__(self, source: _Optional[str] = ..., island: _Optional[str] = ..., checkpoint: _Optional[int] = ...) -> None: ...

class Repair(_message.Message):
    __slots__ = ("fragment_id", "island", "record_json")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    island: str
    record_json: str
    def __init__(self, fragment_id: _Optional[int] = ..., island: _Optional[str] = ..., record_json: _Optional[str] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("generation", "live", "fenced", "is_paused", "min_islands")
    class FencedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    MIN_ISLANDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    live: _containers.RepeatedScalarFieldContainer[str]
    fenced: _containers.ScalarMap[str, int]
    is_paused: bool
    min_islands: int
    def __init__(self, generation: _Optional[int] = ..., live: _Optional[_Iterable[str]] = ..., fenced: _Optional[_Mapping[str, int]] = ..., is_paused: _Optional[bool] = ..., min_islands: _Optional[int] = ...) -> None: ...

class ClockRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class ClockReply(_message.Message):
    __slots__ = ("unix_s",)
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    def __init__(self, unix_s: _Optional[float] = ...) -> None: ...
