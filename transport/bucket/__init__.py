"""Calls whose payloads travel as objects of a store, at addresses that the server signs."""
