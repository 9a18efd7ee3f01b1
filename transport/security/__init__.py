"""What certificates say, TLS, tokens, limits on strangers; `diloco.security.run_ca` issues them."""
