"""What every process of a run does alike: logs, ending, restarts, room on disk."""
