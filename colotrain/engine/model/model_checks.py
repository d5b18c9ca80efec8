"""Checks of a user's model before it is sharded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.model.freezing import unfrozen_later
from colotrain.engine.model.model_blocks import Group, sharded_parameters
from colotrain.errors import ConfigError, Problem
from colotrain.spec.plan import FreezePlan, ModelPlan
from colotrain.torch_internals import hooks_after_gradient_of, storage_id, tree_leaves

CONTENTS = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold its parameters, buffers and submodules."""


def check_dtypes(
    model: nn.Module, groups: list[Group], plan: ModelPlan, freeze: FreezePlan
) -> None:
    """Refuse a group that trains parameters of two dtypes, because they are reduced together."""
    names = {parameter: name for name, parameter in module_tree.named_parameters(model)}
    later = unfrozen_later(model, freeze)
    seen: set[nn.Parameter] = set()
    for _, modules in (*groups, ("", [model])):  # inner modules come before those around them
        inside = [p for m in modules for p in sharded_parameters(m) if p not in seen]
        seen.update(inside)
        trained = [p for p in inside if p.requires_grad or names[p] in later]
        first = {p.dtype: names[p] for p in reversed(trained)}
        if len(first) > 1:
            told = ", ".join(f"{name} is {str(dtype)[6:]}" for dtype, name in first.items())
            expected = f"one dtype among the parameters that train of a block ({told})"
            fix = "convert the model with .to(dtype), or freeze the parameters of one dtype"
            problem = Problem(key=plan.key, value=plan.value, expected=expected, fix=fix)
            raise ConfigError([problem])


def check_parameters(model: nn.Module, plan: ModelPlan) -> None:
    """Raise `ConfigError` that lists everything sharding would lose."""
    if problems := [Problem(key=plan.key, value=plan.value, **found) for found in _lost(model)]:
        raise ConfigError(problems)


def check_precision(model: nn.Module, precision: str) -> None:
    """Raise `ConfigError` where the compute precision would drop a parameter's imaginary part."""
    for name, parameter in module_tree.named_parameters(model):
        if parameter.is_complex() and precision != "fp32":
            expected = f"fp32 ({name} has complex numbers)"
            raise ConfigError([Problem(key="train.precision", value=precision, expected=expected)])


def _lost(model: nn.Module) -> Iterator[dict[str, str]]:
    """Yield what is expected instead, and how to fix it."""
    for name, module in module_tree.named_modules(model):
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and module.weight.requires_grad:
            yield {
                "expected": f"gradients that can be reduced over ranks ({name}.weight has sparse "
                "ones)",
                "fix": "make the embedding with sparse=False",
            }
        if isinstance(module, torch.jit.ScriptModule) and [*module.parameters()]:
            yield {
                "expected": f"modules of Python ({name or 'the model'} is compiled by torch.jit, "
                "and its parameters cannot be sharded)",
                "fix": "leave torch.jit.script out; train.compile=true compiles what repeats",
            }
            return
    yield from _shares_memory(model)
    for name, module in module_tree.named_modules(model):
        if [*module.children()] != [*module_tree.children(module)]:
            yield {
                "expected": f"children() that gives out all modules (that of {name or 'the model'} "
                "does not, and torch would not shard the others)",
                "fix": "leave children() and named_children() as they are",
            }
    given, own = set(model.parameters()), dict(module_tree.named_parameters(model))
    for name in (name for name, _ in model.named_parameters() if name not in own):
        yield {
            "expected": f"named_parameters() that names them as the modules do (it has {name})",
            "fix": "leave named_parameters() as it is",
        }
    for name, parameter in own.items():
        if parameter.requires_grad and parameter not in given:
            yield {
                "expected": "parameters() that gives out all that train (its own leaves out "
                f"{name})",
                "fix": "freeze what shall not train (requires_grad_(False))",
            }
    for name, parameter in module_tree.named_parameters(model):
        if nn.parameter.is_lazy(parameter):
            yield {
                "expected": f"parameters with a shape ({name} has none yet: a lazy module)",
                "fix": "give the module its sizes, or run a forward before the model is returned",
            }
        elif hooks_after_gradient_of(parameter):
            yield {
                "expected": f"no hook of register_post_accumulate_grad_hook ({name} has one, which "
                "would see neither the whole gradient nor the whole parameter)",
                "fix": "use register_hook to change its gradient, and optim to update it",
            }


def _shares_memory(model: nn.Module) -> Iterator[dict[str, str]]:
    """Yield tensors that share a parameter's memory: after sharding they would not follow it."""
    known: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*module_tree.named_parameters(model), *_kept_tensors(model)):
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not plain or not tensor.numel():
            continue
        others = known.setdefault(storage_id(tensor), [])
        for other, parameter in others:
            if _overlap(parameter, tensor):
                yield {
                    "expected": f"memory of its own for each parameter ({name} looks at that of "
                    f"{other})",
                    "fix": "tie parameters as one (head.weight = embed.weight), and give other "
                    "tensors a .clone(), or compute them in forward",
                }
        if isinstance(tensor, nn.Parameter):
            others.append((name, tensor))


def _kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, and tensors in modules' attributes, lists and dicts; no parameters."""
    for prefix, module in module_tree.named_modules(model):
        for key, value in (*vars(module).items(), *module._buffers.items()):
            leaves = tree_leaves(value) if key not in CONTENTS else ()
            for leaf in leaves:
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    yield f"{prefix}.{key}" if prefix else key, leaf


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors on the same storage have an element at the same position."""
    (first, end), (other, other_end) = _extent(a), _extent(b)
    start, stop = max(first, other), min(end, other_end)
    if start >= stop or a.dtype != b.dtype:
        return start < stop
    taken = torch.zeros(max(end, other_end) // a.element_size(), dtype=torch.bool, device="cpu")
    _places(taken, a).fill_(True)
    return bool(_places(taken, b).any())


def _places(taken: Tensor, tensor: Tensor) -> Tensor:
    return taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that `tensor` covers, and the one after the last."""
    first, steps = int(tensor.storage_offset()), zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((size - 1) * step for size, step in steps)
    return first * tensor.element_size(), (last + 1) * tensor.element_size()
