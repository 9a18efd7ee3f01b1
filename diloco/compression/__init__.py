"""Codecs: how the values of a lane become bytes, and back (`blocks`: 2, 4 and 8 bits)."""
