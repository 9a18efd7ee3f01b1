"""Where text comes from and which of its tokens an island sees at which inner step."""
