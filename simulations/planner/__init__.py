"""What a run will take on its links and machines, and which settings take least."""
