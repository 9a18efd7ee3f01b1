"""The command line: commands by group, and what they share on a terminal."""
