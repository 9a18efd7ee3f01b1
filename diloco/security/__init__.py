"""Security of one run: its certificate authority, tokens, who may call what, addresses."""
