"""Benchmarks of training: beside data parallel, plain PyTorch, other layouts."""
