"""The virtual clock, the network under it, and timelines of simulated runs."""
