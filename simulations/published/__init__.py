"""Published figures of papers, compared with our simulators."""
