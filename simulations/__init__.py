"""Simulations of runs: virtual clock, planner, laboratory, emulated networks, checks."""
