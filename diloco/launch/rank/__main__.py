"""`python -m diloco.launch.rank`: see `diloco.launch.rank.main`."""

from diloco.launch.process.ending import exit_at_once
from diloco.launch.process.imports import import_for_good

if __name__ == "__main__":
    exit_at_once(import_for_good("diloco.launch.rank.main").main())
