"""Transport `zipped`: gRPC whose payloads are compressed; their true size leads the header."""

import struct

import zstandard

from diloco.transport.contracts import Reply
from diloco.transport.errors import MessageTooLarge
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer

SIZE = struct.Struct("<Q")


def zipped(header, payload):
    size = memoryview(payload).nbytes
    return SIZE.pack(size) + header, zstandard.compress(payload) if size else b""


def unzipped(payload, size, most):
    if size > most or (size and zstandard.get_frame_parameters(payload).content_size != size):
        raise MessageTooLarge(f"a payload of {size} bytes was announced; {most} are allowed")
    return zstandard.ZstdDecompressor().decompress(payload) if size else b""


class Call:
    def __init__(self, call):
        self._call, (self.payload_bytes,) = call, SIZE.unpack_from(call.header)
        self.header = call.header[SIZE.size :]

    def __getattr__(self, name):
        return getattr(self._call, name)

    async def read_payload(self):
        size = self.payload_bytes
        return unzipped(await self._call.read_payload(), size, size)


class Client(GrpcTransport):
    async def call(self, method, header, payload=b"", *, max_reply_bytes=0, **terms):
        most = max_reply_bytes + (1024 + max_reply_bytes // 128 if max_reply_bytes else 0)
        reply = await super().call(method, *zipped(header, payload), max_reply_bytes=most, **terms)
        (size,), header = SIZE.unpack_from(reply.header), reply.header[SIZE.size :]
        return Reply(header, unzipped(reply.payload, size, max_reply_bytes))


def answering(handler):
    async def answer(call):
        reply = await handler(Call(call))
        return Reply(*zipped(reply.header, reply.payload), reply.on_sent, reply.digest)

    return answer


class ZIPPED:
    connect = Client

    def serve(bind, handlers, *, chunk_bytes):
        packed = {method: answering(handler) for method, handler in handlers.items()}
        return GrpcServer(bind, packed, chunk_bytes=chunk_bytes)
