"""Codecs: how the values of a lane become bytes, and back."""
