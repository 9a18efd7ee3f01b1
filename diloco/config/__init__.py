"""The run file: schema, loading, overrides, fingerprints."""
