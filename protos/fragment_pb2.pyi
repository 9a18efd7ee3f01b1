from diloco.protos import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OutcomeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_KIND_UNSPECIFIED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_INCLUDED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_NOT_INCLUDED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_EXPIRED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_REFUSED: _ClassVar[OutcomeKind]

class SubmitStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUBMIT_STATUS_UNSPECIFIED: _ClassVar[SubmitStatus]
    SUBMIT_STATUS_RECEIVED: _ClassVar[SubmitStatus]
    SUBMIT_STATUS_REPEAT: _ClassVar[SubmitStatus]
    SUBMIT_STATUS_OUTCOME: _ClassVar[SubmitStatus]
    SUBMIT_STATUS_CONFLICT: _ClassVar[SubmitStatus]
    SUBMIT_STATUS_FENCED: _ClassVar[SubmitStatus]
    SUBMIT_STATUS_NOT_OPEN: _ClassVar[SubmitStatus]
    SUBMIT_STATUS_INVALID: _ClassVar[SubmitStatus]

class FetchKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FETCH_KIND_UNSPECIFIED: _ClassVar[FetchKind]
    FETCH_KIND_PAYLOAD: _ClassVar[FetchKind]
    FETCH_KIND_DENSE: _ClassVar[FetchKind]

class FetchStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FETCH_STATUS_UNSPECIFIED: _ClassVar[FetchStatus]
    FETCH_STATUS_OK: _ClassVar[FetchStatus]
    FETCH_STATUS_GONE: _ClassVar[FetchStatus]
    FETCH_STATUS_UNKNOWN: _ClassVar[FetchStatus]
    FETCH_STATUS_FENCED: _ClassVar[FetchStatus]
OUTCOME_KIND_UNSPECIFIED: OutcomeKind
OUTCOME_KIND_INCLUDED: OutcomeKind
OUTCOME_KIND_NOT_INCLUDED: OutcomeKind
OUTCOME_KIND_EXPIRED: OutcomeKind
OUTCOME_KIND_REFUSED: OutcomeKind
SUBMIT_STATUS_UNSPECIFIED: SubmitStatus
SUBMIT_STATUS_RECEIVED: SubmitStatus
SUBMIT_STATUS_REPEAT: SubmitStatus
SUBMIT_STATUS_OUTCOME: SubmitStatus
SUBMIT_STATUS_CONFLICT: SubmitStatus
SUBMIT_STATUS_FENCED: SubmitStatus
SUBMIT_STATUS_NOT_OPEN: SubmitStatus
SUBMIT_STATUS_INVALID: SubmitStatus
FETCH_KIND_UNSPECIFIED: FetchKind
FETCH_KIND_PAYLOAD: FetchKind
FETCH_KIND_DENSE: FetchKind
FETCH_STATUS_UNSPECIFIED: FetchStatus
FETCH_STATUS_OK: FetchStatus
FETCH_STATUS_GONE: FetchStatus
FETCH_STATUS_UNKNOWN: FetchStatus
FETCH_STATUS_FENCED: FetchStatus

