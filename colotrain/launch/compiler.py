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
    torch = sys.modules.get("torch")
    if torch is None or COMPILER in sys.modules:
        return
    stand_in, name = Postponed(COMPILER), f"{COMPILER}.config"
    path = Path(str(torch.__file__)).with_name("_dynamo") / "config.py"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        return
    config = importlib.util.module_from_spec(spec)
    sys.modules[COMPILER], sys.modules[name] = stand_in, config
    stand_in.__dict__["config"] = config
    spec.loader.exec_module(config)
