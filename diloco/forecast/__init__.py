"""Estimates memory, disk and traffic of a run from its configuration alone."""
