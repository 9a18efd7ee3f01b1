"""Parameters that an island trains: their names, shapes and types, the same for a whole run.

Besides parameters, islands average buffers: state that no optimizer owns and that must not drift
apart. A module declares them by a class attribute, `synchronised_buffers`: names of buffers of its
own, float32. They belong to the plan as parameters do, go with the fragment of their layer in
float32, and take the plain mean of the islands: outer learning rate 1, no momentum.

Modules are looked at again when it matters: what replaces, adds or freezes a parameter meanwhile
would leave the outer loop reading and writing tensors that are not trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import PlanMismatch
from diloco.island.lanes.boxes import whole_shape
from diloco.outer.fragments import TensorSpec

_WRAPPER_ATTRIBUTES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

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

    @property
    def device(self) -> torch.device:
        """Where the parameters of this rank are: that of the first."""
        return next(iter(self.named.values())).device

    def reshard(self) -> None:
        """Let FSDP2 show the shards, so that they may be read and written."""
        reshard_(self._sharded)

    def _found(self) -> dict[str, Tensor]:
        every = (module for part in self._modules for module in part.modules())
        self._sharded = [module for module in every if isinstance(module, FSDPModule)]
        return canonical_parameters(self._modules if self._named is None else self._named)


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


def dtype_problems(parameters: Mapping[str, Tensor]) -> list[str]:
    """Say which parameters are not float32."""
    return [
        f"parameter {name!r} is {parameter.dtype}; islands need float32 masters: keep the model in "
        "float32 and compute in 16 bits by autocast or FSDP's MixedPrecisionPolicy"
        for name, parameter in parameters.items()
        if parameter.dtype != torch.float32
    ]


def tensor_specs(
    parameters: Mapping[str, Tensor],
    *,
    frozen: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
) -> list[TensorSpec]:
    """Return name and whole shape of every tensor, by sorted name: the plan's input.

    What is not trained (`requires_grad`) is a buffer. Ranks may know different parameters, the
    stages of a pipeline say; together they know all.

    Args:
        parameters: Canonical name -> parameter or buffer, on this rank.
        frozen: Names of parameters that this rank has and does not train.
        group: Of all ranks of the island, over which this is collective; None for one rank.

    Raises:
        PlanMismatch: On all ranks, if two of them know a parameter by different shapes or types,
            or one trains what another has frozen.
    """
    facts = {
        name: (whole_shape(p), str(p.dtype), not p.requires_grad) for name, p in parameters.items()
    }
    known: dict[str, tuple[int, tuple[tuple[int, ...], str, bool]]] = {}
    ranks = gathered((facts, set(frozen)), group)
    for rank, (theirs, _) in enumerate(ranks):
        for name, fact in theirs.items():
            first, known_fact = known.setdefault(name, (rank, fact))
            if fact != known_fact:
                raise PlanMismatch(
                    f"{name!r} is {_told(*known_fact)} on island rank {first} and {_told(*fact)} "
                    f"on rank {rank}: what is one parameter must have one shape and type on all "
                    "ranks that store it, and other parameters other names"
                )
    for rank, (_, theirs) in enumerate(ranks):
        if names := sorted(theirs & known.keys()):
            raise PlanMismatch(
                f"parameter {names[0]!r} is trained on island rank {known[names[0]][0]} and frozen "
                f"on rank {rank}: give it the same requires_grad on all ranks that have it"
            )
    return [
        TensorSpec(name, shape, is_buffer)
        for name, (_, (shape, _, is_buffer)) in sorted(known.items())
    ]


def _told(shape: tuple[int, ...], dtype: str, is_buffer: bool) -> str:
    return f"a {'buffer' if is_buffer else 'parameter'} {list(shape)} of {dtype}"


def gathered(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return what every rank brings, of whatever type (hence Any), by island rank."""
    if group is None:
        return [mine]
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    return ranks


