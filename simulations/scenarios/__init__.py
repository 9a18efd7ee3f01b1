"""A method in a few figures: its utilisation, bandwidth and wall-clock time."""
