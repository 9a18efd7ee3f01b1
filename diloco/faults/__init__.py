"""Faults that `diloco chaos` plants in a process: bad links, flipped bits, wrong clocks."""
