"""What papers published, held against our simulators."""
