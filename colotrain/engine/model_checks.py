"""What is refused of a user's model before it is sharded."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from colotrain.engine.freezing import thawed_later
from colotrain.engine.model_blocks import Group, sharded_parameters
from colotrain.errors import ConfigError, Problem
from colotrain.spec.plan import FreezePlan, ModelPlan
from colotrain.torch_internals import hooks_after_gradient_of


def check_dtypes(
    model: nn.Module, groups: list[Group], plan: ModelPlan, freeze: FreezePlan
) -> None:
    """Refuse a group in which parameters of two dtypes ever train: they are reduced together."""
    names, later = {p: n for n, p in model.named_parameters()}, thawed_later(model, freeze)
    seen: set[nn.Parameter] = set()
    for _, modules in (*groups, ("", [model])):  # those inside others come before these
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
    """Refuse what sharding would lose: `ConfigError` with all of it."""
    if problems := [Problem(key=plan.key, value=plan.value, **found) for found in _lost(model)]:
        raise ConfigError(problems)


def _lost(model: nn.Module) -> Iterator[dict[str, str]]:
    """What is expected instead, and how to have that."""
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and module.weight.requires_grad:
            yield {
                "expected": f"gradients that can be reduced over ranks ({name}.weight has sparse "
                "ones)",
                "fix": "make the embedding with sparse=False",
            }
    for name, parameter in model.named_parameters():
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
