"""Events and metrics of a run, and the sinks they go to."""
