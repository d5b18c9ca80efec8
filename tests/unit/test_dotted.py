"""Dotted paths find the user's code, and say what is wrong when they do not."""

from __future__ import annotations

import os.path
import random
import subprocess
import sys
from pathlib import Path

import pytest

from colotrain.dotted import import_target
from colotrain.errors import ConfigError
from colotrain.runs.resolving import resolve_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


def module(folder: Path, text: str, *, below: str = "") -> str:
    name = f"mine_{random.getrandbits(64):x}"
    (folder / below / f"{name}.py").write_text(text)
    return name


def test_a_path_names_a_callable_of_an_installed_module() -> None:
    assert import_target("model.target", "os.path:join") is os.path.join
    assert import_target("model.target", "pathlib:Path.cwd")() == Path.cwd()


def test_modules_are_found_in_the_current_folder_even_when_new(folder: Path) -> None:
    (folder / "package").mkdir()
    for below in ("", "package"):
        name = module(folder, "def build():\n    return 'built'\n", below=below)
        dotted = f"{below}.{name}:build".removeprefix(".")
        assert import_target("model.target", dotted)() == "built"


def test_files_of_the_current_folder_take_no_module_s_place(folder: Path) -> None:
    for name in ("colorsys", "pygments"):  # Python's own, and an installed one
        (folder / f"{name}.py").write_text("raise AssertionError('from the current folder')\n")
        for known in [n for n in sys.modules if n.partition(".")[0] == name]:
            del sys.modules[known]
    name = module(folder, "import colorsys, pygments.token\ndef build(): return pygments.token\n")
    assert import_target("model.target", f"{name}:build")() is sys.modules["pygments.token"]
    assert import_target("model.target", "colorsys:rgb_to_hls")


def test_a_module_that_a_setting_names_is_the_current_folder_s(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder / "installed"
    other.mkdir()
    name = module(other, "def build():\n    return 'installed'\n")
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("from . import inner\n")
    (folder / name / "inner.py").write_text("def build():\n    return 'mine'\n")
    monkeypatch.syspath_prepend(str(other))
    assert import_target("model.target", f"{name}.inner:build")() == "mine"
    assert import_target("model.target", f"{name}:inner.build")() == "mine"


@pytest.mark.slow
def test_a_command_runs_no_module_of_the_current_folder(tmp_path: Path) -> None:
    names = {"json", "struct", "multiprocessing", "torch", "numpy", "hydra", "psutil", "pickle"}
    for name in names | {*sys.stdlib_module_names} - {"sys", "builtins"}:
        (tmp_path / f"{name}.py").write_text("open('touched', 'w')\n")
    command = str(Path(sys.executable).with_name("colotrain"))
    words = ["run", "recipe=llm-tiny", "train.max_steps=1", "cluster.procs_per_node=1", "name=one"]
    done = subprocess.run([command, *words], cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("dotted", "told"),
    [
        ("os.path.join", "did you mean os.path:join"),
        ("join", "write the module, a colon"),
        ("os.path:", "package.module:callable"),
        (":join", "package.module:callable"),
        ("", "package.module:callable"),
        ("a/b.py:join", "package.module:callable"),
        ("os.path:joint", "did you mean join"),
        ("os:sep", "a callable, not str"),
        ("no_such_module_here:build", "no_such_module_here cannot"),
        ("os.no_such_part:build", "os.no_such_part cannot"),
    ],
)
def test_a_wrong_path_names_key_value_expected_and_fix(dotted: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        import_target("model.target", dotted)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("model.target", dotted)
    assert problem.expected
    assert problem.fix


def test_a_module_of_nearly_that_name_is_suggested(folder: Path) -> None:
    (folder / "my_transformer.py").touch()
    with pytest.raises(ConfigError, match="did you mean my_transformer"):
        import_target("model.target", "my_transfomer:build")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_package_at_all", "ModuleNotFoundError: No module named 'no_such_pack"),
        ("1 +", "SyntaxError"),
        ("raise ValueError('my own mistake')", "ValueError: my own mistake"),
    ],
)
def test_a_module_that_does_not_import_says_why(folder: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        import_target("data.target", f"{module(folder, text)}:build")
    assert caught.value.__cause__ is not None


def test_all_names_that_are_wrong_come_at_once() -> None:
    names = {key: f"absent_{key[-3:]}:x" for key in ("optim.name", "train.loss", "train.metrics")}
    names |= {"data.target": "absent:y", "optim.schedule.name": "json:absent"}
    with pytest.raises(ConfigError) as error:
        resolve_config(["recipe=llm-tiny", "data.corpus=null", *map("=".join, names.items())])
    assert {problem.key for problem in error.value.problems} >= names.keys()
