"""Saving and coming back: checkpoints, mirrors, copies in memory, warm start, export."""
