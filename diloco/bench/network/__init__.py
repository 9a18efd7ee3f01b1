"""Benchmarks of links: how much of them the transport and all-reduce fill."""
