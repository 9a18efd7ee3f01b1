"""A codec, a merge rule and a transport that run files may name."""
