"""Who may import whom: every module of colotrain belongs to a room, and each room has its rule."""

from __future__ import annotations

import ast
import fnmatch
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 400  # lines


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


BASE = names(
    "colotrain.errors colotrain.records colotrain.plugins colotrain.plan colotrain.rundir "
    "colotrain.resizing colotrain.trust colotrain.spec "
    "colotrain.tiers colotrain.packing "
    "colotrain.dotted colotrain.lifeline "
    "colotrain.observe.events colotrain.observe.facts colotrain.observe.gradients "
    "colotrain.observe.difference colotrain.observe.attempt colotrain.observe.fold "
    "colotrain.observe.view colotrain.observe.heartbeats"
)
TENSORS = names("torch numpy safetensors tokenizers psutil")
LAZY_EXTRAS = names("transformers datasets tensorboard wandb pynvml")
PURE_FACE = (
    "colotrain.observe.formats colotrain.observe.charts colotrain.observe.scene "
    "colotrain.observe.panes colotrain.observe.dashboard"
)
FACE = (
    "colotrain.observe.progress colotrain.observe.liveness colotrain.observe.output "
    "colotrain.observe.terminal colotrain.observe.live colotrain.observe.logs"
)
TOKENISING = (
    "colotrain.data.cache colotrain.data.corpora colotrain.data.vocabulary colotrain.data.formats "
    "colotrain.data.records colotrain.data.conversations colotrain.data.pool "
    "colotrain.data.prepared colotrain.data.megatron colotrain.data.megatron_index "
    "colotrain.data.token_files colotrain.data.tokenising colotrain.data.tokens"
)
"""The part of `data` that makes token files: no torch, as other processes load it."""
ON_PAPER = (
    "colotrain.estimate.layout colotrain.estimate.groups colotrain.estimate.tally "
    "colotrain.estimate.heap colotrain.estimate.memory colotrain.estimate.offload "
    "colotrain.estimate.communication colotrain.estimate.hardware colotrain.estimate.rates "
    "colotrain.estimate.time colotrain.estimate.advise colotrain.estimate.learned"
)
"""The planner without torch."""
WORKER = BASE | names(
    "colotrain.models colotrain.data colotrain.observe.probes colotrain.host "
    "colotrain.torch_internals"
)


@dataclass(frozen=True)
class Rule:
    """What the modules of a room may import beside the standard library.

    A name allows everything under it. `inside` is allowed in functions and for type checkers only.
    """

    rooms: str
    anywhere: frozenset[str]
    inside: frozenset[str] = frozenset()


# The first rule that names a module is its rule.
RULES = [
    Rule("colotrain.__init__", BASE, names("colotrain torch")),
    Rule("*.__init__", BASE),
    Rule("colotrain.__main__", names("colotrain.cli.main colotrain.launch.forkserver")),
    Rule("colotrain.host", BASE | names("psutil")),
    Rule("colotrain.spec.*", names("colotrain.spec")),
    Rule(" ".join(sorted(BASE)), BASE),
    Rule("colotrain.config.compose", BASE | names("colotrain.config omegaconf hydra")),
    Rule(
        "colotrain.config.*",
        BASE
        | names(
            "colotrain.config omegaconf psutil colotrain.host colotrain.data.tokens "
            f"colotrain.data.formats {ON_PAPER}"
        ),
    ),
    Rule("colotrain.launch.slurm", BASE | names("colotrain.config.schema_cluster")),
    Rule(
        "colotrain.migrate.*",
        BASE | names("colotrain.migrate"),
        names("yaml colotrain.config.checks"),
    ),
    Rule(
        "colotrain.launch.*",
        BASE
        | names("colotrain.launch colotrain.observe.progress colotrain.observe.dashboard")
        | names("colotrain.observe.trackers colotrain.observe.formats colotrain.data.tokens")
        | names("colotrain.host psutil"),
        names("torch"),
    ),
    Rule(
        TOKENISING,
        BASE | names(TOKENISING) | names("numpy"),
        names("tokenizers pyarrow jinja2"),
    ),
    Rule(
        "colotrain.estimate.rates colotrain.estimate.learned",
        BASE | names(f"{ON_PAPER} colotrain.data.cache"),
    ),
    Rule(ON_PAPER, BASE | names(ON_PAPER)),
    Rule("colotrain.estimate.dependencies", names("colotrain.dotted")),
    Rule(
        "colotrain.estimate.cache",
        BASE | names("colotrain.data.cache colotrain.estimate.dependencies"),
    ),
    Rule("colotrain.torch_internals", names("colotrain.errors torch")),
    Rule(
        "colotrain.models.*",
        BASE | TENSORS | names("colotrain.models colotrain.torch_internals"),
        LAZY_EXTRAS,
    ),
    Rule("colotrain.data.*", BASE | TENSORS | names("colotrain.data"), LAZY_EXTRAS),
    Rule("colotrain.observe.probes", BASE | TENSORS, LAZY_EXTRAS),
    Rule("colotrain.observe.plots", BASE | names("colotrain.observe.formats"), names("matplotlib")),
    Rule("colotrain.observe.trackers", BASE, LAZY_EXTRAS | names("torch")),
    Rule(PURE_FACE, BASE | names(PURE_FACE) | {"rich"}),
    Rule("colotrain.observe.*", BASE | names(PURE_FACE) | names(FACE) | {"rich"}),
    Rule("colotrain.engine.*", WORKER | TENSORS | names("xxhash colotrain.engine")),
    Rule("colotrain.estimate.*", WORKER | TENSORS | names("colotrain.engine colotrain.estimate")),
    Rule(
        "colotrain.export.*",
        WORKER | TENSORS | names("colotrain.engine colotrain.export"),
        LAZY_EXTRAS,
    ),
    Rule("colotrain.doctor.exchange", BASE | names("colotrain.doctor"), names("colotrain torch")),
    Rule(
        "colotrain.doctor.*",
        BASE | names("colotrain.doctor colotrain.host psutil"),
        names("torch"),
    ),
    Rule("colotrain.verify.runner", WORKER | TENSORS | names("colotrain.launch colotrain.verify")),
    Rule("colotrain.verify.*", WORKER | TENSORS | names("colotrain.engine colotrain.verify")),
    Rule(
        "colotrain.cli.*",
        names("colotrain typer click rich psutil"),
        names("torch numpy omegaconf hydra"),
    ),
]


