"""The repeated blocks of a model: members of module lists, which may be gathered one by one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from colotrain import module_tree

Block = tuple[str, nn.Module]
Group = tuple[str, list[nn.Module]]
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[Block]:
    """Return the outermost modules that repeat in a list or container, in the model's order.

    A block that shares a parameter with a module outside it is left out, because a parameter can
    belong to one group only.
    """
    candidates = repeated_modules(model)
    owners: dict[nn.Parameter, set[int]] = {}
    inside = {name: index for index, (name, _) in enumerate(candidates)}
    all_paths = module_tree.named_modules(model, remove_duplicate=False)  # of a module several
    for path, module in all_paths:
        parts = path.split(".")
        known_as = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        index = next((inside[name] for name in known_as if name in inside), -1)
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(index)
    shared = {index for indices in owners.values() if len(indices) > 1 for index in indices}
    return [block for index, block in enumerate(candidates) if index not in shared]


def repeated_modules(model: nn.Module) -> list[Block]:
    """Return the outermost members of containers that hold several modules of the same type."""
    return list(_outermost(model, prefix=""))


def _outermost(module: nn.Module, prefix: str) -> Iterator[Block]:
    for name, child in module_tree.named_children(module):
        path = f"{prefix}{name}"
        if isinstance(module, CONTAINERS) and _may_be_block(child) and _is_repeated(child, module):
            if parameter_bytes(child):
                yield path, child
        elif isinstance(child, CONTAINERS) or not isinstance(module, CONTAINERS):
            yield from _outermost(child, f"{path}.")


def _may_be_block(module: nn.Module) -> bool:
    """Whether a member of a container is one thing: no container, or a sequence of layers.

    An `nn.Sequential` is a sequence of layers where no member has modules inside: one that holds
    blocks of its own, as a stage of a ResNet does, is a list of them.
    """
    if not isinstance(module, CONTAINERS):
        return True
    members = [*module_tree.children(module)]
    is_called = isinstance(module, nn.Sequential)
    return is_called and len(members) > 1 and not any([*module_tree.children(m)] for m in members)


def _is_repeated(child: nn.Module, container: nn.Module) -> bool:
    others = [*module_tree.children(container)]
    return sum(_kind(other) == _kind(child) for other in others) > 1


def _kind(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """The class of a module; of an `nn.Sequential` its members', too."""
    inside = module_tree.children(module) if isinstance(module, nn.Sequential) else ()
    return type(module), *map(type, inside)


def sharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a group can hold; scalars and empty ones are never sharded."""
    return [p for p in module_tree.parameters(module) if p.ndim and p.numel()]


def parameter_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module_tree.parameters(module))
