"""Other ways to train over the same links, to be compared with: all-reduce and local SGD."""