@dataclass(frozen=True)
class Import:
    name: str
    line: int
    inside: bool
    """In a function or under TYPE_CHECKING: does not happen when the module is loaded."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "colotrain").rglob("*.py"))}


def rule_of(module: str) -> Rule | None:
    for rule in RULES:
        if any(fnmatch.fnmatchcase(module, room) for room in rule.rooms.split()):
            return rule
    return None


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


def is_allowed(name: str, allowed: frozenset[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def breaches(module: str, text: str, rule: Rule) -> list[str]:
    """What `text`, the source of `module`, imports against the rule of its room."""
    found = []
    for item in imports(ast.parse(text), module=module):
        if item.name.partition(".")[0] in sys.stdlib_module_names or item.name == "colotrain":
            continue
        if is_allowed(item.name, rule.anywhere):
            continue
        if not is_allowed(item.name, rule.inside):
            found.append(f"line {item.line}: {module} may not import {item.name}")
        elif not item.inside:
            found.append(f"line {item.line}: {module} may import {item.name} in functions only")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_its_room_may(module: str) -> None:
    rule = rule_of(module)
    assert rule is not None, f"{module} is in no room: give it one in RULES"
    assert breaches(module, MODULES[module].read_text("utf-8"), rule) == []


@pytest.mark.parametrize(
    ("module", "text", "breach"),
    [
        ("colotrain.plan", "import numpy", "may not import numpy"),
        ("colotrain.engine.loop", "from ..config import schema", "may not import colotrain.config"),
        ("colotrain.engine.loop", "def f():\n import rich.table", "may not import rich.table"),
        ("colotrain.config.resolve", "import hydra", "may not import hydra"),
        ("colotrain.launch.elastic", "import torch.distributed", "in functions only"),
        ("colotrain.cli.run", "if True:\n  from omegaconf import OmegaConf", "in functions only"),
        ("colotrain.cli.run", "class C:\n  import torch", "in functions only"),
    ],
)
def test_a_breach_is_found(module: str, text: str, breach: str) -> None:
    rule = rule_of(module)
    assert rule is not None
    assert [line for line in breaches(module, text, rule) if breach in line]


def test_an_import_that_is_deferred_is_not_a_breach() -> None:
    text = "if TYPE_CHECKING:\n  import torch\ndef f():\n  import torch"
    assert [item.inside for item in imports(ast.parse(text), module="m")] == [True, True]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_can_be_read_in_one_sitting(module: str) -> None:
    lines = len(MODULES[module].read_text("utf-8").splitlines())
    assert lines <= LONGEST, f"{module} has {lines} lines, more than {LONGEST}: split it by subject"


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
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
    assert loaded_after(code, "torch", "hydra", "omegaconf", "numpy") == set()


WITHOUT_TORCH = [
    *(m for m in MODULES if m.startswith(("colotrain.config.", "colotrain.launch."))),
    *TOKENISING.split(),
    *ON_PAPER.split(),
]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_resolving_and_launching_load_no_torch(module: str) -> None:
    assert loaded_after(f"import {module.removesuffix('.__init__')}", "torch") == set()


@pytest.mark.parametrize("module", ["colotrain.engine.worker", "colotrain.verify.worker"])
def test_a_worker_loads_no_hydra_and_no_face(module: str) -> None:
    assert loaded_after(f"import {module}", "hydra", "omegaconf", "typer", "rich") == set()
