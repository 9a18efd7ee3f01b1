"""A command inside an emulated network: started, its links changed when the file says, waited for.

Ctrl-C in a terminal reaches the command by itself and is handled by it; SIGTERM and SIGHUP are
passed on to it, and a second one of them ends everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from diloco.errors import ConfigError
from diloco.launch.process.emulated import VARIABLE
from diloco.simulations.emulate.emulation import WAYS, Emulation, Message
from diloco.simulations.emulate.network import change_times, link_state

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.1
_libc = ctypes.CDLL(None)


def run_command(
    emulation: Emulation, node: str, words: Sequence[str], environment: Mapping[str, str]
) -> tuple[int, list[Message]]:
    """Run a command in a node until it ends; call it from the main thread.

    Args:
        emulation: In use.
        node: Where.
        words: The command and its arguments.
        environment: Its variables; the emulation's description is added.

    Returns:
        Its exit code, 128 + N when signal N ended it; and every change of a link, with its time.

    Raises:
        ConfigError: If it cannot be started.
    """
    variables = {**environment, VARIABLE: str(emulation.description_path)}
    signals: list[int] = []
    with _noting(signals):
        try:
            process = emulation.popen(node, words, env=variables, preexec_fn=_die_with_parent)
        except OSError as error:
            raise ConfigError(f"cannot run {words[0]}: {error.strerror}") from error
        changes = _watch(emulation, process, signals)
    code = process.returncode
    return (128 + signals[0] if code is None else code if code >= 0 else 128 - code), changes


def _watch(
    emulation: Emulation, process: subprocess.Popen[bytes], signals: list[int]
) -> list[Message]:
    """Wait for the end of the command, or for a second signal."""
    began, passed_on = time.monotonic(), 0
    changed: list[Message] = []
    times = change_times(emulation.wan.config.changes.values())
    while process.poll() is None:
        if len(signals) > passed_on:
            if len(signals) > 1:
                break  # whatever is left inside is ended with the network
            process.send_signal(signals[0])
            passed_on = 1
        now_s = time.monotonic() - began
        while times and times[0] <= now_s:
            changed += _change(emulation, times.pop(0))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK_S, max(0.0, times[0] - now_s)) if times else _LOOK_S)
    return changed


def _change(emulation: Emulation, at_s: float) -> Iterator[Message]:
    """Bring every direction to what it is to be from `at_s` on."""
    changes = emulation.wan.config.changes.values()
    for wire in emulation.network.wires:
        for way in WAYS:
            state = link_state(wire, way, changes, at_s)
            if state != emulation.states[wire.name, way]:
                emulation.change(wire, way, state)
                yield {"at_s": at_s, "link": wire.name, "way": way, **state.as_dict()}


@contextlib.contextmanager
def _noting(signals: list[int]) -> Iterator[None]:
    """Note SIGTERM and SIGHUP; let SIGINT be.

    A handler that does nothing, unlike one that ignores, is not inherited by the command.
    """

    def note(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:
            signals.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> None:
    """Ask the kernel to end this process when its parent is killed: its links are gone then."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
