"""The gradients of a micro-batch as the script's own backward computes them, before any engine.

Hooks on whole parameters see each gradient on its way to `.grad`: before it is accumulated,
reduced, scaled or partitioned. They are there during the backward alone. Nothing is computed twice,
so engines that count their backwards do not notice.
"""

from __future__ import annotations

import base64
import weakref
from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.audit import model
from colotrain.audit.records import TENSOR_PARALLEL

GATHERED = ("FullyShardedDataParallel", "fully_shard", TENSOR_PARALLEL)
"""What gathers parameters by putting others in their place."""


class Taps:
    """Hooks on the parameters of a model, whose gradients they sum up as sketches."""

    def __init__(self, is_looking: Callable[[], bool]) -> None:
        self.is_looking = is_looking
        self._units = weakref.WeakSet[nn.Module]()
        """Modules of `fully_shard` or FSDP whose whole parameters are noted in each forward."""
        self.names: dict[int, str] = {}
        """Names of shards by their ids."""
        self.whole: dict[int, list[Tensor]] = {}
        """Id of a shard → whole parameters that forwards used in its place."""
        self.peers = dict[frozenset[int], int]()
        """Ranks that share parameters which are sharded while they are used, this one among them,
        → most axes of such a parameter."""
        self.failure = ""
        """Why a gradient could not be recorded."""
        self._handles: list[Any] = []
        self._sums: dict[str, Tensor] = {}

    def watch(self, roots: model.Roots) -> None:
        """Note from now on what sharded parameters are while they are whole."""
        for root in roots.all():
            for unit in model.sharded_units(root):
                if unit not in self._units:
                    self._units.add(unit)
                    self.names |= {id(p): name for name, p in roots.parameters().items()}
                    unit.register_forward_hook(self._noting(unit), prepend=True)

    def _noting(self, unit: nn.Module) -> Any:
        nested = {
            m for other in model.sharded_units(unit) if other is not unit for m in other.modules()
        }
        shards = [
            (module, key, id(shard))
            for module in unit.modules()
            if module not in nested
            for key, shard in module.named_parameters(recurse=False)
        ]

        def note(*_: Any) -> None:
            for module, key, shard in shards if self.is_looking() else ():
                value = getattr(module, key, None)
                known = self.whole.setdefault(shard, [])
                if isinstance(value, Tensor) and not any(value is other for other in known):
                    known.append(value)

        return note

    def attach(self, roots: model.Roots, outside: Mapping[str, Tensor]) -> str:
        """Hook the parameters for one backward, and those of optimizers that are in no module.

        Return why that cannot be, or an empty text.
        """
        own = {n: p for n, p in roots.parameters().items() if p.requires_grad}
        known = {id(parameter) for parameter in own.values()}
        others = {n: [p] for n, p in outside.items() if id(p) not in known}
        if not own and not others:
            return "no module with trainable parameters ran before the backward"
        found: dict[str, list[Tensor]] = {name: [parameter] for name, parameter in own.items()}
        kind = model.framework(roots.all())
        if kind in GATHERED:
            names = self.names | {id(parameter): name for name, parameter in own.items()}
            used = {names[shard]: tensors for shard, tensors in self.whole.items()}
            if any(name.endswith("_flat_param") for name in names.values()):
                return f"{kind} without use_orig_params hides the parameters while it trains"
            if not used and kind != TENSOR_PARALLEL:
                return f"{kind}: no forward was seen in which its parameters were whole"
            plain: dict[str, list[Tensor]] = {
                n: [p] for n, p in own.items() if id(p) not in self.names and n not in used
            }
            found = {**plain, **{n: [t for t in ts if t.requires_grad] for n, ts in used.items()}}
        for name, tensors in {**others, **found}.items():
            for tensor in tensors:
                ranks = frozenset[int]() if name in others else peers(tensor)
                self.peers[ranks] = max(tensor.dim(), self.peers.get(ranks, 0))
                self._handles.append(tensor.register_hook(self._adding(name)))
        return ""

    def _adding(self, name: str) -> Any:
        def add(gradient: Tensor) -> None:
            try:
                whole = gradient.to_dense() if gradient.is_sparse else gradient
                own = sketch(in_its_place(whole))
                self._sums[name] = self._sums.get(name, 0) + own
            except Exception as error:  # the script's backward goes on
                self.failure = self.failure or f"{name}: {type(error).__name__}: {error}"

        return add

    def detach(self) -> dict[str, Tensor]:
        """Remove the hooks and return the sketches of the backward's gradients."""
        for handle in self._handles:
            handle.remove()
        found, self._handles, self._sums = self._sums, [], {}
        return found


