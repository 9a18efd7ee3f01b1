"""Copies the training state of a rank to host memory while the device goes on training.

The training thread launches the copies, tensor by tensor, on a stream of their own, and goes on.
They are consistent because of two orders on the device, for which no thread waits:

    launched before     the copies begin when these steps, and merges, have been made
    next update         begins when the copies are done: the optimizer has that as a hook

Between two updates nothing writes to the state. A forward and a backward only read parameters, so
they run at the same time as the copies. A merge, an evaluation of published values and a repair of
the moments come after an update, on the stream that has waited; what comes after the last one of a
run calls `precede`. A copy on the device first would need room for 12 bytes a parameter there, and
would save only what the copies take longer than a forward and a backward.

The targets are pinned in place (`pinned_memory`): what outlives a rank (`host_memory`) could be
none of PyTorch's. They are the callers', who use them again for the next copy. Into memory that is
not pinned, which a CUDA device may refuse, the same calls copy, and the training thread waits for
them; that is said once. On a CPU it copies itself.

See CheckFreq (FAST 2021), which lets only the update wait for the copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.device_thread import SideStream
from diloco.errors import DilocoError
from diloco.pinned_memory import pin_in_place
from diloco.trainer.state import optimizer_age
from diloco.transport.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy that is on its way, or there.

    Args:
        finish: Waits until it is there.
        age: Of the optimizer, on the host, once it is.
    """

    finish: Callable[[], None]
    age: Tensor

    def wait(self, what: str) -> int:
        """Wait, in any thread, until all is there; returns how many steps the optimizer had made.

        Args:
            what: Name of the copy, for an error.

        Raises:
            DilocoError: If the device has failed.
        """
        try:
            self.finish()
        except RuntimeError as error:
            raise DilocoError(
                f"{what}: the training state did not come to host memory: {error}. Earlier ones "
                f"stay; start the island again, and if that fails too, look at the device "
                f"(nvidia-smi -q, dmesg)"
            ) from error
        return int(self.age)


class StateCopier:
    """Copies what an optimizer updates; at most one copy is under way.

    Args:
        optimizer: Of the training thread, to which all methods belong.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Assign only."""
        self._optimizer = optimizer
        self.device = next(p.device for group in optimizer.param_groups for p in group["params"])
        self._stream = SideStream(self.device)
        self._age = torch.zeros(())
        self._is_begun = False

    def pin(self, memory: Tensor, what: str) -> None:
        """Let copies into this memory run while the training thread goes on, if that can be.

        Args:
            memory: Contiguous, on the host; pinned as long as this tensor lives.
            what: It holds, for the log; a plural.
        """
        if self.device.type != "cuda":
            logger.info("training itself makes %s: it is on a CPU", what)
            return
        if code := pin_in_place(memory, self.device):
            logger.warning(
                "training waits for %s: CUDA does not pin the %s of host memory for them "
                "(error %d); give the island's cgroup more memory, or use more hosts",
                what, format_bytes(memory.nbytes), code,
            )  # fmt: skip

    @torch.no_grad()
    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> StateCopy:
        """Launch the copies of (source, target), and of the optimizer's age.

        Sources are the tensors in use, targets are on the host; all are plain tensors. Targets are
        read when the `StateCopy` has been waited for, and not written to before that. Sources live
        as long: nobody else holds the zeros of moments that the optimizer has not made yet, and
        what comes next to their memory would be copied in their place.
        """
        held = [*pairs]
        if not self._is_begun:
            self._optimizer.register_step_pre_hook(lambda *_: self.precede())
            if self.device.type == "cuda":
                self._age = self._age.pin_memory()
            self._is_begun = True

        def launch() -> None:
            for source, target in held:
                target.copy_(source, non_blocking=True)
            self._age.copy_(optimizer_age(self._optimizer), non_blocking=True)

        finish_device = self._stream.submit(launch)

        def finish() -> None:
            finish_device()
            held.clear()

        return StateCopy(finish, self._age)

    def precede(self) -> None:
        """Let what is submitted from now on begin when the copies are done; no thread waits."""
        self._stream.precede()
