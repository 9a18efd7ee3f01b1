"""One rank of an island: everything built once, trained, ended with an exit code."""
