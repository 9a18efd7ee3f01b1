"""Checkpoints (`checkpoint_writer`), mirrors, copies in memory, coming back, warm start, export."""
