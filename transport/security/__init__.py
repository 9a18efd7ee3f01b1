"""Certificates, TLS, tokens, and limits on unknown connections."""
