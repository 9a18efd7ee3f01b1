"""Goodput of very many chips that fail: vectorised, for a seed always the same."""
