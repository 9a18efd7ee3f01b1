"""Benchmarks of the outer loop: its cost, its memory, its codecs, its faults."""
