"""Scenarios in figures: utilisation, bandwidth and wall-clock time."""
