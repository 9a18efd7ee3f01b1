"""The native trainer: one inner step of an island."""
