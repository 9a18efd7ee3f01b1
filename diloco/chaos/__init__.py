"""Faults on purpose against a real run on this machine, and the judgement of what came of it."""
