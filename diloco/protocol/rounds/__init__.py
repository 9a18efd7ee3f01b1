"""Rounds of one fragment: when one closes or expires (`state`, `timing`), and its messages."""
