"""The pure machines of a run: no clock, IO, thread or environment. The law is PROTOCOL.md."""
