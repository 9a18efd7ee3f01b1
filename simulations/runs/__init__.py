"""A run of a run file under the virtual clock."""
