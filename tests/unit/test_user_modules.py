"""The user's code imports from the current folder, also in processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = """
import importlib, importlib.util
try:
    import optional
except ImportError:
    optional = None
def has(name): return importlib.util.find_spec(name) is not None
def load(name): return importlib.import_module(name)
"""
MINE = """
import multiprocessing, pickle, concurrent.futures
import helper, library
def lazy():
    import later
    return later.VALUE
def seen():
    try:
        library.load("optional")
    except ImportError:
        return [library.optional, library.has("optional"), helper.VALUE, lazy()]
def thing(x):
    import things
    return things.Thing()
def build(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        alike = pool.map(thing, [1]), pool.apply(seen)  # `things` is unknown here until then
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        again = pool.submit(seen).result()
    [thing_of_child], first = alike
    unpickled = pickle.loads(b"clast\\nVALUE\\n.")
    return [seen(), first, again, type(thing_of_child).__module__, unpickled]
"""
OF_TORCH = """
import sys, torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index):
        import later
        return {"x": later.VALUE + index}
def build(path):
    import things
    torch.save(things.Thing(), path)
    del sys.modules["things"]
    rows = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn")
    loaded = torch.load(path, weights_only=False)
    return [int(row["x"]) for row in rows], type(loaded).__module__
"""
START = """
import sys
from colotrain.dotted import import_target
if __name__ == "__main__":
    print(import_target("model.target", "mine:build")(sys.argv[1]))
"""


def start(folder: Path, mine: str, argument: str) -> str:
    """What `mine.build` returns in a command that was started in `folder`."""
    files = {"helper": "VALUE = 7", "later": "VALUE = 8", "last": "VALUE = 9", "mine": mine}
    files |= {"things": "class Thing: ...", "optional": "raise AssertionError('imported')"}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    installed = folder.parent / "site-packages"
    installed.mkdir()
    (installed / "library.py").write_text(LIBRARY)
    (installed / "start.py").write_text(START)
    path = os.pathsep.join([str(installed), str(Path(__file__).parents[2])])
    command = [sys.executable, "-P", str(installed / "start.py"), argument]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_the_users_code_alone_finds_modules_in_the_current_folder(
    folder: Path, method: str
) -> None:
    seen = [None, False, 7, 8]
    assert start(folder, MINE, method) == str([seen, seen, seen, "things", 9])


def test_torch_finds_what_the_users_code_and_files_name(folder: Path) -> None:
    assert start(folder, OF_TORCH, "data.pt") == "([8, 9], 'things')"


VALUES = """
import torch
from torch import nn
MEAN = torch.tensor([1.0, 2.0])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(MEAN.clone())
"""


def test_what_a_module_makes_when_it_is_imported_keeps_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colotrain.models.loading import build_on_meta, build_whole
    from colotrain.spec.plan import ModelPlan

    (tmp_path / "with_values.py").write_text(VALUES)
    monkeypatch.syspath_prepend(tmp_path)
    plan = ModelPlan(target="with_values:Net")
    on_meta = build_on_meta(plan)
    assert on_meta is None or next(on_meta.parameters()).is_meta
    assert next(build_whole(plan, seed=0).parameters()).tolist() == [1.0, 2.0]
