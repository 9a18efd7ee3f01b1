"""Commands for a run under way, and for its store."""
