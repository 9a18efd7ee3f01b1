"""Constants that gRPC client and server share: service name, channel options, status codes."""

from __future__ import annotations

from grpc import StatusCode

from diloco.transport.errors import (
    DamagedFrame,
    DeadlineExceeded,
    FrameError,
    PeerReset,
    TransportError,
)
from diloco.transport.framing import MAX_MESSAGE_BYTES

SERVICE = "diloco.wire.v1"

#: Sent by a server as soon as it takes a call; a call that broke without it never arrived.
ACCEPTED_METADATA = ("diloco-accepted", "1")
#: Carries a caller's token.
TOKEN_METADATA = "diloco-token"
#: Method by which an island has the coordinator issue a leaf: header and reply are `Tls.issue`'s.
ISSUE_METHOD = "transport.issue"

KEEPALIVE_TIME_MS = 20_000
#: Without a single byte of the peer's after a ping, its connection is dead.
KEEPALIVE_TIMEOUT_MS = 30_000
#: Until the answer to a ping itself must have come, however much else has: it waits behind what its
#: sender's socket holds, some megabytes, which take a minute at 1 Mbit/s.
PING_TIMEOUT_MS = 600_000
CONNECT_TIMEOUT_MS = 5_000
#: The same where the next address is waiting to be tried.
CANDIDATE_TIMEOUT_MS = 2_000
MAX_RECONNECT_WAIT_MS = 1_000
HANDSHAKE_TIMEOUT_MS = 20_000
IDLE_CONNECTION_MS = 600_000
MAX_METADATA_BYTES = 8 << 10
#: Streams of one connection, refused calls among them: more wait at the client's end.
MAX_STREAMS = 2048

_BOTH = (
    # A payload has no limit; a message has, by the protocol, so none is received unbounded.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Chunks are packed by `shaping.packing`, if at all; a message that swells is refused unread.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)

CHANNEL_OPTIONS = (
    *_BOTH,
    # Retries are `retry`'s: gRPC's own would keep copies of what was sent.
    ("grpc.enable_retries", 0),
    # One transport is one connection, so that control never queues behind data.
    ("grpc.use_local_subchannel_pool", 1),
    # Which way a call takes is configuration, never the environment's http_proxy.
    ("grpc.enable_http_proxy", 0),
    # A server that comes back under another address of its name is found soon, too.
    ("grpc.dns_min_time_between_resolutions_ms", MAX_RECONNECT_WAIT_MS),
    # A restarted server is found within about a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_WAIT_MS),
    # Despite its name: how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
)

SERVER_OPTIONS = (
    *_BOTH,
    # Clients ping every KEEPALIVE_TIME_MS: allow that with room, or they get too_many_pings.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 4),
    # And to measure bandwidth, as data arrives that left long before: the usual two would end it.
    ("grpc.http2.max_ping_strikes", 1000),
    # Anyone who connects and says nothing, or never calls, is let go.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)

#: What the gRPC runtime itself reports. Failures of handlers are frames, not status codes: an
#: early status can be lost while its caller is still sending.
STATUS_ERRORS: dict[StatusCode, type[TransportError]] = {
    StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    StatusCode.UNAVAILABLE: PeerReset,  # ConnectError if the call was never accepted
    StatusCode.CANCELLED: PeerReset,
    StatusCode.INTERNAL: PeerReset,
    StatusCode.UNKNOWN: PeerReset,
    # No peer sends a message over the bound: its length came to harm.
    StatusCode.RESOURCE_EXHAUSTED: DamagedFrame,
    StatusCode.UNIMPLEMENTED: FrameError,  # a gRPC server, but not of this service
}
