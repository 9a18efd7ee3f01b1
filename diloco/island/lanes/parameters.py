"""The parameters that an island trains, as its owner gave them: the same ones for a whole run.

Modules are looked at again when it matters: what replaces, adds or freezes a parameter meanwhile
would leave the outer loop reading and writing tensors that nobody trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from diloco.island.lanes.shards import canonical_parameters, frozen_names, reshard_

#: A module, its parts, or parameters by name.
Trained: TypeAlias = nn.Module | Iterable[nn.Module] | Mapping[str, Tensor]


class TrainedParameters:
    """Canonical parameters of what is trained, and whether they still are.

    Attributes:
        named: Canonical name -> parameter.
        frozen: Names of those that are not trained.
    """

    def __init__(self, trained: Trained) -> None:
        """Find the parameters.

        Raises:
            ValueError: If it is none of these, and as `canonical_parameters` does.
        """
        self._named = trained if isinstance(trained, Mapping) else None
        modules: Iterable[nn.Module] = ()
        if isinstance(trained, nn.Module):
            modules = (trained,)
        elif not isinstance(trained, Mapping):
            # A generator would be empty at the second look.
            modules = tuple(trained) if isinstance(trained, Iterable) else (trained,)
            for odd in (part for part in modules if not isinstance(part, nn.Module)):
                raise ValueError(
                    f"diloco.DiLoCo was given a {type(odd).__name__}: give a module, a list of "
                    f"modules, or parameters by name, such as dict(model.named_parameters())"
                )
        self._modules = tuple(modules)
        self.named = self._found()
        self.frozen = frozen_names(self._modules if self._named is None else self._named)

    def settle(self, inner_step: int) -> None:
        """Check that they are the same, and let FSDP2 show their shards.

        Raises:
            ValueError: Naming what was added, removed or replaced by `inner_step`.
        """
        was, now = self.named, self._found()
        if {n: id(p) for n, p in now.items()} == {n: id(p) for n, p in was.items()}:
            return
        changes = {
            "added": sorted(now.keys() - was.keys()),
            "removed or frozen": sorted(was.keys() - now.keys()),
            "replaced": [name for name in was if name in now and now[name] is not was[name]],
        }
        told = "; ".join(f"{what}: {names}" for what, names in changes.items() if names)
        raise ValueError(
            f"the trained parameters changed after DiLoCo was made, by inner step {inner_step}: "
            f"{told}. Fragments are fixed for a run: wrap, shard, tie, freeze and replace "
            f"parameters before diloco.DiLoCo(...), and change values in place"
        )

    def reshard(self) -> None:
        """Let FSDP2 show the shards, so that they may be read and written."""
        reshard_(self._sharded)

    def _found(self) -> dict[str, Tensor]:
        every = (module for part in self._modules for module in part.modules())
        self._sharded = [module for module in every if isinstance(module, FSDPModule)]
        return canonical_parameters(self._modules if self._named is None else self._named)
