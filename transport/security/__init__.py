"""Who is on the other end: certificates, TLS, tokens, limits of connections."""
