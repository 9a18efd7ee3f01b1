"""Which collectives a rank calls, and how often."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

#: Each is called by one name in place and by another as a function of tensors.
_NAMES = {
    "allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what this rank's collectives are called, while it is entered.

    PyTorch's `CommDebugMode` also follows modules by hooks, and fails where a module is called
    without inputs that need gradients, as tensor-parallel blocks after an evaluation are.

    Attributes:
        counts: Calls by name, such as "all-gather".
    """

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective, and call whatever it is."""
        namespace, name = func.name().split("::")
        name = name.split(".")[0].strip("_")
        if "c10d" in namespace and name not in ("wait_tensor", "wrap_tensor_autograd"):
            self.counts[_NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))
