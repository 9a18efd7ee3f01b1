"""What a run was: summaries, tables, replay and repair of its store."""
