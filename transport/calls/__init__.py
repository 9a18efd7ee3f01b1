"""What clients and servers of every kind do alike with a call."""
