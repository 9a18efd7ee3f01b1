"""A run's state in an object store: what is durable there outlives any machine."""
