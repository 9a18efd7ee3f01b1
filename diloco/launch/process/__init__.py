"""Shared by all processes of a run: logs, ending, restarts, waiting for disk space."""
