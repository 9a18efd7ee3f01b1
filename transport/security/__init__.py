"""Who is on the other end: certificates, TLS, tokens, strangers."""
