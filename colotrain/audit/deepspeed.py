"""Hooks on DeepSpeed's engine, whose gradients are in partitions and not in `.grad`."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from colotrain.audit.observer import Observer
from colotrain.audit.records import EngineInfo
from colotrain.audit.window import number


def install(observer: Callable[[], Observer]) -> None:
    """Observe `DeepSpeedEngine.step`: one call in `gradient_accumulation_steps` is a real step."""
    engine_class = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    original = engine_class.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = observer()
        if seen.quiet:
            return original(self, *args, **kwargs)
        seen.window.step_calls += 1
        with seen.guarded():
            if not seen.roots.all():
                seen.roots.add(self)
            if seen.report is None:
                seen.write(info(self))
            if self.is_gradient_accumulation_boundary():
                seen.entering(self, gradient_of=gradient_of, value_of=value_of)
        before = self.global_steps
        seen.quiet += 1  # the optimizer within steps on partitions
        try:
            result = original(self, *args, **kwargs)
        finally:
            seen.quiet -= 1
        if self.global_steps > before:
            with seen.guarded():
                seen.window.engine_clip = clip_factor(self)
                seen.stepped(self, value_of=value_of, own=basic_optimizer(self))
        return result

    engine_class.step = step


def gradient_of(parameter: Any) -> Any:
    """Return a whole gradient by DeepSpeed's public function, which all ranks must call."""
    found = importlib.import_module("deepspeed.utils").safe_get_full_grad(parameter)
    return parameter.grad if found is None else found


def value_of(parameter: Any) -> Any:
    """Return a whole weight by DeepSpeed's public function, which all ranks must call."""
    found = importlib.import_module("deepspeed.utils").safe_get_full_fp32_param(parameter)
    if found is None and not hasattr(parameter, "ds_id"):
        found = parameter.detach()
    return found


def clip_factor(engine: Any) -> float:
    """Return by what the engine multiplied the gradients of the step that it has just made."""
    limit, norm = number(engine.gradient_clipping()), number(engine.get_global_grad_norm())
    return min(1.0, limit / (norm + 1e-6)) if limit and norm else 1.0


def info(engine: Any) -> EngineInfo:
    return EngineInfo(
        name="deepspeed",
        accumulation_steps=int(engine.gradient_accumulation_steps()),
        stage=int(engine.zero_optimization_stage()),
    )


def basic_optimizer(engine: Any) -> Any:
    """Return the optimizer that the engine's own one wraps."""
    return getattr(engine, "basic_optimizer", None) or engine.optimizer
