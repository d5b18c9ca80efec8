"""The Python API: a script keeps its state, and plans and runs are of what it is now."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import colotrain
from colotrain.runs import start

SCRIPT = """
import random
import sys
import colotrain

random.seed(3)
assert "rich" not in sys.modules
colotrain.resolve(["recipe=llm-tiny"])
assert "rich" in sys.modules
print(random.random())
"""


def test_the_first_plan_of_a_script_draws_none_of_its_random_numbers(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == random.Random(3).random()


def test_a_run_s_environment_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED_BY_A_RUN", "mine")
    monkeypatch.delenv("SET_BY_A_RUN", raising=False)
    before = dict(os.environ)

    def run_quietly(overrides: list[str], **options: Any) -> dict[str, Any]:
        os.environ |= {"CHANGED_BY_A_RUN": "its", "SET_BY_A_RUN": "its"}
        del os.environ["PATH"]
        random.random()
        raise ValueError(*overrides)

    monkeypatch.setattr(start, "run_quietly", run_quietly)
    random.seed(3)
    with pytest.raises(ValueError, match="recipe=mine"):
        colotrain.run(["recipe=mine"])
    assert dict(os.environ) == before
    assert random.random() == random.Random(3).random()


MODEL = """
import os
import torch

class Model(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (self.weight * x).square().mean() * float(os.environ.get("SCALE", "1"))

def samples():
    return [{"x": torch.ones(1) * n} for n in range(8)]
"""
OF_MODEL = ["model.target=mine:Model", "data.target=mine:samples", "train.global_batch=4"]
WITHOUT_GUARD = """
import os, sys
import colotrain

print("script")
settings = sys.argv[1:]
print(colotrain.resolve(settings).parameters.trainable)
with open("mine.py") as file:
    text = file.read()
with open("mine.py", "w") as file:
    file.write(text.replace("width=4", "width=600"))
print(colotrain.resolve(settings).parameters.trainable)
print("mine" in sys.modules, "torch" in sys.modules)
"""
CHANGED = """
import os, sys
import colotrain

def first_loss(name, folder):
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    return colotrain.run([*sys.argv[1:], f"name={name}"])["loss"]["history"][0][1]

if __name__ == "__main__":
    here = os.getcwd()
    plain = first_loss("a", here)
    os.environ["SCALE"] = "3"
    scaled = first_loss("b", f"{here}/elsewhere")
    del os.environ["SCALE"]
    again = first_loss("c", here)
    print(round(scaled / plain, 4), again == plain)
"""
OF_ITSELF = f"""{MODEL}
import colotrain

if __name__ == "__main__":
    settings = ["model.target=__main__:Model", "data.target=__main__:samples"]
    settings += ["train.global_batch=4", "train.max_steps=1"]
    print(colotrain.resolve(settings).parameters.trainable)
    print(colotrain.run(settings)["status"])
"""


RUN = """
import sys
import colotrain

print(colotrain.run([*sys.argv[1:], "train.max_steps=1", "cluster.procs_per_node=2"])["status"])
"""
TWICE = "processes of a run import this file, which calls colotrain.run again"


def script(text: str, folder: Path, *arguments: str) -> list[str]:
    """The lines that a script of the user's prints, beside the module `mine`."""
    done = process(text, folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def process(
    text: str, folder: Path, *arguments: str, model: str = MODEL
) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(model)
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{folder}"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_plan_is_of_the_model_as_it_stands_in_its_file_and_needs_no_guard(tmp_path: Path) -> None:
    lines = script(WITHOUT_GUARD, tmp_path, *OF_MODEL)
    assert lines == ["script", "4", "600", "False False"]


def test_ranks_have_the_environment_and_folder_of_the_run_that_they_are_of(tmp_path: Path) -> None:
    assert script(CHANGED, tmp_path, *OF_MODEL, "train.max_steps=1") == ["3.0 True"]


def test_a_model_may_be_the_script_s_own(tmp_path: Path) -> None:
    assert script(OF_ITSELF, tmp_path) == ["4", "finished"]


def test_a_run_of_other_modules_needs_no_guard(tmp_path: Path) -> None:
    assert script(f"print('script'){RUN}", tmp_path, *OF_MODEL) == ["script", "finished"]


@pytest.mark.parametrize("module", ["__main__", "script"])
def test_a_script_that_its_run_imports_is_told_of_the_missing_guard(
    module: str, tmp_path: Path
) -> None:
    settings = [text.replace("mine:", f"{module}:") for text in OF_MODEL]
    done = process(f"{MODEL}{RUN}", tmp_path, *settings)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert TWICE in last
    assert 'put the call under `if __name__ == "__main__":`' in last
    assert not (tmp_path / "runs").exists()


def test_semaphores_that_ranks_leave_are_removed_in_silence(tmp_path: Path) -> None:
    lock = "import multiprocessing\nLOCK = multiprocessing.get_context('forkserver').Lock()\n"
    done = process(RUN, tmp_path, *OF_MODEL, model=f"{lock}{MODEL}")
    assert (done.returncode, done.stdout) == (0, "finished\n")
    assert done.stderr == ""
