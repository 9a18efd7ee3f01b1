"""Checks a site before a run: facts of the machine, findings, and the command that fixes each."""
