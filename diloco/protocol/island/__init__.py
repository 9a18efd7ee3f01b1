"""An island's side of the rounds: its contributions, their outcomes, checks of its own work."""