def canonical_parameters(
    modules: nn.Module | Iterable[nn.Module] | Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return what islands synchronise under the names that every island uses for it.

    These are the trained parameters, and the buffers that modules declare for it
    (`synchronised_buffers`), which are those without ``requires_grad``.

    Names lose what wrappers add: ``_orig_mod.`` (compile), ``_checkpoint_wrapped_module.``
    (activation checkpointing), the ``module.`` of DataParallel classes, and the last part of what a
    module lists as its ``unnamed_modules`` (the stages of a pipeline). A parameter reachable
    under several names (tied) comes once, under the first in sorted order. Where another name is to
    count, or a rank has only one of two tied parameters (the head of the last pipeline stage), an
    attribute of the module says so: ``tied_parameters = {"head.weight": "embed.weight"}``, names
    from that module on, each with the one that counts.

    Args:
        modules: The model; or its parts (pipeline stages, say) with disjoint names; or the
            parameters themselves by name, which stays as it is.

    Returns:
        Canonical name -> parameter or buffer, sorted by name; nothing that is frozen.

    Raises:
        ValueError: If a parameter is not float32, two different ones share a name, or there are
            none.
    """
    parameters: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(modules):
        if parameters.setdefault(name, parameter) is not parameter:
            raise ValueError(
                f"two different parameters are called {name!r}: give the modules distinct "
                "names, by passing their common parent or a mapping from name to parameter"
            )
    first_names: dict[int, str] = {}
    for name in sorted(parameters):
        first_names.setdefault(id(parameters[name]), name)
    canonical = {name: parameters[name] for name in first_names.values()}
    if not any(tensor.requires_grad for tensor in canonical.values()):
        raise ValueError(
            "there is no parameter with requires_grad: nothing to train; freeze fewer parameters, "
            "or pass the model's modules themselves"
        )
    if problems := dtype_problems(canonical):
        raise ValueError("; ".join(problems))
    return canonical


def reshard_(modules: Iterable[nn.Module | FSDPModule]) -> None:
    """Let FSDP2 modules show their sharded parameters, so that they may be read and written.

    After a forward without a backward (an evaluation) the root keeps its gathered copies, and the
    next forward would compute with them whatever was written to the shards meanwhile.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def frozen_names(
    modules: nn.Module | Iterable[nn.Module] | Mapping[str, Tensor],
) -> list[str]:
    """Return the names of the parameters that `canonical_parameters` leaves out as not trained."""
    return sorted({name for name, _ in _named_parameters(modules, is_frozen=True)})


def _named_parameters(
    modules: nn.Module | Iterable[nn.Module] | Mapping[str, Tensor],
    *,
    is_frozen: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(modules, Mapping):
        yield from ((name, p) for name, p in modules.items() if p.requires_grad != is_frozen)
        return
    for module in [modules] if isinstance(modules, nn.Module) else modules:
        yield from _stripped_parameters(module, is_frozen=is_frozen)


def _stripped_parameters(module: nn.Module, *, is_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield what is synchronised, or frozen; tied ones repeatedly, by name without wrappers'."""
    reshard_(module.modules())
    children = dict(module.named_modules(remove_duplicate=False))
    wrapped = {
        f"{path}.{unnamed}".removeprefix(".")
        for path, child in children.items()
        for unnamed in (
            ("module",)
            if isinstance(child, DistributedDataParallel | nn.DataParallel)
            else getattr(child, "unnamed_modules", ())
        )
    }

    def stripped(path: str) -> str:
        parts = path.split(".")
        return ".".join(
            part
            for i, part in enumerate(parts)
            if part not in _WRAPPER_ATTRIBUTES and ".".join(parts[: i + 1]) not in wrapped
        )

    tied: dict[str, str] = {}
    for path, child in children.items():
        for names in getattr(child, "tied_parameters", {}).items():
            other, first = (f"{stripped(path)}.{name}".removeprefix(".") for name in names)
            tied[other] = first
    every = module.named_parameters(remove_duplicate=False)
    chosen = ((path, p) for path, p in every if p.requires_grad != is_frozen)
    for path, tensor in itertools.chain(chosen, () if is_frozen else synchronised_buffers(module)):
        yield tied.get(stripped(path), stripped(path)), tensor
