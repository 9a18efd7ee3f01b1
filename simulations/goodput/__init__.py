"""Goodput of many chips that fail: vectorised, and the same for the same seed."""
