"""Who may import whom: one folder, one rule. A new module knows its folder by what it imports."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


BASE = (
    "addresses errors records dotted rundir signatures parent_process host connections timeouts "
    "certificates cache_folder current_folder user_modules forked lost_peers callers_script"
)
TENSORS = "torch numpy safetensors tokenizers psutil xxhash"
EXTRAS = "transformers huggingface_hub peft datasets tensorboard wandb mlflow pynvml matplotlib"
EXTRAS += " pyarrow jinja2 yaml bitsandbytes PIL"


@dataclass(frozen=True)
class Rule:
    """What the modules of a folder may import beside the standard library and their own folder.

    A name allows everything under it. `inside` is allowed in functions and for type checkers only.
    """

    rooms: str
    libraries: str = ""
    inside: str = ""


# Folder → rule; a folder without one of its own has that of the folder it is in.
RULES = {
    "": Rule("spec", "psutil", "runs events engine torch"),
    "__main__": Rule("cli launch.server spec"),
    **dict.fromkeys(("torch_internals", "module_tree"), Rule("", "torch")),
    "generators": Rule("torch_internals", "torch numpy"),
    "offline": Rule("", "", "huggingface_hub"),
    "spec": Rule(""),
    "events": Rule("spec"),
    "config": Rule("spec schedulers", "omegaconf", "yaml"),
    "models": Rule("spec torch_internals module_tree generators offline", TENSORS, EXTRAS),
    "data.prepare": Rule("spec offline", "numpy", f"tokenizers {EXTRAS}"),
    "data.read": Rule("spec data.prepare generators", TENSORS, EXTRAS),
    "engine": Rule(
        "spec events models data.prepare data.read torch_internals module_tree generators", TENSORS
    ),
    "planner": Rule("spec config data.prepare launch.server", "psutil omegaconf"),
    "planner.traced": Rule(
        "spec events models data.prepare data.read engine planner torch_internals module_tree "
        "generators",
        TENSORS,
    ),
    "launch": Rule("spec events launch.server", "psutil", "torch launch.agent"),
    "launch.server": Rule("spec", "", "torch"),
    "launch.agent": Rule("spec events launch launch.server", "torch"),
    "schedulers": Rule("spec events", "", "yaml"),
    "verify": Rule(
        "spec events models data.prepare data.read engine launch torch_internals module_tree "
        "generators",
        TENSORS,
    ),
    "audit": Rule("spec events", "torch"),
    "export": Rule(
        "spec events models data.prepare data.read engine module_tree generators", TENSORS, EXTRAS
    ),
    "migrate": Rule("spec", "", "config yaml"),
    "doctor": Rule("spec", "psutil", "engine torch"),
    "show": Rule("spec events", "rich", EXTRAS),
    "runs": Rule(
        "spec events config data.prepare planner launch launch.server schedulers models data.read "
        "engine verify export doctor show",
        "psutil rich xxhash",
        "torch numpy omegaconf fsspec huggingface_hub",
    ),
    "cli": Rule("", "typer click rich psutil", "torch numpy omegaconf hydra"),
}
ENGINE = [
    *("model", "comms", "parts", "pipeline", "sharding", "gradients", "offload", "optim", "build"),
    *("state", "step"),
]
"""The folders of the engine: each may import those before it, and its root may import all."""
for number, folder in enumerate(ENGINE):
    below = " ".join(f"engine.{name}" for name in ENGINE[:number])
    RULES[f"engine.{folder}"] = Rule(f"{RULES['engine'].rooms} {below}", TENSORS)
RULES["cli"] = Rule(" ".join(RULES), RULES["cli"].libraries, RULES["cli"].inside)

EXCEPTIONS = {
    "config.compose": "hydra",  # its only importer
    "config.data": "data.prepare",  # its readers tell whether files can be read
}
"""Module → what it may import beyond the rule of its folder."""


@dataclass(frozen=True)
class Import:
    name: str
    line: int
    inside: bool
    """In a function or under TYPE_CHECKING: does not happen when the module is loaded."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "colotrain").rglob("*.py"))}


def room_of(module: str) -> str:
    """The longest folder of `module` that has a rule."""
    parts = module.split(".")[1:]
    places = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
    return next(place for place in places if place in RULES)


