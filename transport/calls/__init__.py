"""Shared by clients and servers of all wires: dispatch, limits, resumable payloads, loopback."""
