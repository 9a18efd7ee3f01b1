"""Text: where it comes from, and which tokens an island gets at which inner step."""
