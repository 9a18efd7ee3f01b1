"""The syncer: serves the rounds of its fragments and merges what islands send."""
