"""Whether diloco does on this machine what it does everywhere: the same numbers, the same bytes."""
