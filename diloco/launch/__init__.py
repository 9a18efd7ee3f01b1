"""Processes: spawning, supervising and ending them; the only readers of the environment."""

import os

# gRPC writes a line of its own for every handshake of a stranger that fails: gigabytes a day. What
# is refused is counted, and told within bounds, by the transport.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
