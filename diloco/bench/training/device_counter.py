"""Counts what a training thread would make an accelerator and its host wait for, without one.

    counter = DeviceCounter()
    counter.place(model.parameters())         these lie on the device from now on
    with counter.counting() as counts:        on this thread
        ...

All tensors are CPU's, so that everything really runs; each storage is labelled as the device's or
the host's. What an operation makes from the device's tensors is the device's. A factory that is
given a `torch.device`, as a mesh has it, makes the device's; one without a device, or with a device
by name ("cpu"), the host's; so do `.to` and `.cpu()`. What has no label is the host's. Counted is
what waits on CUDA:

    synchronisation    the host asks for a value of the device: `item`, `tolist`, `bool`, `numpy`,
                       operations whose result's size depends on values, or a copy that did not
                       block is read in the section that made it
    synchronous copy   between host and device without `non_blocking`; tensors of both in one
                       operation; `torch.tensor` on the device
    late wait          a copy that did not block is read in a later section: when more was launched

It cannot see: whether host memory is pinned (else CUDA blocks in copies that should not); streams
and events, of which a CPU has none; what libraries do inside an operation beyond `_WAITING`; what
threads do that do not `watch`; branches that the product takes on CUDA alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_aten = torch.ops.aten
#: Of these the host must know a value of the device before it goes on.
_WAITING = {
    _aten._local_scalar_dense,
    _aten.bincount,
    _aten.equal,
    _aten.histc,
    _aten.masked_select,
    _aten.nonzero,
    _aten.repeat_interleave,
    _aten._unique,
    _aten._unique2,
    _aten.unique_consecutive,
    _aten.unique_dim,
}
#: Of these a mask among the indices is made a list of positions, whose length the host must know.
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
#: Of these a scalar of the host is copied first; others are given its value.
_COPYING_SCALARS = {_aten.where}
#: Labels: whether a storage is the device's, and the section that copied to it without blocking.
_IS_THERE, _COPIED_IN = "counted_is_there", "counted_copied_in"
#: Frames between an operation and the wait for a collective that makes it.
_GLOO_DEPTH = 6
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_MAKING = {torch.tensor, torch.as_tensor, torch.asarray}


@dataclass(slots=True)
class DeviceCounts:
    """What a section of a training thread did.

    Attributes:
        syncs: Synchronisations.
        sync_copies: Synchronous copies.
        late_waits: Waits for what an earlier section launched.
        bytes_down: Copied from the device to the host.
        values_down: Of these, bytes of float32 values.
        bytes_up: From the host to the device.
        values_up: Of these, bytes of float32 values.
        launches: Operations on the device, views not counted.
        largest_bytes: Of a storage that was made, on either side.
    """

    syncs: int = 0
    sync_copies: int = 0
    late_waits: int = 0
    bytes_down: int = 0
    values_down: int = 0
    bytes_up: int = 0
    values_up: int = 0
    launches: int = 0
    largest_bytes: int = 0


class DeviceCounter:
    """Knows which storages are the device's; see the module's docstring."""

    def __init__(self) -> None:
        """Know of none."""
        self.counts = DeviceCounts()
        self._section = 0
        self._is_watching = False
        self._made_on_device = True  # by a factory that no Python code calls

    def place(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors be the device's, of DTensors this rank's part."""
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            self._label(local, True)

    @contextmanager
    def counting(self) -> Iterator[DeviceCounts]:
        """Count what this thread does inside."""
        self._section += 1
        counts = self.counts = DeviceCounts()
        with _Calls(self), _Operations(self):
            yield counts

    def watch(self) -> Callable[[], None]:
        """Count what this thread does from now on, in one section; returns what ends that, there.

        What such a thread copies it waits for itself, before it shows it to others.
        """
        self._is_watching = True
        modes = ExitStack()
        modes.enter_context(_Calls(self))
        modes.enter_context(_Operations(self))
        return modes.close

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether a plain tensor is the device's."""
        return bool(_labels(tensor).get(_IS_THERE))

    # -- what is called ----------------------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call of Python code; `Any`, because calls take and return whatever they do."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in (Tensor.to, Tensor.cpu) and type(args[0]) in (Tensor, torch.nn.Parameter):
            return self._move(func, args, kwargs)
        if func in _READING and type(args[0]) is Tensor:
            self._read(args[0])
        before = self._made_on_device
        if not tensors:
            self._made_on_device = isinstance(kwargs.get("device"), torch.device)
        try:
            made = func(*args, **kwargs)
        finally:
            is_there = self._made_on_device
            self._made_on_device = before
        if func in _MAKING and is_there and not tensors:
            self._copied(made, is_up=True, is_blocking=True)
            self._label(made, True)
        return made

    def _move(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target = "cpu" if func is Tensor.cpu else kwargs.get("device")
        for leaf in args[1:]:
            if isinstance(leaf, (str, torch.device)):
                target = leaf
            elif isinstance(leaf, Tensor):
                target = torch.device("cpu") if self.is_on_device(leaf) else "cpu"
        source, is_there = args[0], self.is_on_device(args[0])
        is_wanted_there = is_there if target is None else isinstance(target, torch.device)
        made = func(*args, **kwargs)
        if is_wanted_there == is_there:
            return made
        if not is_there:
            self._read_pending(source)
        if made.untyped_storage()._cdata == source.untyped_storage()._cdata:
            made = made.clone()
        self._copied(source, is_wanted_there, not kwargs.get("non_blocking", False), made)
        self._label(made, is_wanted_there)
        return made

    def _read(self, tensor: Tensor) -> None:
        """Count that the host reads values."""
        if self.is_on_device(tensor):
            self.counts.syncs += 1
            self.counts.bytes_down += tensor.numel() * tensor.element_size()
        else:
            self._read_pending(tensor)

    def _read_pending(self, tensor: Tensor) -> None:
        section = _labels(tensor).pop(_COPIED_IN, None)
        if section == self._section:
            self.counts.syncs += 1
        elif section is not None:
            self.counts.late_waits += 1

    def _copied(
        self, source: Tensor, is_up: bool, is_blocking: bool, target: Tensor | None = None
    ) -> None:
        """Count a copy between host and device."""
        num_bytes = source.numel() * source.element_size()
        value_bytes = num_bytes * (source.dtype == torch.float32)
        if is_up:
            self.counts.bytes_up += num_bytes
            self.counts.values_up += value_bytes
        else:
            self.counts.bytes_down += num_bytes
            self.counts.values_down += value_bytes
        if is_blocking:
            self.counts.sync_copies += 1
        elif not (is_up or target is None or self._is_watching):
            _labels(target)[_COPIED_IN] = self._section

    # -- what is computed --------------------------------------------------------------------------

    def operate(
        self, func: torch._ops.OpOverload[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Make an operation on plain tensors."""
        packet = func.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [self.is_on_device(tensor) for tensor in tensors]
        made = func(*args, **kwargs)
        if packet is _aten.copy_ and there[0] != there[1]:
            if _is_gloo(args[1]):
                return made
            is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            self._copied(args[1], there[0], is_blocking, args[0])
            self.counts.launches += 1
            return made
        if any(there):
            self._count_operation(func, tensors, there)
        else:
            for tensor in tensors if packet is _aten._local_scalar_dense else ():
                self._read_pending(tensor)
        is_there = any(there) if tensors else self._made_on_device
        known = [tensor.untyped_storage() for tensor in tensors]
        for leaf in tree_leaves(made):
            if not isinstance(leaf, Tensor) or _IS_THERE in _labels(leaf):
                continue
            if all(leaf.untyped_storage() is not storage for storage in known):
                self._label(leaf, is_there)
        return made

    def _count_operation(
        self, func: torch._ops.OpOverload[..., Any], tensors: Sequence[Tensor], there: list[bool]
    ) -> None:
        packet = func.overloadpacket
        for tensor, is_there in zip(tensors, there, strict=True):
            if not is_there and (tensor.ndim or packet in _COPYING_SCALARS):
                self._copied(tensor, is_up=True, is_blocking=True)
        # A scalar of the host goes where a mask says without a list of positions: `masked_fill`.
        is_filled = packet is not _aten.index and not there[-1] and not tensors[-1].ndim
        masks = tensors[1:] if packet in _INDEXING and not is_filled else ()
        if packet in _WAITING or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in masks):
            self.counts.syncs += 1
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.counts.launches += not is_view

    def _label(self, tensor: Tensor, is_on_device: bool) -> None:
        labels = _labels(tensor)
        if _IS_THERE not in labels:
            num_bytes = tensor.untyped_storage().nbytes()
            self.counts.largest_bytes = max(self.counts.largest_bytes, num_bytes)
        labels[_IS_THERE] = is_on_device


def _labels(tensor: Tensor) -> dict[str, Any]:
    """Give what a storage is labelled with, for as long as it lives; views share it."""
    return vars(tensor.untyped_storage())


def _is_gloo(source: Tensor) -> bool:
    """Whether what is copied is a buffer of gloo, which NCCL has not."""
    frame, calls = sys._getframe(), set()
    for _ in range(_GLOO_DEPTH):
        if (caller := frame.f_back) is None:
            break
        frame = caller
        calls.add(frame.f_globals["__name__"])
    return _IS_THERE not in _labels(source) and "torch.distributed.distributed_c10d" in calls


class _Calls(TorchFunctionMode):
    """Shows a counter what Python code calls."""

    def __init__(self, counter: DeviceCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._counter.call(func, args, kwargs or {})


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a counter what reaches a kernel; tensors made of others are taken apart first."""

    def __init__(self, counter: DeviceCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types or torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **(kwargs or {}))  # shapes only: nothing is computed
        if any(each not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) for each in types):
            return NotImplemented
        return self._counter.operate(func, args, kwargs or {})
