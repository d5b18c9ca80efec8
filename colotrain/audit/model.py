"""The model that a script trains: its root modules, its parameters by name, whole gradients."""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.audit.records import TENSOR_PARALLEL

WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
"""Segments of names that wrappers of modules add anywhere."""
LARGEST_HASHED = 1 << 24
"""Bytes of one input up to which all of it is hashed."""


class Roots:
    """The outermost modules that ran, in the order of their first forward, and bare parameters."""

    def __init__(self, held: Callable[[], Container[int]] = frozenset) -> None:
        self._inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: list[weakref.ref[nn.Module]] = []
        self._held = held
        """Returns the ids of all parameters that optimizers have."""
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Roots that ran where gradients are computed."""
        self.bare: dict[str, weakref.ref[Tensor]] = {}
        """Leaves in a loss that optimizers have and no module."""

    def add(self, module: nn.Module) -> bool:
        """Note that `module` is called, and return whether it is a root with parameters."""
        if module in self._inside:
            is_root = any(root() is module for root in self._roots)
            if is_root and torch.is_grad_enabled():
                self._trained.add(module)
            return is_root
        if next(module.parameters(), None) is None:
            return False
        inner = list(module.modules())
        if any(module in root.modules() for root in self.all()):  # it came into a root later
            self._inside.update(inner)
            return False
        if torch.is_grad_enabled():
            self._trained.add(module)
        self._roots = [r for r in self._roots if not any(m is r() for m in inner)]
        self._roots.append(weakref.ref(module))
        for each in inner:
            self._inside.add(each)
        return True

    def have(self, module: nn.Module) -> bool:
        return module in self._inside

    def all(self) -> list[nn.Module]:
        return [module for root in self._roots if (module := root()) is not None]

    def training(self) -> list[nn.Module]:
        """Return the roots that train or that an optimizer has, not copies that only evaluate."""
        roots, held = self.all(), self._held()
        return [r for r in roots if r in self._trained or has_any(r, held)] or roots

    def apart(self) -> set[str]:
        """Return the names of models of which optimizers have nothing, as of a loss network."""
        held, parameters = self._held(), self.parameters()
        if not any(id(p) in held for p in parameters.values()):
            return set()
        ids = {id(p) for r in self.training() if not has_any(r, held) for p in r.parameters()}
        return {name for name, p in parameters.items() if id(p) in ids}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the model's own names, each once, and bare ones by theirs."""
        roots, found, seen = self.training(), dict[str, nn.Parameter](), set[int]()
        for root in roots:
            for name, parameter in root.named_parameters():
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                name = own_name(name, root)
                if len(roots) > 1 and name in found:
                    name = f"{type(inner(root)).__name__}.{name}"
                found[unused(name, found)] = parameter
        for name, ref in self.bare.items():
            bare: Any = ref()
            if bare is not None and id(bare) not in seen:
                found[unused(name, found)] = bare
        return found

    def aliases(self) -> dict[str, list[str]]:
        """Return the further names of parameters that have several."""
        first, found = dict[int, str](), dict[str, list[str]]()
        for root in self.training():
            for name, parameter in root.named_parameters(remove_duplicate=False):
                known = first.setdefault(id(parameter), own_name(name, root))
                if known != own_name(name, root):
                    found.setdefault(known, []).append(own_name(name, root))
        return found


def untied(roots: Roots) -> list[str]:
    """Return the names of a transformers model's embeddings that are two, though it ties them."""
    names = {id(parameter): name for name, parameter in roots.parameters().items()}
    modules: list[Any] = [module for root in roots.training() for module in root.modules()]
    for module in modules:
        config: Any = getattr(module, "config", None)
        if not getattr(module, "all_tied_weights_keys", None) or not _ties(config):
            continue
        both: list[Any] = []
        with contextlib.suppress(AttributeError, NotImplementedError):
            both += [module.get_input_embeddings().weight, module.get_output_embeddings().weight]
        trained = all(isinstance(w, nn.Parameter) and w.requires_grad for w in both)
        if len({id(w) for w in both}) == 2 and trained and both[0].shape == both[1].shape:
            return [names.get(id(weight), "weight") for weight in both]
    return []


def _ties(config: Any) -> bool:
    """Whether a configuration and its part for texts tie the embeddings."""
    texts = config.get_text_config() if hasattr(config, "get_text_config") else config
    return all(getattr(each, "tie_word_embeddings", False) for each in (config, texts))


def has_any(root: nn.Module, held: Container[int]) -> bool:
    return any(id(parameter) in held for parameter in root.parameters())


def unused(name: str, taken: Container[str]) -> str:
    while name in taken:
        name = f"{name}'"
    return name


def inner(module: nn.Module) -> nn.Module:
    """Return what a wrapper such as DistributedDataParallel wraps; else the module itself."""
    wrapped = getattr(module, "module", None)
    return wrapped if isinstance(wrapped, nn.Module) else module


def own_name(name: str, root: nn.Module) -> str:
    """Return a parameter's name without what wrappers around the model add."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    within: Any = root
    while parts[:1] == ["module"] and isinstance(getattr(within, "module", None), nn.Module):
        if len(list(within.children())) > 1:
            break  # a model whose own part is called so
        parts, within = parts[1:], within.module
    return ".".join(parts)


def is_a(value: object, module: str, name: str) -> bool:
    """Whether `value` is of a class whose module may never have been imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def is_dtensor(value: object) -> bool:
    return is_a(value, "torch.distributed.tensor", "DTensor")


