"""The peer of an island under the all-reduce exchange."""
