"""Train one language model across datacenters that are far apart."""
