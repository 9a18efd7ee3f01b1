"""An island's side of a run: the outer loop, the public session, its ranks' agreement."""
