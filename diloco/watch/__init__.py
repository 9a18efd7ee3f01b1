"""The screen of a run in a terminal: `diloco watch`."""
