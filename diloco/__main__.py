"""`python -m diloco`: the same as the `diloco` command."""

from diloco.cli.main import main

main()
