"""The files of a new run: run file, certificates, launch files, and a page of next steps."""
