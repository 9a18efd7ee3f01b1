"""`python -m diloco`: the same as the `diloco` command."""

from diloco.cli.main import main

if __name__ == "__main__":  # a spawned process imports its parent's main module
    main()