def in_its_place(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor among zeros: the sum over ranks is the whole tensor.

    Of what is replicated each rank has the whole. Any other tensor is returned as it is.
    """
    if not model.is_dtensor(tensor):
        return tensor
    own, mesh = tensor.to_local(), tensor.device_mesh
    where = [torch.arange(size, device=own.device) for size in tensor.shape]
    axes = zip(tensor.placements, mesh.get_coordinate(), strict=True)
    for axis, (placement, place) in enumerate(axes):
        num, dim = mesh.size(axis), getattr(placement, "dim", None)
        if dim is not None:
            pieces = where[dim].chunk(getattr(placement, "split_factor", 1))
            where[dim] = torch.cat(
                [torch.tensor_split(p, bounds(len(p), num))[place] for p in pieces]
            )
        elif getattr(placement, "reduce_op", "sum") == "avg":
            own = own / num
    found = torch.zeros(tensor.shape, dtype=own.dtype, device=own.device)
    found[torch.meshgrid(*where, indexing="ij")] = own
    return found


def bounds(length: int, num: int) -> list[int]:
    """Return where `num` ranks' parts of a dimension end, as `Shard` cuts it; but the last one."""
    size = -(-length // num)
    return [min(length, size * place) for place in range(1, num)]


def peers(tensor: Any) -> frozenset[int]:
    """Return the ranks that have the parts of a DTensor; empty for any other tensor."""
    if not model.is_dtensor(tensor):
        return frozenset()
    mesh = tensor.device_mesh
    axes = zip(tensor.placements, mesh.get_coordinate(), strict=True)
    index = tuple(slice(None) if placement.is_shard() else place for placement, place in axes)
    ranks = mesh.mesh[index].flatten().tolist()
    return frozenset(ranks if len(ranks) > 1 else ())


SUMS = 64
BLOCK = 2**15
"""Elements that are summed at once on a CPU: their float64 copies stay in its cache."""
SEED = 20_231_117


def sketch(tensor: Tensor) -> Tensor:
    """Return the sketch of a whole tensor: at most `SUMS` float64 numbers, on its device."""
    whole = tensor.detach()
    flat = (torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole).reshape(-1)
    if flat.numel() <= SUMS:
        return flat.to(torch.float64, copy=True)  # the tensor may change in place
    signs = _signs(flat.numel(), str(flat.device))
    size = BLOCK if flat.device.type == "cpu" else flat.numel()
    sums = torch.zeros(SUMS, dtype=torch.float64, device=flat.device)
    for values, own_signs in zip(flat.split(size), signs.split(size), strict=True):
        signed = values.to(torch.float64, copy=True).mul_(own_signs)
        even = signed.numel() // SUMS * SUMS
        sums += signed[:even].view(-1, SUMS).sum(0)
        sums[: signed.numel() - even] += signed[even:]
    return sums


@lru_cache(maxsize=4096)
def _signs(length: int, device: str) -> Tensor:
    draw = torch.Generator().manual_seed(SEED + length)  # the script's generator is not touched
    return (torch.randint(0, 2, (length,), generator=draw, dtype=torch.int8) * 2 - 1).to(device)


def packed(values: Tensor) -> str:
    """Return a sketch as text."""
    return base64.b64encode(array("d", values.tolist()).tobytes()).decode()
