"""What a site is like, and what is wrong with it before a run."""
