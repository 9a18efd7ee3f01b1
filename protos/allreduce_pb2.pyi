from diloco.protos import control_pb2 as _control_pb2
from diloco.protos import fragment_pb2 as _fragment_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LaneStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_STATUS_UNSPECIFIED: _ClassVar[LaneStatus]
    LANE_STATUS_OK: _ClassVar[LaneStatus]
    LANE_STATUS_NOT_YET: _ClassVar[LaneStatus]
    LANE_STATUS_UNKNOWN: _ClassVar[LaneStatus]
LANE_STATUS_UNSPECIFIED: LaneStatus
LANE_STATUS_OK: LaneStatus
LANE_STATUS_NOT_YET: LaneStatus
LANE_STATUS_UNKNOWN: LaneStatus

class Contributor(_message.Message):
    __slots__ = ("island", "incarnation", "weight_tokens", "weight_steps", "sent_at_inner_step", "lane_digests")
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_STEPS_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    LANE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    island: str
    incarnation: int
    weight_tokens: int
    weight_steps: int
    sent_at_inner_step: int
    lane_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, island: _Optional[str] = ..., incarnation: _Optional[int] = ..., weight_tokens: _Optional[int] = ..., weight_steps: _Optional[int] = ..., sent_at_inner_step: _Optional[int] = ..., lane_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("key", "members", "contributors", "is_flush", "refused", "generation")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    IS_FLUSH_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    key: _fragment_pb2.RoundKey
    members: _containers.RepeatedScalarFieldContainer[str]
    contributors: _containers.RepeatedCompositeFieldContainer[Contributor]
    is_flush: bool
    refused: _containers.ScalarMap[str, str]
    generation: int
    def __init__(self, key: _Optional[_Union[_fragment_pb2.RoundKey, _Mapping]] = ..., members: _Optional[_Iterable[str]] = ..., contributors: _Optional[_Iterable[_Union[Contributor, _Mapping]]] = ..., is_flush: _Optional[bool] = ..., refused: _Optional[_Mapping[str, str]] = ..., generation: _Optional[int] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("fragment_id", "is_founded", "version", "attempt", "is_open", "wants_initial", "state_digest", "assignment")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    IS_FOUNDED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    WANTS_INITIAL_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    is_founded: bool
    version: int
    attempt: int
    is_open: bool
    wants_initial: bool
    state_digest: bytes
    assignment: Assignment
    def __init__(self, fragment_id: _Optional[int] = ..., is_founded: _Optional[bool] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., is_open: _Optional[bool] = ..., wants_initial: _Optional[bool] = ..., state_digest: _Optional[bytes] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("island", "incarnation", "address", "mac_digest")
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    island: str
    incarnation: int
    address: str
    mac_digest: bytes
    def __init__(self, island: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., mac_digest: _Optional[bytes] = ...) -> None: ...

class PollRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "address", "decider_id", "sequence", "outstanding", "wait_s", "unreached")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECIDER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    address: str
    decider_id: str
    sequence: int
    outstanding: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.RoundKey]
    wait_s: float
    unreached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., address: _Optional[str] = ..., decider_id: _Optional[str] = ..., sequence: _Optional[int] = ..., outstanding: _Optional[_Iterable[_Union[_fragment_pb2.RoundKey, _Mapping]]] = ..., wait_s: _Optional[float] = ..., unreached: _Optional[_Iterable[str]] = ...) -> None: ...

class PollReply(_message.Message):
    __slots__ = ("decider_id", "sequence", "fragments", "outcomes", "peers", "peer_grant", "fatal", "is_fenced", "message")
    DECIDER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PEER_GRANT_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    IS_FENCED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    decider_id: str
    sequence: int
    fragments: _containers.RepeatedCompositeFieldContainer[Announcement]
    outcomes: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.Outcome]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    peer_grant: _control_pb2.Grant
    fatal: _fragment_pb2.Fatal
    is_fenced: bool
    message: str
    def __init__(self, decider_id: _Optional[str] = ..., sequence: _Optional[int] = ..., fragments: _Optional[_Iterable[_Union[Announcement, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[_fragment_pb2.Outcome, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., peer_grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., fatal: _Optional[_Union[_fragment_pb2.Fatal, _Mapping]] = ..., is_fenced: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class DeclareRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "key", "sent_at_inner_step", "weight_tokens", "weight_steps", "is_flush", "lane_digests")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_FLUSH_FIELD_NUMBER: _ClassVar[int]
    LANE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    key: _fragment_pb2.RoundKey
    sent_at_inner_step: int
    weight_tokens: int
    weight_steps: int
    is_flush: bool
    lane_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., key: _Optional[_Union[_fragment_pb2.RoundKey, _Mapping]] = ..., sent_at_inner_step: _Optional[int] = ..., weight_tokens: _Optional[int] = ..., weight_steps: _Optional[int] = ..., is_flush: _Optional[bool] = ..., lane_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PreparedRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "fragment_id", "assignment_id", "lane_digests", "state_digest", "broken", "malformed")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    fragment_id: int
    assignment_id: bytes
    lane_digests: _containers.RepeatedScalarFieldContainer[bytes]
    state_digest: bytes
    broken: str
    malformed: str
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., fragment_id: _Optional[int] = ..., assignment_id: _Optional[bytes] = ..., lane_digests: _Optional[_Iterable[bytes]] = ..., state_digest: _Optional[bytes] = ..., broken: _Optional[str] = ..., malformed: _Optional[str] = ...) -> None: ...

class FoundRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "record_json", "state_digest", "fragment_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    record_json: str
    state_digest: bytes
    fragment_id: int
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., record_json: _Optional[str] = ..., state_digest: _Optional[bytes] = ..., fragment_id: _Optional[int] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("protocol_version", "grant", "fragment_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    fragment_id: int
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., fragment_id: _Optional[int] = ...) -> None: ...

class RecordReply(_message.Message):
    __slots__ = ("record_json", "state_digest", "message")
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    record_json: str
    state_digest: bytes
    message: str
    def __init__(self, record_json: _Optional[str] = ..., state_digest: _Optional[bytes] = ..., message: _Optional[str] = ...) -> None: ...

class ContributionHeader(_message.Message):
    __slots__ = ("protocol_version", "grant", "key", "lane_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    key: _fragment_pb2.RoundKey
    lane_id: int
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., key: _Optional[_Union[_fragment_pb2.RoundKey, _Mapping]] = ..., lane_id: _Optional[int] = ...) -> None: ...

class ResultHeader(_message.Message):
    __slots__ = ("protocol_version", "grant", "fragment_id", "lane_id", "assignment_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    fragment_id: int
    lane_id: int
    assignment_id: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., fragment_id: _Optional[int] = ..., lane_id: _Optional[int] = ..., assignment_id: _Optional[bytes] = ...) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("protocol_version", "grant", "fragment_id", "lane_id", "state_digest", "section")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _control_pb2.Grant
    fragment_id: int
    lane_id: int
    state_digest: bytes
    section: str
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_control_pb2.Grant, _Mapping]] = ..., fragment_id: _Optional[int] = ..., lane_id: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., section: _Optional[str] = ...) -> None: ...

class LaneReply(_message.Message):
    __slots__ = ("status", "digest", "message")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: LaneStatus
    digest: bytes
    message: str
    def __init__(self, status: _Optional[_Union[LaneStatus, str]] = ..., digest: _Optional[bytes] = ..., message: _Optional[str] = ...) -> None: ...
