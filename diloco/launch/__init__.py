"""Processes: spawning, supervising and ending them; the only readers of the environment."""
