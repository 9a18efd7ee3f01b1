"""Inner optimizers and their learning rate."""
