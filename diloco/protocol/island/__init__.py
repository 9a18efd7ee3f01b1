"""An island's side of the rounds: what it owes and is owed, and whether its work is sound."""
