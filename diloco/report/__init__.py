"""Reports on runs: summaries and tables, and the bodies of replay and repair."""
