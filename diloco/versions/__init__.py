"""Versions of a fragment: computed, recorded, stored, pinned, and made again."""
