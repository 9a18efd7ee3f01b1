"""Rounds of fragments: pure machine, durable store, syncer process."""
