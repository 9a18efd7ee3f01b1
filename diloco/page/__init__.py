"""The page of a run: what operators see in a browser, of a live run and of recorded ones."""
