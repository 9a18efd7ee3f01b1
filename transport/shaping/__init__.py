"""Links as they are or should be: rates, delays, faults, turns."""
