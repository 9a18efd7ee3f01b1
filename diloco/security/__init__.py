"""Certificates, tokens and access of a run, and the addresses that they protect."""
