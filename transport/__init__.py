"""Bytes, links and peers: how one process calls another across a WAN.

Knows nothing of tensors or of the algorithm. `contracts` is what the rest of the system sees.
"""
