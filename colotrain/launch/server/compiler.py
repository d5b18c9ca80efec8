"""Postpones the import of torch's compiler until something is compiled.

torch imports `torch._dynamo` (0.3 s) to call `disable`, which hides a function from the compiler,
or to read one of its settings: every optimizer, every hook of `fully_shard` and many functions for
meta tensors do so. A process that compiles nothing does not need it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colotrain import cache_folder

COMPILER, FOLDER = "torch._dynamo", "TORCHINDUCTOR_CACHE_DIR"
WITHOUT_EFFECT: dict[str, Any] = {
    "graph_break": lambda: None,  # in every optimizer step
    "trace_rules": types.SimpleNamespace(clear_lru_cache=lambda: None),  # in `init_process_group`
}
"""Attributes of the compiler that torch uses and that do nothing if nothing is compiled."""
ALONE = ("config", "_trace_wrapped_higher_order_op")
"""Modules of the compiler that need nothing else of it: its settings, and what transformers' masks
import."""

_allowed: list[Callable[..., Any]] = []
"""Functions that the compiler, once it is imported, is to take as they are."""


class Postponed(types.ModuleType):
    """Stands in for the compiler in `sys.modules` until an attribute that it lacks is used.

    The modules of `ALONE` are torch's own, which the compiler then finds imported.
    """

    @staticmethod
    def assume_constant_result(fn: Callable[..., Any]) -> Callable[..., Any]:
        """Same as `torch._dynamo.assume_constant_result`: a mark that the compiler looks for."""
        fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
        return fn

    @staticmethod
    def allow_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
        """Same as `torch._dynamo.allow_in_graph`, as soon as the compiler is imported."""
        _allowed.append(fn)
        return fn

    def disable(
        self, fn: Callable[..., Any] | None = None, *args: Any, **options: Any
    ) -> Callable[..., Any]:
        """Same as `torch._dynamo.disable`, but takes effect only after the compiler is imported."""
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
            load_compiler()
        return getattr(importlib.import_module(COMPILER), name)


def load_compiler() -> None:
    """Import the compiler, and let it write and load code in a folder of this user's alone.

    torch's own is one in /tmp whose name is known, which another user can make beforehand. A
    folder that the user chose stays; headers are then there, too, unlike with torch.
    """
    if FOLDER not in os.environ:
        try:
            os.environ[FOLDER] = str(cache_folder.subfolder("compiled", for_code=True))
        except OSError:  # there is no cache: the code is compiled in each launch
            os.environ[FOLDER] = tempfile.mkdtemp(prefix="colotrain-compiled-")
    compiler = importlib.import_module(COMPILER)
    for name in ALONE:
        setattr(compiler, name, importlib.import_module(f"{COMPILER}.{name}"))
    for fn in _allowed:
        compiler.allow_in_graph(fn)
    _allowed.clear()
    for name in ("cache_dir_utils", "runtime_utils"):
        module: Any = importlib.import_module(f"torch._inductor.runtime.{name}")
        assert hasattr(module, "default_cache_dir"), "torch keeps headers elsewhere"
        module.default_cache_dir = lambda: os.environ[FOLDER]


def postpone_compiler() -> None:
    """Install the stand-in; call it after `import torch` and before anything is compiled."""
    if "torch" not in sys.modules or COMPILER in sys.modules:
        return
    package = importlib.util.find_spec(COMPILER)
    if package is None or package.origin is None:
        return
    paths = [Path(package.origin).with_name(f"{name}.py") for name in ALONE]
    if not all(path.is_file() for path in paths):
        return
    sys.modules[COMPILER] = stand_in = Postponed(COMPILER)
    stand_in.__dict__.update(__spec__=package, __file__=package.origin)
    for name, path in zip(ALONE, paths, strict=True):
        setattr(stand_in, name, _module(f"{COMPILER}.{name}", path))


def _module(name: str, path: Path) -> types.ModuleType:
    """The module of the file, without the package that it is in."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # it may look itself up
    spec.loader.exec_module(module)
    return module
