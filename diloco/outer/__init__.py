"""The algorithm between islands, pure: fragments, schedule, pseudo-gradients, outer step, merge."""
