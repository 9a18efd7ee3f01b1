"""Benchmarks of the syncer: islands a core, time and memory of a round."""
