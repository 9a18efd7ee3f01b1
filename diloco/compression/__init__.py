"""Codecs: what a lane of a fragment looks like on the wire."""
