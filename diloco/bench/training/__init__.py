"""Benchmarks of training: all-reduce against DiLoCo, plain PyTorch, more ranks."""
