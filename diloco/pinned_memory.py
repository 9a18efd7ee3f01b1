"""Host memory that a CUDA device copies from and to while the threads that launch it go on.

PyTorch's own pinned memory is given out in powers of two, up to twice of what is asked for. What a
rank keeps for long is pinned in place instead (`cudaHostRegister`), which takes nothing besides.
See `_create_cpu_state_dict` of PyTorch 2.13, which does so, too.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diloco.transport.units import format_bytes

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable


def pin_in_place(memory: npt.NDArray[np.generic] | Tensor, device: torch.device) -> int:
    """Pin contiguous host memory as long as it lives.

    Returns:
        CUDA's error, 0 if there is none. Without the pin the same calls copy, and wait.
    """
    if memory.nbytes == 0:
        return 0
    address = memory.data_ptr() if isinstance(memory, Tensor) else memory.ctypes.data
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if code == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return 0
    with contextlib.suppress(RuntimeError):  # CUDA tells the next launch of it: this one
        torch.zeros((), device=device)
    return code


class PinnedRooms:
    """Float32 vectors in memory that is taken once and used again; any thread may ask for some.

    For other devices than CUDA nothing is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        """Assign only; `device` is the one that copies."""
        self._device = device
        self._free: defaultdict[int, list[npt.NDArray[np.float32]]] = defaultdict(list)

    def take(self, numel: int) -> Tensor:
        """Return a vector, whose memory is the next one's when nobody holds a view of it any more.

        Code that copies from it without waiting holds it until the device has done that.
        """
        free = self._free[numel]
        try:
            room = free.pop()
        except IndexError:
            room = self._new(numel)
        view = room.view()  # the tensor holds it, and all that share the tensor's storage
        weakref.finalize(view, free.append, room).atexit = False
        return torch.from_numpy(view)

    def release(self) -> None:
        """Give back the memory that nobody holds; any thread may call it."""
        for free in [*self._free.values()]:
            free.clear()

    def _new(self, numel: int) -> npt.NDArray[np.float32]:
        pages = mmap.mmap(-1, 4 * max(1, numel), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room = np.frombuffer(pages, np.float32, numel)
        if self._device.type == "cuda" and (code := pin_in_place(room, self._device)):
            logger.warning(
                "copies of lanes wait for each other: CUDA does not pin %s of host memory for them "
                "(error %d); give the island's cgroup more memory, or use more hosts",
                format_bytes(room.nbytes), code,
            )  # fmt: skip
        return room