def allowed(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """What `module` may import anywhere, and what in functions only: names of modules."""
    room, rule = room_of(module), RULES[room_of(module)]

    def full(text: str) -> frozenset[str]:
        known = {*RULES, *(name.removeprefix("colotrain.") for name in MODULES)}
        words = text.split()
        if "engine" in words:
            words += [f"engine.{folder}" for folder in ENGINE]
        return frozenset(f"colotrain.{word}" if word in known else word for word in words)

    exceptions = EXCEPTIONS.get(module.removeprefix("colotrain."), "")
    own = f"{room} {BASE} {rule.rooms} {rule.libraries} {exceptions}"
    return full(own) if room else full(own) | {"colotrain.__init__"}, full(rule.inside)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST, *, module: str, inside: bool = False) -> Iterator[Import]:
    """Every import below `node`; relative ones are resolved against `module`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = module.split(".")[: -child.level] if child.level else []
            source = ".".join([*package, *([child.module] if child.module else [])])
            for alias in child.names:
                full = f"{source}.{alias.name}"
                known = full in MODULES or f"{full}.__init__" in MODULES
                yield Import(full if known else source, child.lineno, inside)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            deferred = inside or function or is_type_checking(child)
            yield from imports(child, module=module, inside=deferred)


def is_below(name: str, places: frozenset[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def is_seen(name: str, places: frozenset[str]) -> bool:
    """Whether `places` allow `name`: "planner" does not allow planner.traced, which has a rule."""
    if not name.startswith("colotrain."):
        return is_below(name, places)
    return name in places or f"colotrain.{room_of(name)}" in places


def breaches(module: str, text: str) -> list[str]:
    """What `text`, the source of `module`, imports against the rule of its folder."""
    anywhere, inside = allowed(module)
    found = []
    for item in imports(ast.parse(text), module=module):
        if item.name.partition(".")[0] in sys.stdlib_module_names or item.name == "colotrain":
            continue
        if is_seen(item.name, anywhere):
            continue
        if not is_seen(item.name, inside):
            found.append(f"line {item.line}: {module} may not import {item.name}")
        elif not item.inside:
            found.append(f"line {item.line}: {module} may import {item.name} in functions only")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_its_folder_may(module: str) -> None:
    assert breaches(module, MODULES[module].read_text("utf-8")) == []


def test_exceptions_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(EXCEPTIONS)
    for module, names in known.items():
        for name in names.split():
            rest = " ".join(other for other in names.split() if other != name)
            monkeypatch.setitem(EXCEPTIONS, module, rest)
            full = f"colotrain.{module}"
            assert breaches(full, MODULES[full].read_text("utf-8")), f"{module}: {name}"
        monkeypatch.setitem(EXCEPTIONS, module, names)


@pytest.mark.parametrize(
    ("module", "text", "breach"),
    [
        ("colotrain.spec.plan", "import numpy", "may not import numpy"),
        (
            "colotrain.engine.x.y",
            "from ...config import schema",
            "may not import colotrain.config",
        ),
        (
            "colotrain.engine.x.y",
            "def f():\n import rich.table",
            "may not import rich.table",
        ),
        ("colotrain.planner.resolve", "import hydra", "may not import hydra"),
        ("colotrain.planner.time", "from colotrain.planner.traced import survey", "may not import"),
        ("colotrain.launch.elastic", "import torch.distributed", "in functions only"),
        ("colotrain.cli.main", "if True:\n  from omegaconf import OmegaConf", "in functions only"),
        ("colotrain.cli.main", "class C:\n  import torch", "in functions only"),
    ],
)
def test_a_breach_is_found(module: str, text: str, breach: str) -> None:
    assert [line for line in breaches(module, text) if breach in line]


def test_an_import_that_is_deferred_is_not_a_breach() -> None:
    text = "if TYPE_CHECKING:\n  import torch\ndef f():\n  import torch"
    assert [item.inside for item in imports(ast.parse(text), module="m")] == [True, True]


def test_no_modules_import_one_another() -> None:
    """Wherever in a module the import stands, also in functions and for type checkers."""
    graph = {
        module: {item.name for item in imports(ast.parse(path.read_text("utf-8")), module=module)}
        for module, path in MODULES.items()
    }
    assert circle(graph) == []


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle; empty where there is none."""
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}}) in (
        [*order, order[0]] for order in (["a", "c", "b"], ["b", "a", "c"], ["c", "b", "a"])
    )


def test_a_module_that_is_named_in_a_string_exists() -> None:
    """Processes are started, and stacks are read, by the names of modules."""
    missing = [
        f"{module} line {node.lineno}: {node.value}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"colotrain\.\w+(\.\w+)+(:\w+)?", node.value)
        if node.value.partition(":")[0] not in MODULES
    ]
    assert missing == []


@functools.cache
def top_names(path: Path) -> set[str]:
    """What a module may be asked for: what it defines or imports, but in functions and classes."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found, todo = set[str](), [*ast.parse(path.read_text("utf-8")).body]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, inner):
            found.add(node.name)
            continue
        todo += ast.iter_child_nodes(node)
    return found


def test_scripts_and_benchmarks_import_what_exists() -> None:
    """They run seldom, and some on machines that tests have none of."""
    files = [f for folder in ("scripts", "benchmarks") for f in (ROOT / folder).rglob("*.py")]
    missing = [
        f"{path.relative_to(ROOT)} line {node.lineno}: {node.module} has no {alias.name}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "") in MODULES
        for alias in node.names
        if alias.name not in top_names(MODULES[node.module or ""])
        and f"{node.module}.{alias.name}" not in MODULES
    ]
    assert len(files) > 20
    assert missing == []


def loaded_after(code: str, *wanted: str) -> set[str]:
    """Which of the packages `wanted` a fresh interpreter has loaded after running `code`."""
    report = f"\nimport sys\nprint('loaded:', *{set(wanted)} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_loads_no_heavy_package() -> None:
    pytest.importorskip("colotrain.cli.main")
    code = """
import sys
from colotrain.cli.main import main
sys.argv = ["colotrain", "--help"]
assert main() == 0
"""
    assert loaded_after(code, "torch", "hydra", "omegaconf", "numpy") == set()


WITHOUT_TORCH = ("config", "data.prepare", "launch", "planner", "schedulers", "events", "spec")


def test_resolving_and_launching_load_no_torch() -> None:
    """Nor does any module of theirs by itself: one after the other, up to the first that does."""
    names = [m.removesuffix(".__init__") for m in MODULES if room_of(m) in WITHOUT_TORCH]
    code = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    assert loaded_after(code, "torch") == set()


@pytest.mark.parametrize("module", ["colotrain.engine.worker", "colotrain.verify.worker"])
def test_a_worker_loads_no_hydra_and_no_face(module: str) -> None:
    assert loaded_after(f"import {module}", "hydra", "omegaconf", "typer", "rich") == set()
