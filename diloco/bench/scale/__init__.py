"""Benchmarks at the size of the largest runs: coordinator and syncer, refusals and CPU time."""
