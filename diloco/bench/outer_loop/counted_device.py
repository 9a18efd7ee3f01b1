"""A device made of host memory that counts what lies on it: an accelerator's place, without one.

    device = CountedDevice()                  registers it with PyTorch; once a process
    parameter = device.place(values)          device "counted"; computed with on the CPU

PyTorch sees a device of its own, so whatever goes between it and the host must be copied, as with
CUDA. Counted are the bytes of storages made there, for as long as they live, and for the moment of
a copy the contiguous room that CUDA takes on the device when the tensor there is not contiguous.
Not counted: what an allocator rounds up, and rooms inside single operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_NAME = "counted"
_aten = torch.ops.aten
#: PyTorch's device of this name, registered for good.
_registered: list[torch.library.Library] = []


class CountedDevice:
    """Bytes on the device now, and at most since `reset_peak`."""

    def __init__(self) -> None:
        """Register the device, and let new tensors of it be counted here."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: set[int] = set()
        _register()
        _Counted.device_of_all = self

    def place(self, values: Tensor) -> Tensor:
        """Put a copy of a CPU tensor on the device."""
        return _on_device(values.detach().clone(memory_format=torch.contiguous_format))

    def reset_peak(self) -> None:
        """Count the peak from what is there now."""
        self.peak_bytes = self.live_bytes

    def count(self, inner: Tensor) -> None:
        """Count the storage of a tensor until it is gone; views of it share it."""
        storage = inner.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._gone, key, num_bytes)

    def count_moment(self, num_bytes: int) -> None:
        """Count what is there for one operation only."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + num_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._storages.discard(key)
        self.live_bytes -= num_bytes


class _Counted(Tensor):
    """A tensor of the device, whose values are in `on_host`."""

    device_of_all: CountedDevice
    on_host: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Counted:
        made: _Counted = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(_NAME, 0),
        )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.on_host = inner
        self.device_of_all.count(inner)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute on the CPU, and put what is new where the operation's tensors are.

        Operations take and return whatever they do, hence `Any`.
        """
        options = dict(kwargs or {})
        target = options.pop("device", None)
        if target is not None:
            options["device"] = "cpu"
        if func is _aten.copy_.default:
            _count_room(args[0], args[1])
        plain = tree_map_only(_Counted, lambda tensor: tensor.on_host, (args, options))
        made = func(*plain[0], **plain[1])
        if func._schema.is_mutable:
            return args[0]
        if target is not None and torch.device(target).type == "cpu":
            return made
        return tree_map_only(Tensor, _on_device, made)


def _on_device(inner: Tensor) -> Tensor:
    return _Counted(inner)


def _count_room(target: Tensor, source: Tensor) -> None:
    """Count the room that a copy between host and device takes there."""
    is_between = isinstance(target, _Counted) is not isinstance(source, _Counted)
    there = target if isinstance(target, _Counted) else source
    if is_between and not there.is_contiguous():
        _Counted.device_of_all.count_moment(there.numel() * there.element_size())


def _register() -> None:
    """Make the device known to PyTorch, and what makes tensors there of none."""
    if _registered:
        return
    _setup_privateuseone_for_python_backend(_NAME)
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, make in (
        ("empty_strided", _empty_strided),
        ("empty.memory_format", _empty),
        ("arange.start_step", _arange),
    ):
        library.impl(name, make, "PrivateUse1")  # type: ignore[no-untyped-call]
    _registered.append(library)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: object
) -> Tensor:
    return _on_device(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return _on_device(torch.empty(size, dtype=dtype))


def _arange(
    start: int, end: int, step: int = 1, *, dtype: torch.dtype | None = None, **_: object
) -> Tensor:
    return _on_device(torch.arange(start, end, step, dtype=dtype))
