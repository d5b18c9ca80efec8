"""torch's compiler is imported when something is compiled, and not before.

torch imports `torch._dynamo` (0.3 s) to call `disable`, which hides a function from the compiler,
or to read a setting of it: every optimizer, every hook of `fully_shard` and many functions for meta
tensors do so. Where nothing is compiled there is nothing to hide from.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPILER = "torch._dynamo"
WITHOUT_EFFECT: dict[str, Any] = {
    "graph_break": lambda: None,  # every step of an optimizer
    "trace_rules": types.SimpleNamespace(clear_lru_cache=lambda: None),  # `init_process_group`
}
"""What torch asks of the compiler that does nothing where nothing is compiled."""


class Postponed(types.ModuleType):
    """Stands for the compiler in `sys.modules` until more of it is asked for than this.

    `config`, its settings, is torch's own module, which the compiler will find imported.
    """

    def disable(
        self, fn: Callable[..., Any] | None = None, *args: Any, **options: Any
    ) -> Callable[..., Any]:
        """As `torch._dynamo.disable`, once the compiler is there."""
        if fn is None:
            return functools.partial(self.disable, **options)
        hidden: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def call(*given: Any, **named: Any) -> Any:
            nonlocal hidden
            if sys.modules.get(COMPILER) is self:
                return fn(*given, **named)
            hidden = hidden or sys.modules[COMPILER].disable(fn, *args, **options)
            return hidden(*given, **named)

        return call

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(COMPILER) is self:
            if name in WITHOUT_EFFECT:
                return WITHOUT_EFFECT[name]
            del sys.modules[COMPILER]
        return getattr(importlib.import_module(COMPILER), name)


def postpone_compiler() -> None:
    """Call after `import torch`, and before anything is compiled."""
    if "torch" not in sys.modules or COMPILER in sys.modules:
        return
    package, name = importlib.util.find_spec(COMPILER), f"{COMPILER}.config"
    if package is None or package.origin is None:
        return
    path = Path(package.origin).with_name("config.py")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        return
    config = sys.modules[name] = importlib.util.module_from_spec(spec)  # looked for there by itself
    spec.loader.exec_module(config)
    sys.modules[COMPILER] = stand_in = Postponed(COMPILER)
    stand_in.__dict__.update(config=config, __spec__=package, __file__=package.origin)
