"""A model's modules, parameters and buffers as its modules hold them.

A user's class may override `parameters()`, `modules()` and the like, to give out a part of them in
an order of its own: whatever trains, shards or saves a model walks the modules themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_modules(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield `module` and all modules in it in the order and with the names that torch gives them.

    Without `remove_duplicate` a module that several hold has each of its names.
    """
    seen = set[nn.Module]()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if remove_duplicate and module in seen:
            return
        seen.add(module)
        yield name, module
        for key, child in module._modules.items():
            if child is not None:
                yield from walk(child, f"{name}.{key}" if name else key)

    return walk(module, "")


def modules(module: nn.Module) -> Iterator[nn.Module]:
    return (found for _, found in named_modules(module))


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that `module` itself holds, each once."""
    seen = set[nn.Module]()
    for name, child in module._modules.items():
        if child is not None and child not in seen:
            seen.add(child)
            yield name, child


def children(module: nn.Module) -> Iterator[nn.Module]:
    return (child for _, child in named_children(module))


def named_parameters(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters in `module`, in torch's order; a tied one once, by its first name.

    Without `remove_duplicate` a tied parameter has each of its names.
    """
    seen = set[nn.Parameter]()
    for name, owner in named_modules(module, remove_duplicate=remove_duplicate):
        for key, parameter in owner._parameters.items():
            if parameter is not None and not (remove_duplicate and parameter in seen):
                seen.add(parameter)
                yield f"{name}.{key}" if name else key, parameter


def parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for _, parameter in named_parameters(module))


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers in `module`, each once."""
    seen = set[Tensor]()
    for name, owner in named_modules(module):
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer not in seen:
                seen.add(buffer)
                yield f"{name}.{key}" if name else key, buffer


def buffers(module: nn.Module) -> Iterator[Tensor]:
    return (buffer for _, buffer in named_buffers(module))
