"""`diloco`, and `python -m diloco`: the command line, whose modules take a second to load."""

from __future__ import annotations

import signal


def main() -> None:
    """Load the command line and run it; Ctrl-C meanwhile ends it as it ends other programs."""
    handler = signal.getsignal(signal.SIGINT)
    if handler == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from diloco.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":  # a spawned process imports its parent's main module
    main()
