"""The built-in trainer: one inner step of an island; models, parallelism, optimizers."""
