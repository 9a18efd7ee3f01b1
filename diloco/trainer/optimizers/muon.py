"""Owns Muon: the momentum of a matrix, made orthogonal, is its update; the rest is left to AdamW.

    exp_avg <- mu exp_avg + (1 - mu) grad
    u = mu exp_avg + (1 - mu) grad        with Nesterov's momentum; without it u = exp_avg
    p <- (1 - lr decay) p - lr scale(M, N) orthogonalise(u)

    scale        factor                 what an update has then
    rms          0.2 sqrt(max(M, N))    the root mean square of AdamW's, about 0.2, so that rates
                                        and decays made for AdamW serve both
    spectral     sqrt(M / N)            fan-out over fan-in: outputs that change by lr, whatever the
                                        width, so that one rate serves many widths

The same update of a square matrix of width d takes 5 lr / sqrt(d) in units of rms for lr in
spectral ones: 0.0625 is 0.039 at d = 64, and 0.0069 at 2,048. Stacked matrices [E, M, N] are E
matrices.

Ranks that share matrices make each orthogonal once: the parts of u go to the one rank that owns the
matrix, the result comes back by the same way, in two all-to-alls a bucket of matrices; the parts of
the next bucket travel meanwhile. Owners are dealt by cost among the ranks that hold most of the
matrix, so what lies whole on a rank does not travel. Copies of a matrix (HSDP) share the work, too,
and get the same bits.

Knows DTensors, neither model nor names.

Source: https://kellerjordan.github.io/posts/muon; rms and decay: Moonlight (arXiv 2502.16982);
spectral: arXiv 2310.17813; under DiLoCo: MuLoCo (arXiv 2505.23725), spectral and without Nesterov.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from diloco.island.lanes.boxes import Box, stored, stored_box, whole_shape

#: The one moment of a parameter that Muon takes.
MOMENT = "exp_avg"
#: Most elements of a bucket that a rank owns, and most that it holds: 128 MiB in float32; or one
#: matrix, if that is larger.
BUCKET_NUMEL = 1 << 25
_RMS = 0.2
#: Of an element of `orthogonalise`, whose singular values are at most about 1.2.
_LARGEST = 1.25
_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7

MuonScale = Literal["rms", "spectral"]
#: (number of the parameter, index of dim 0 or None) of a matrix.
_Key = tuple[int, int | None]
#: (parameter, which part of what this rank stores) -> that part of what is to be made orthogonal.
_Update = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
#: Parameter -> learning rate and weight decay.
_Settings = Callable[[Tensor], tuple[float, float]]


def orthogonalise(matrix_MN: Tensor) -> Tensor:
    """Bring all singular values of a matrix to about 1: U S V^T -> U S' V^T, S' in 0.7 to 1.2.

    Five steps x <- a x + b (x x^T) x + c (x x^T)^2 x from x = matrix / |matrix|_F, on the shorter
    side. Singular values far below 1 / 1000 of the norm stay smaller.

    Args:
        matrix_MN: Shape [M, N], of the type that is computed in; all zeros stay zeros.

    Returns:
        Shape [M, N].

    See https://kellerjordan.github.io/posts/muon, with its coefficients.
    """
    is_tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x = matrix_MN.T if is_tall else matrix_MN
    x = x / x.norm().clamp(min=_EPS)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def update_scale(scale: MuonScale, shape: Sequence[int]) -> float:
    """Return what the orthogonalised update of a matrix [M, N] is multiplied with, and with lr."""
    rows, columns = shape
    return _RMS * math.sqrt(max(shape)) if scale == "rms" else math.sqrt(rows / columns)


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for everything else, under one list of groups and one state.

    As PyTorch's fused optimizers do with `GradScaler`, a step looks at `found_inf` on the device:
    where it is 1, no bit of parameters and state changes, and the host does not wait to know.

    Computed in bfloat16 on an accelerator, as published, and in float32 on a CPU, where that is
    faster. Making one and `step` are collective over the ranks that share a matrix.

    Args:
        groups: Of matrices, [M, N] or [E, M, N], with their own ``weight_decay``; may be empty.
        adamw: Over all other parameters; it is stepped here.
        lr: Of groups without one of their own.
        momentum: mu, in [0, 1).
        nesterov: Whether the gradient counts once more.
        scale: Of updates.

    Attributes:
        found_inf: float32, without dimensions: 1 where the next steps are to change nothing, else
            0; on the device of the parameters.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        adamw: torch.optim.AdamW,
        *,
        lr: float,
        momentum: float,
        nesterov: bool = True,
        scale: MuonScale = "rms",
    ) -> None:
        """Exchange with the other ranks who holds what, and deal the matrices.

        Raises:
            ValueError: If parts of a matrix lie on ranks that share no mesh.
        """
        self._momentum = momentum
        self._nesterov = nesterov
        self._adamw = adamw
        mine = [{**group, "moments": (MOMENT,)} for group in groups]
        super().__init__([*mine, *adamw.param_groups], {"lr": lr})
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
        for group in self._groups():
            for parameter in group["params"]:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                by_mesh.setdefault(mesh, []).append(parameter)
        self._scale: MuonScale = scale
        self.found_inf = torch.zeros((), device=self.param_groups[0]["params"][0].device)
        self._shared = [_Shared(mesh, parameters, scale) for mesh, parameters in by_mesh.items()]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups of matrices."""
        return [group for group in self.param_groups if "moments" in group]

    @property
    def largest_update(self) -> float:
        """Most that a step of lr 1 changes an element of any matrix by."""
        shapes = [whole_shape(p)[-2:] for group in self._groups() for p in group["params"]]
        return _LARGEST * max((update_scale(self._scale, shape) for shape in shapes), default=0.0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters by their gradients; a matrix without one counts as one of zeros.

        Args:
            closure: None; there is nothing that would call it again.
        """
        assert closure is None, "the loss is not computed again"
        self._adamw.state = self.state
        self._adamw.param_groups = [g for g in self.param_groups if "moments" not in g]
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        is_made = self.found_inf == 0
        settings = {p: (g["lr"], g["weight_decay"]) for g in self._groups() for p in g["params"]}
        for parameter in settings:
            self._advance_(parameter, is_made)
        for shared in self._shared:
            shared.step_(self._update, settings.__getitem__, is_made)

    def _advance_(self, parameter: Tensor, is_made: Tensor) -> None:
        """Let the moment take in the gradient, element by element."""
        state = self.state[parameter]
        if not state:
            age = torch.zeros((), device=parameter.device)
            state |= {"step": age, MOMENT: torch.zeros_like(parameter)}
        state["step"] += is_made
        moment, grad = stored(state[MOMENT]), parameter.grad
        if grad is None:
            advanced = moment * self._momentum
        else:
            advanced = moment.lerp(stored(grad), 1 - self._momentum)
        torch.where(is_made, advanced, moment, out=moment)

    def _update(self, parameter: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a part of what is to be made orthogonal, `part` of what this rank stores."""
        moment, grad = part(stored(self.state[parameter][MOMENT])), parameter.grad
        if not self._nesterov:
            return moment
        if grad is None:
            return moment * self._momentum
        return torch.lerp(part(stored(grad)), moment, self._momentum)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix, and which rank of its mesh stores which box of it."""

    key: _Key
    shape: tuple[int, int]
    boxes: dict[int, Box]

    @property
    def cost(self) -> int:
        """Multiplications of a step of `orthogonalise`, about."""
        short, long = sorted(self.shape)
        return short * short * (short + 2 * long)

    @property
    def is_whole(self) -> bool:
        """Whether the ranks have all of it."""
        return sum(box.numel for box in set(self.boxes.values())) == math.prod(self.shape)

    def owner(self, loads: Sequence[int]) -> int:
        """Choose the least loaded of the ranks that hold most of it."""
        most = max(box.numel for box in self.boxes.values())
        candidates = (rank for rank, box in self.boxes.items() if box.numel == most)
        return min(candidates, key=lambda rank: (loads[rank], rank))

    def senders(self, owner: int) -> list[int]:
        """Choose who sends each box to the owner: of copies, that of the owner's replica."""
        copies: dict[Box, list[int]] = {}
        for rank, box in self.boxes.items():
            copies.setdefault(box, []).append(rank)
        replica = copies[self.boxes[owner]].index(owner)
        return [ranks[replica % len(ranks)] for ranks in copies.values()]


def deal(matrices: Sequence[_Matrix], num_ranks: int) -> list[list[tuple[_Matrix, int]]]:
    """Give every matrix an owner, the costly ones first, and cut them into buckets.

    Of a bucket no rank owns more values, and none holds more, than `BUCKET_NUMEL` or the largest
    matrix has: large matrices, too, are many ranks' work at once.
    """
    loads, owned, held = ([0] * num_ranks for _ in range(3))
    dealt: list[list[tuple[_Matrix, int]]] = [[]]
    most = max([BUCKET_NUMEL, *(math.prod(matrix.shape) for matrix in matrices)])
    for matrix in sorted(matrices, key=lambda m: -m.cost):  # stable: alike everywhere
        owner = matrix.owner(loads)
        loads[owner] += matrix.cost
        numel = {rank: box.numel for rank, box in matrix.boxes.items()}
        is_full = owned[owner] + math.prod(matrix.shape) > most
        if dealt[-1] and (is_full or any(held[rank] + n > most for rank, n in numel.items())):
            dealt.append([])
            owned, held = [0] * num_ranks, [0] * num_ranks
        owned[owner] += math.prod(matrix.shape)
        for rank, n in numel.items():
            held[rank] += n
        dealt[-1].append((matrix, owner))
    return dealt


class _ParameterBucket:
    """Some matrices as one rank exchanges them, with each peer and in the same order as the peer.

    Attributes:
        given: By owner, the matrices whose part this rank sends.
        gathered: By sender, this rank's own matrices of which it sends a part.
        scattered: By holder, this rank's own matrices of which it stores a part.
        taken: By owner, the matrices of which this rank stores a part.
    """

    def __init__(self, matrices: Sequence[tuple[_Matrix, int]], me: int, num_ranks: int) -> None:
        ends: list[list[list[_Matrix]]] = [[[] for _ in range(num_ranks)] for _ in range(4)]
        self.given, self.gathered, self.scattered, self.taken = ends
        for matrix, owner in matrices:
            senders = matrix.senders(owner)
            if me in senders:
                self.given[owner].append(matrix)
            if me in matrix.boxes:
                self.taken[owner].append(matrix)
            if me == owner:
                for rank in senders:
                    self.gathered[rank].append(matrix)
                for rank in matrix.boxes:
                    self.scattered[rank].append(matrix)


class _Shared:
    """The matrices of one mesh, or those that this rank has to itself, and who owns which."""

    def __init__(self, mesh: DeviceMesh | None, parameters: list[Tensor], scale: MuonScale) -> None:
        self._parameters = parameters
        self._scale: MuonScale = scale
        self._group = None if mesh is None else _group_of(mesh)
        self._me = 0 if self._group is None else dist.get_rank(self._group)
        self._device = stored(parameters[0]).device
        self._dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        self._boxes = self._exchange_boxes()
        num_ranks = len(self._boxes)
        self._buckets = [
            _ParameterBucket(dealt, self._me, num_ranks)
            for dealt in deal(self._matrices(), num_ranks)
        ]

    def _exchange_boxes(self) -> list[list[Box]]:
        """Return by rank which box of each parameter it stores."""
        mine = [stored_box(parameter) for parameter in self._parameters]
        if self._group is None:
            return [mine]
        numbers = [number for box in mine for number in (*box.offsets, *box.sizes)]
        sent = torch.tensor(numbers, device=self._device)
        received = sent.new_empty(dist.get_world_size(self._group) * len(sent))
        dist.all_gather_single(received, sent, group=self._group)
        rows = []
        for row in received.view(-1, len(sent)).tolist():
            rest = iter(row)
            rows.append(
                [Box(*(tuple(islice(rest, len(box.sizes))) for _ in range(2))) for box in mine]
            )
        return rows

    def _matrices(self) -> list[_Matrix]:
        found = []
        for number, parameter in enumerate(self._parameters):
            boxes = {rank: boxes[number] for rank, boxes in enumerate(self._boxes)}
            held = {rank: box for rank, box in boxes.items() if box.numel}
            whole = whole_shape(parameter)
            shape = (whole[-2], whole[-1])
            if len(whole) == 2:
                found.append(_Matrix((number, None), shape, held))
                continue
            for index in range(whole[0]):
                of_it = {
                    rank: Box(box.offsets[1:], box.sizes[1:])
                    for rank, box in held.items()
                    if box.offsets[0] <= index < box.offsets[0] + box.sizes[0]
                }
                found.append(_Matrix((number, index), shape, of_it))
        found = [matrix for matrix in found if matrix.boxes]  # others are of other ranks
        if torn := [matrix for matrix in found if not matrix.is_whole]:
            raise ValueError(
                f"a matrix {list(torn[0].shape)} lies on ranks that share no mesh, of which these "
                f"hold {torn[0].boxes}: shard it by FSDP2 or TP, or leave it to AdamW"
            )
        return found

    def step_(
        self,
        update: _Update,
        settings: _Settings,
        is_made: Tensor,
    ) -> None:
        """Update the parameters; collective.

        Args:
            update: Gives what is to be made orthogonal, as far as this rank stores it.
            settings: Gives learning rate and weight decay.
            is_made: Where it is false, parameters keep their bits.
        """
        weight = is_made.double()
        for parameter in self._parameters:
            lr, decay = settings(parameter)
            stored(parameter).mul_(1 - weight * (lr * decay))
        coming = self._gather(self._buckets[0], update)
        going: tuple[_ParameterBucket, _AllToAll] | None = None
        for number, bucket in enumerate(self._buckets):
            gathered = coming.wait()
            if number + 1 < len(self._buckets):
                coming = self._gather(self._buckets[number + 1], update)
            returned = self._scatter(bucket, gathered)
            if going is not None:
                self._apply_(*going, settings, is_made)
            going = bucket, returned
        assert going is not None
        self._apply_(*going, settings, is_made)

    def _gather(self, bucket: _ParameterBucket, update: _Update) -> _AllToAll:
        """Begin to send the parts of a bucket to the owners."""
        sent, wanted = self._numels(bucket.given), self._numels_of_peers(bucket.gathered)
        buffer = torch.empty(sum(sent), dtype=self._dtype, device=self._device)
        matrices = [matrix for end in bucket.given for matrix in end]
        for matrix, room in zip(matrices, self._split(buffer, matrices), strict=True):
            parameter = self._parameters[matrix.key[0]]
            room.copy_(update(parameter, partial(self._part, matrix)))
        return self._all_to_all(buffer, sent, wanted)

    def _scatter(self, bucket: _ParameterBucket, gathered: Tensor) -> _AllToAll:
        """Make this rank's own matrices of a bucket orthogonal, and begin to send them back."""
        whole: dict[_Key, Tensor] = {}
        at = 0
        for rank, matrices in enumerate(bucket.gathered):
            for matrix in matrices:
                box = matrix.boxes[rank]
                part = gathered[at : at + box.numel].view(box.sizes)
                at += box.numel
                if box.sizes == matrix.shape:
                    whole[matrix.key] = part
                    continue
                if matrix.key not in whole:
                    whole[matrix.key] = part.new_empty(matrix.shape)
                whole[matrix.key][box.slices] = part
        results = {key: orthogonalise(matrix) for key, matrix in whole.items()}
        parts = [
            results[matrix.key][matrix.boxes[rank].slices].flatten()
            for rank, matrices in enumerate(bucket.scattered)
            for matrix in matrices
        ]
        buffer = torch.cat(parts) if parts else gathered.new_empty(0)
        sent, wanted = self._numels_of_peers(bucket.scattered), self._numels(bucket.taken)
        return self._all_to_all(buffer, sent, wanted)

    def _apply_(
        self,
        bucket: _ParameterBucket,
        returned: _AllToAll,
        settings: _Settings,
        is_made: Tensor,
    ) -> None:
        matrices = [matrix for end in bucket.taken for matrix in end]
        for matrix, result in zip(matrices, self._split(returned.wait(), matrices), strict=True):
            parameter = self._parameters[matrix.key[0]]
            lr, _ = settings(parameter)
            part = self._part(matrix, stored(parameter))
            updated = part.add(result, alpha=-lr * update_scale(self._scale, matrix.shape))
            torch.where(is_made, updated, part, out=part)

    def _part(self, matrix: _Matrix, values: Tensor) -> Tensor:
        """Return this rank's box of a matrix, of what it stores of the parameter."""
        number, index = matrix.key
        return values if index is None else values[index - self._boxes[self._me][number].offsets[0]]

    def _split(self, buffer: Tensor, matrices: Sequence[_Matrix]) -> list[Tensor]:
        boxes = [matrix.boxes[self._me] for matrix in matrices]
        parts = torch.split(buffer, [box.numel for box in boxes])
        return [part.view(box.sizes) for part, box in zip(parts, boxes, strict=True)]

    def _numels(self, ends: Sequence[Sequence[_Matrix]]) -> list[int]:
        """Count the elements of this rank's parts, a peer."""
        return [sum(matrix.boxes[self._me].numel for matrix in end) for end in ends]

    def _numels_of_peers(self, ends: Sequence[Sequence[_Matrix]]) -> list[int]:
        """Count the elements of each peer's parts."""
        return [sum(matrix.boxes[r].numel for matrix in end) for r, end in enumerate(ends)]

    def _all_to_all(self, buffer: Tensor, sent: list[int], wanted: list[int]) -> _AllToAll:
        if self._group is None:
            return _AllToAll(buffer, buffer, None)
        received = buffer.new_empty(sum(wanted))
        work = dist.all_to_all_single(
            received, buffer, wanted, sent, group=self._group, async_op=True
        )
        return _AllToAll(buffer, received, work)


@dataclass(frozen=True, slots=True)
class _AllToAll:
    """An all-to-all under way; what is sent must live until it is done."""

    sent: Tensor
    received: Tensor
    work: Any  # torch's Work, None if nobody else takes part

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a group of all ranks of a mesh, in the order of their numbers."""
    if mesh.ndim == 1:
        alone: dist.ProcessGroup = mesh.get_group()
        return alone
    ranks = sorted(mesh.mesh.flatten().tolist())
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group
