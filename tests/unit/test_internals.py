"""Other libraries' private names stand in one module per library, which checks that they exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from colotrain.engine.sharding import fsdp_internals
from colotrain.errors import ColotrainError
from colotrain.spec.installed_torch import torch_packs_modules

ROOT = Path(__file__).parents[2]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def own_names(trees: list[ast.Module]) -> set[str]:
    """The private names that colotrain defines."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private names that are imported, read or set, or asked for in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
        else:
            continue
        yield from (name for name in names if isinstance(name, str) and is_private(name))


DOORS = {
    "colotrain/engine/sharding/fsdp_internals.py": "torch's fully_shard",
    "colotrain/callers_script.py": "multiprocessing's import of a script",
    "colotrain/module_tree.py": "what torch's modules hold",
    "colotrain/torch_internals.py": "torch otherwise",
    "colotrain/config/compose.py": "hydra, of which it is the only importer",
    "colotrain/config/values.py": "omegaconf",
    "colotrain/models/huggingface.py": "transformers",
    "colotrain/models/huggingface_internals.py": "transformers' functions that are replaced",
    "colotrain/launch/agent.py": "torch's elastic agent",
    "colotrain/launch/worker_exits.py": "torch's elastic agent",
    "colotrain/launch/server/compiler.py": "torch's compiler",
}
PUBLIC = {"_exit", "_getframe", "_Environ", "_concrete_contexts", "_reset_parameters"}
PUBLIC |= {"_forkserver", "_forkserver_pid", "_inheriting", "_args_from_interpreter_flags"}
PUBLIC |= {"_parameters", "_saved_other", "_saved_self"}
"""Python's own, what torch's modules and users' define, which `torch_internals` asserts, and what
torch's notes on autograd say of a node's saved tensors."""


def test_private_names_of_other_libraries_are_in_one_door_each() -> None:
    files = sorted((ROOT / "colotrain").rglob("*.py"))
    trees = {str(file.relative_to(ROOT)): ast.parse(file.read_text("utf-8")) for file in files}
    own = own_names(list(trees.values())) | PUBLIC
    foreign = {
        file: sorted(
            {
                name
                for name in private_names(tree)
                if name not in own and not name.startswith(("_colotrain", "_scaled_dot_product"))
            }
        )
        for file, tree in trees.items()
    }
    assert [file for file in DOORS if not foreign[file]] == []
    assert {f: names for f, names in foreign.items() if names and f not in DOORS} == {}


@pytest.mark.parametrize(
    "text",
    [
        "param._unsharded_param",
        "getattr(param, '_unsharded_param', None)",
        "from torch.utils._pytree import tree_leaves",
        "from torch.utils import _pytree",
    ],
)
def test_a_private_name_is_found(text: str) -> None:
    assert set(private_names(ast.parse(text))) & {"_unsharded_param", "_pytree"}


def test_a_name_that_torch_lacks_is_told_with_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = fsdp_internals.FSDPParamGroup
    monkeypatch.setitem(fsdp_internals.RELIED_ON, group, "fsdp_params renamed_since")
    with pytest.raises(ColotrainError, match=r"2\.11 to 2\.13 .*no FSDPParamGroup\.renamed_since"):
        fsdp_internals.check_names()


def test_what_torch_packs_is_known_from_its_version() -> None:
    assert torch_packs_modules() == fsdp_internals.HAS_SEVERAL_MODULES
