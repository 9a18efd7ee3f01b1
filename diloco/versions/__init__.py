"""Versions of a fragment: made, recorded, kept, pinned, made again."""
