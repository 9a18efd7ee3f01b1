"""Lanes: which values of a fragment each rank of an island stores and sends."""
