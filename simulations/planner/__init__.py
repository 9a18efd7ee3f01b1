"""The body of `diloco plan`: time of a run on its links and machines, and better settings."""