def is_fsdp(module: object) -> bool:
    return is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def sharded_units(root: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters `fully_shard` or FSDP gathers for their forward."""
    found = []
    for module in root.modules():
        if is_fsdp(module):
            found.append(module.module)  # its own hooks run after its shards are back
        elif is_a(module, "torch.distributed.fsdp", "FSDPModule"):
            found.append(module)
    return found  # type: ignore[return-value]


def framework(roots: list[nn.Module]) -> str:
    """Return what shards or wraps the model; empty if nothing known does."""
    for root in roots:
        if any(is_fsdp(module) for module in root.modules()):
            return "FullyShardedDataParallel"
        if shards := [p for p in root.parameters() if is_dtensor(p)]:
            units = any(is_a(m, "torch.distributed.fsdp", "FSDPModule") for m in root.modules())
            by_data = units and not any(map(is_split_twice, shards))
            return "fully_shard" if by_data else TENSOR_PARALLEL
        if any(hasattr(parameter, "ds_id") for parameter in root.parameters()):
            return "ZeRO-3"
        if is_a(root, "deepspeed.runtime.engine", "DeepSpeedEngine"):
            return "DeepSpeedEngine"
        if is_a(root, "torch.nn.parallel", "DistributedDataParallel"):
            return "DistributedDataParallel"
    return ""


def is_split_twice(parameter: Any) -> bool:
    """Whether a DTensor is split along two axes of its mesh, as by FSDP and tensor parallelism."""
    return sum(not placement.is_replicate() for placement in parameter.placements) > 1


def whole(value: Tensor | None) -> Tensor | None:
    """Return a tensor that may be sharded as a whole one: collective for a DTensor."""
    if value is None or not is_dtensor(value):
        return value
    return value.full_tensor()  # type: ignore[attr-defined]


def local(value: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, any other tensor as it is."""
    return value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]


@contextlib.contextmanager
def gathered(roots: list[nn.Module]) -> Iterator[None]:
    """Make FSDP1's parameters and gradients whole: a collective call; without FSDP1 nothing."""
    with contextlib.ExitStack() as stack:
        for root in roots:
            if is_fsdp(root):
                summon = type(root).summon_full_params  # type: ignore[attr-defined]
                stack.enter_context(summon(root, with_grads=True, writeback=False))
        yield


def row(parameter: nn.Parameter, gradient: Tensor | None, why: str) -> dict[str, Any]:
    """Return the columns of `events.gradients.Gradients` for one parameter."""
    blank = dict.fromkeys(("norm", "rms", "max_abs", "zero_fraction"))
    if not parameter.requires_grad:
        return {"status": "frozen", "reason": "requires_grad is False", "nonfinite": 0, **blank}
    if gradient is None:
        return {"status": "unused", "reason": why, "nonfinite": 0, **blank}
    values = gradient.detach().to(torch.float64)
    nonfinite = int((~torch.isfinite(values)).sum())
    norm, num = float(values.norm()), max(1, values.numel())
    status = "nonfinite" if nonfinite else "trained" if norm else "zero"
    return {
        "status": status,
        "reason": "all elements are zero" if status == "zero" else None,
        "nonfinite": nonfinite,
        "norm": norm,
        "rms": norm / math.sqrt(num),
        "max_abs": float(values.abs().max()) if values.numel() else 0.0,
        "zero_fraction": float((values == 0).sum()) / num,
    }


def is_dropout(module: nn.Module) -> bool:
    return "Dropout" in type(module).__name__ and bool(getattr(module, "p", 0))


def has_dropout(roots: list[nn.Module]) -> bool:
    return any(
        module.training and is_dropout(module) for root in roots for module in root.modules()
    )


def hash_of(values: object) -> str:
    """Return a hash of all tensors in arguments of a forward, but DTensors; empty if none."""
    digest, found = hashlib.blake2b(digest_size=8), False
    for tensor in tensors_in(values):
        found = True
        data = tensor.detach()
        if data.numel() * data.element_size() > LARGEST_HASHED:
            data = data.reshape(-1)[:: 1 + data.numel() * data.element_size() // LARGEST_HASHED]
        data = data.contiguous().reshape(-1).view(torch.uint8).cpu()
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(data.numpy().tobytes())
    return digest.hexdigest() if found else ""


def tensors_in(values: object, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.layout == torch.strided and not values.is_meta and not is_dtensor(values):
            yield values
    elif isinstance(values, dict) and depth < 4:
        for value in values.values():
            yield from tensors_in(value, depth + 1)
    elif isinstance(values, list | tuple) and depth < 4:
        for value in values:
            yield from tensors_in(value, depth + 1)


def has_leaf(values: object) -> bool:
    """Whether a forward's inputs have a leaf whose gradient the script asks for."""
    return any(t.is_leaf and t.requires_grad for t in tensors_in(values))


def has_number(values: object) -> bool:
    """Whether a forward's inputs have a number, which may be a tensor."""
    if isinstance(values, Tensor):
        return not values.dim()
    if isinstance(values, dict | list | tuple):
        return any(map(has_number, values.values() if isinstance(values, dict) else values))
    return isinstance(values, int | float) and not isinstance(values, bool)


def random_state(device: torch.device) -> str:
    """Return a hash of the generators that dropout on `device` draws from."""
    state = torch.random.get_rng_state()
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
