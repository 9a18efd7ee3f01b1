"""Buffers that islands average: state that no optimizer owns and that must not drift apart.

A module declares them by a class attribute, `synchronised_buffers`: names of buffers of its own,
float32. They belong to the plan as parameters do, go with the fragment of their layer in float32,
and take the plain mean of the islands: outer learning rate 1, no momentum.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def synchronised_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, buffer) of all that the module and its parts declare; shared ones repeatedly.

    Raises:
        ValueError: If a declared name is no buffer.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        # Of the class: wrappers hand on the attributes of what they wrap.
        for name in getattr(type(part), "synchronised_buffers", ()):
            buffer = dict(part.named_buffers(recurse=False)).get(name)
            if buffer is None:
                raise ValueError(
                    f"{type(part).__name__} at {path!r} declares {name!r} in synchronised_buffers, "
                    f"which is no buffer of it: register it, or remove the name"
                )
            yield f"{path}.{name}".removeprefix("."), buffer
