"""What a run will take of memory, disk and links, from its configuration alone."""
