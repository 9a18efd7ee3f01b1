"""The virtual clock, its network, and what is drawn of a simulated run."""
