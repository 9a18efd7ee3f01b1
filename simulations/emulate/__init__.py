"""Emulated networks on one machine: a network namespace for each site, links of the kernel."""
