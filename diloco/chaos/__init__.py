"""Faults on purpose in a real run on this machine, and the judgement of the result."""
