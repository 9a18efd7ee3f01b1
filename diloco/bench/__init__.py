"""Benchmarks: what the loop costs and whether it learns, each with a table, JSON and a bar."""
