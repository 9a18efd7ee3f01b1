"""Put the repository root on the path, so that tests (and the ranks they spawn) find each other.

Spawned processes inherit ``sys.path``; with it ``from tests.distributed import run_ranks`` works
from every test file, whichever way pytest was started.
"""

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

# Started by nohup, or in the background of a script, tests would pass on that these are ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run beside each other: more threads would wait for each other in turns, spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example takes the time that a loaded machine gives it.
settings.register_profile("diloco", deadline=None)
settings.load_profile("diloco")
