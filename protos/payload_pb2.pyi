from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ObjectCall(_message.Message):
    __slots__ = ("protocol_version", "method", "header", "transfer", "payload_bytes", "digest", "is_written", "is_received", "lost")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    IS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    method: str
    header: bytes
    transfer: bytes
    payload_bytes: int
    digest: bytes
    is_written: bool
    is_received: bool
    lost: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., method: _Optional[str] = ..., header: _Optional[bytes] = ..., transfer: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., is_written: _Optional[bool] = ..., is_received: _Optional[bool] = ..., lost: _Optional[bytes] = ...) -> None: ...

class ObjectReply(_message.Message):
    __slots__ = ("header", "put_urls", "is_lost", "piece_bytes", "get_url", "payload_bytes", "digest")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PUT_URLS_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GET_URL_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    put_urls: _containers.RepeatedScalarFieldContainer[str]
    is_lost: bool
    piece_bytes: int
    get_url: str
    payload_bytes: int
    digest: bytes
    def __init__(self, header: _Optional[bytes] = ..., put_urls: _Optional[_Iterable[str]] = ..., is_lost: _Optional[bool] = ..., piece_bytes: _Optional[int] = ..., get_url: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...
