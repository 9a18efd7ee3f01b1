from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class VectorHeader(_message.Message):
    __slots__ = ("protocol_version", "start", "island", "island_rank", "reduction", "chunk", "hop")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    ISLAND_RANK_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    start: str
    island: str
    island_rank: int
    reduction: int
    chunk: int
    hop: int
    def __init__(self, protocol_version: _Optional[int] = ..., start: _Optional[str] = ..., island: _Optional[str] = ..., island_rank: _Optional[int] = ..., reduction: _Optional[int] = ..., chunk: _Optional[int] = ..., hop: _Optional[int] = ...) -> None: ...