class RoundKey(_message.Message):
    __slots__ = ("timeline", "fragment_id", "version", "attempt")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    fragment_id: int
    version: int
    attempt: int
    def __init__(self, timeline: _Optional[int] = ..., fragment_id: _Optional[int] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("key", "kind", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: RoundKey
    kind: OutcomeKind
    reason: str
    def __init__(self, key: _Optional[_Union[RoundKey, _Mapping]] = ..., kind: _Optional[_Union[OutcomeKind, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class SubmitHeader(_message.Message):
    __slots__ = ("protocol_version", "grant", "key", "lane_id", "sent_at_inner_step", "weight_tokens", "weight_steps", "is_flush", "codec", "digest")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_FLUSH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    key: RoundKey
    lane_id: int
    sent_at_inner_step: int
    weight_tokens: int
    weight_steps: int
    is_flush: bool
    codec: str
    digest: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., key: _Optional[_Union[RoundKey, _Mapping]] = ..., lane_id: _Optional[int] = ..., sent_at_inner_step: _Optional[int] = ..., weight_tokens: _Optional[int] = ..., weight_steps: _Optional[int] = ..., is_flush: _Optional[bool] = ..., codec: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("syncer_epoch", "status", "outcome", "message")
    SYNCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    syncer_epoch: int
    status: SubmitStatus
    outcome: Outcome
    message: str
    def __init__(self, syncer_epoch: _Optional[int] = ..., status: _Optional[_Union[SubmitStatus, str]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., message: _Optional[str] = ...) -> None: ...

class DeclineRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "key", "reason")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    key: RoundKey
    reason: str
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., key: _Optional[_Union[RoundKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("protocol_version", "grant", "fragment_id", "lane_id", "digest", "is_published", "version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IS_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    fragment_id: int
    lane_id: int
    digest: bytes
    is_published: bool
    version: int
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., fragment_id: _Optional[int] = ..., lane_id: _Optional[int] = ..., digest: _Optional[bytes] = ..., is_published: _Optional[bool] = ..., version: _Optional[int] = ...) -> None: ...

class FragmentState(_message.Message):
    __slots__ = ("fragment_id", "is_founded", "version", "attempt", "is_open", "digest", "lane_digests", "contributors", "wants_initial", "payload_codec", "sent_at_inner_step", "is_flush", "members", "merged_tokens", "takes_flush", "asks_trial", "is_member", "counted_version", "counted_attempt", "is_damaged", "asked", "wanted_version", "num_held")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    IS_FOUNDED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LANE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    WANTS_INITIAL_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CODEC_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    IS_FLUSH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MERGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAKES_FLUSH_FIELD_NUMBER: _ClassVar[int]
    ASKS_TRIAL_FIELD_NUMBER: _ClassVar[int]
    IS_MEMBER_FIELD_NUMBER: _ClassVar[int]
    COUNTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNTED_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IS_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    WANTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    is_founded: bool
    version: int
    attempt: int
    is_open: bool
    digest: bytes
    lane_digests: _containers.RepeatedScalarFieldContainer[bytes]
    contributors: _containers.RepeatedScalarFieldContainer[str]
    wants_initial: bool
    payload_codec: str
    sent_at_inner_step: int
    is_flush: bool
    members: _containers.RepeatedScalarFieldContainer[str]
    merged_tokens: int
    takes_flush: bool
    asks_trial: bool
    is_member: bool
    counted_version: int
    counted_attempt: int
    is_damaged: bool
    asked: int
    wanted_version: int
    num_held: int
    def __init__(self, fragment_id: _Optional[int] = ..., is_founded: _Optional[bool] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., is_open: _Optional[bool] = ..., digest: _Optional[bytes] = ..., lane_digests: _Optional[_Iterable[bytes]] = ..., contributors: _Optional[_Iterable[str]] = ..., wants_initial: _Optional[bool] = ..., payload_codec: _Optional[str] = ..., sent_at_inner_step: _Optional[int] = ..., is_flush: _Optional[bool] = ..., members: _Optional[_Iterable[str]] = ..., merged_tokens: _Optional[int] = ..., takes_flush: _Optional[bool] = ..., asks_trial: _Optional[bool] = ..., is_member: _Optional[bool] = ..., counted_version: _Optional[int] = ..., counted_attempt: _Optional[int] = ..., is_damaged: _Optional[bool] = ..., asked: _Optional[int] = ..., wanted_version: _Optional[int] = ..., num_held: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "checkpoint_step", "versions")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    checkpoint_step: int
    versions: _containers.RepeatedCompositeFieldContainer[Pinned]
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., checkpoint_step: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[Pinned, _Mapping]]] = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("fragment_id", "version")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    version: int
    def __init__(self, fragment_id: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Fatal(_message.Message):
    __slots__ = ("exit_code", "reason")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    reason: str
    def __init__(self, exit_code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PollRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "known_epoch", "known", "outstanding", "wait_s", "step_s", "sent_by")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SENT_BY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    known_epoch: int
    known: _containers.RepeatedCompositeFieldContainer[FragmentState]
    outstanding: _containers.RepeatedCompositeFieldContainer[RoundKey]
    wait_s: float
    step_s: float
    sent_by: int
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., known_epoch: _Optional[int] = ..., known: _Optional[_Iterable[_Union[FragmentState, _Mapping]]] = ..., outstanding: _Optional[_Iterable[_Union[RoundKey, _Mapping]]] = ..., wait_s: _Optional[float] = ..., step_s: _Optional[float] = ..., sent_by: _Optional[int] = ...) -> None: ...

class PollReply(_message.Message):
    __slots__ = ("syncer_epoch", "fragments", "outcomes", "fatal", "is_fenced", "message", "asks_first")
    SYNCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    IS_FENCED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIRST_FIELD_NUMBER: _ClassVar[int]
    syncer_epoch: int
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentState]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    fatal: Fatal
    is_fenced: bool
    message: str
    asks_first: bool
    def __init__(self, syncer_epoch: _Optional[int] = ..., fragments: _Optional[_Iterable[_Union[FragmentState, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., fatal: _Optional[_Union[Fatal, _Mapping]] = ..., is_fenced: _Optional[bool] = ..., message: _Optional[str] = ..., asks_first: _Optional[bool] = ...) -> None: ...

class FetchHeader(_message.Message):
    __slots__ = ("protocol_version", "grant", "fragment_id", "version", "kind", "lane_ids")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LANE_IDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    fragment_id: int
    version: int
    kind: FetchKind
    lane_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., fragment_id: _Optional[int] = ..., version: _Optional[int] = ..., kind: _Optional[_Union[FetchKind, str]] = ..., lane_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("syncer_epoch", "status", "codec", "digest", "message")
    SYNCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    syncer_epoch: int
    status: FetchStatus
    codec: str
    digest: bytes
    message: str
    def __init__(self, syncer_epoch: _Optional[int] = ..., status: _Optional[_Union[FetchStatus, str]] = ..., codec: _Optional[str] = ..., digest: _Optional[bytes] = ..., message: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("syncer_epoch", "is_accepted", "message", "is_fenced")
    SYNCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IS_FENCED_FIELD_NUMBER: _ClassVar[int]
    syncer_epoch: int
    is_accepted: bool
    message: str
    is_fenced: bool
    def __init__(self, syncer_epoch: _Optional[int] = ..., is_accepted: _Optional[bool] = ..., message: _Optional[str] = ..., is_fenced: _Optional[bool] = ...) -> None: ...

class StatePutHeader(_message.Message):
    __slots__ = ("protocol_version", "grant", "checkpoint", "is_manifest", "fragment_id", "lane_id", "digest")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    IS_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    checkpoint: int
    is_manifest: bool
    fragment_id: int
    lane_id: int
    digest: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., checkpoint: _Optional[int] = ..., is_manifest: _Optional[bool] = ..., fragment_id: _Optional[int] = ..., lane_id: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class StateGetHeader(_message.Message):
    __slots__ = ("protocol_version", "grant", "source", "checkpoint", "is_manifest", "fragment_id", "lane_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    IS_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    source: str
    checkpoint: int
    is_manifest: bool
    fragment_id: int
    lane_id: int
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., source: _Optional[str] = ..., checkpoint: _Optional[int] = ..., is_manifest: _Optional[bool] = ..., fragment_id: _Optional[int] = ..., lane_id: _Optional[int] = ...) -> None: ...
