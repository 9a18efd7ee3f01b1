"""An island's side of the rounds: lanes, exchange, public session."""
