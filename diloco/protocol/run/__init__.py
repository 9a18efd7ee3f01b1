"""A run as its coordinator decides it: members, leases, checkpoints, text, operators."""
