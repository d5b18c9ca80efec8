"""A wheel, installed outside the checkout, is all that a run needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def call(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, without this session's Python settings."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=plain,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    options = ["--wheel", "--no-isolation", "--outdir", folder]
    call(sys.executable, "-m", "build", *options, ROOT, cwd=folder)
    (built,) = folder.glob("colotrain-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment that holds the wheel and borrows its dependencies.

    A path file lends it this environment's packages: they come after its own, and their own path
    files (the editable checkout is one) are not read.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    call(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_the_wheel_holds_every_module_group_and_recipe(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    modules = [path.relative_to(ROOT) for path in (ROOT / "colotrain").rglob("*.py")]
    shipped = [
        "colotrain/_shipped" / path.relative_to(ROOT)
        for folder in ("conf", "recipes")
        for path in (ROOT / folder).rglob("*.yaml")
    ]
    assert shipped
    assert {str(path) for path in (*modules, *shipped)} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "benchmarks/", "runs/"))]


def test_the_installed_code_is_the_wheels(environment: Path, empty: Path) -> None:
    code = "import colotrain.spec.plan as m; print(m.__file__)"
    found = Path(call(environment / "python", "-c", code, cwd=empty).strip())
    assert found.is_relative_to(environment.parent)
    assert not found.is_relative_to(ROOT)


def test_a_plan_from_an_empty_folder(environment: Path, empty: Path) -> None:
    plan = json.loads(
        call(environment / "colotrain", "plan", "recipe=llm-tiny", "--json", cwd=empty)
    )
    assert plan["batch"]["owner"] == "colotrain"
    assert plan["parameters"]["total"] > 0


def finished_run(environment: Path, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """The summary of a run started in `folder`."""
    call(environment / "colotrain", "run", *overrides, cwd=folder)
    (file,) = folder.glob("runs/*/summary.json")
    summary: dict[str, Any] = json.loads(file.read_text("utf-8"))
    assert summary["status"] == "finished"
    return summary


@pytest.mark.slow
def test_a_run_from_an_empty_folder(environment: Path, empty: Path) -> None:
    short = ["recipe=llm-tiny", "train.max_steps=2", "cluster.procs_per_node=2"]
    assert finished_run(environment, empty, short)["optimizer_steps"] == 2


@pytest.mark.slow
def test_the_readmes_own_model_trains(environment: Path, empty: Path) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    files = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    files = [(name, text) for name, text in files if "mine" in name]
    assert [name for name, _ in files] == ["mine.py", "recipes/mine.yaml"]
    for name, text in files:
        (empty / name).parent.mkdir(exist_ok=True)
        (empty / name).write_text(text, "utf-8")
    short = ["recipe=mine", "plugin=zero2", "train.max_steps=2", "cluster.procs_per_node=2"]
    assert finished_run(environment, empty, short)["optimizer_steps"] == 2
