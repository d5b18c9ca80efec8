"""Start of every Python process of an audited command: Python imports this module by itself.

`colotrain audit` puts this folder first on PYTHONPATH. The module waits for the imports of torch,
FSDP and DeepSpeed and lets `colotrain.audit.hooks` observe them; it prints and raises nothing.
A `sitecustomize` that it hides runs as it would without it.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
WATCHED = {
    "torch": "observe_torch",
    "torch.distributed.fsdp": "observe_fsdp",
    "deepspeed.runtime.engine": "observe_deepspeed",
}
"""Module → function of `colotrain.audit.hooks` to call once it has been imported."""


def run_hidden_one() -> None:
    """Run the `sitecustomize` that Python would have imported without this folder."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def load_package() -> None:
    """Import colotrain from where the audit runs; this adds nothing to sys.path."""
    if "colotrain" in sys.modules:
        return
    folder = os.path.dirname(os.path.dirname(HERE))
    spec = importlib.util.spec_from_file_location(
        "colotrain", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["colotrain"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def observe(name: str) -> None:
    try:
        load_package()
        from colotrain.audit import hooks

        getattr(hooks, WATCHED[name])()
    except BaseException as error:  # the script goes on, whatever happens here
        note_failure(f"{name} cannot be observed: {type(error).__name__}: {error}")


def note_failure(text: str) -> None:
    try:
        path = os.path.join(os.environ["COLOTRAIN_AUDIT"], "audit", f"failures-{os.getpid()}.txt")
        with open(path, "a", encoding="utf-8") as file:
            file.write(" ".join(text.split()) + "\n")
    except OSError:
        pass


class Loader:
    """Loads a module as its own loader does, and then lets it be observed."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        observe(module.__name__)


class Finder:
    """Finds the watched modules as the other finders do, with a `Loader` around theirs."""

    def __init__(self) -> None:
        self.busy: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in WATCHED or name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)  # type: ignore[assignment]
        return spec


if os.environ.get("COLOTRAIN_AUDIT"):
    sys.meta_path.insert(0, Finder())
run_hidden_one()
