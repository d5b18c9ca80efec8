"""Looking at the user's model in a process forked from the server, and keeping what was seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from colotrain.cli.main import guarded
from colotrain.errors import ConfigError, Problem
from colotrain.planner import cache
from colotrain.planner.dependencies import Dependencies, record_dependencies
from colotrain.records import from_plain, to_plain
from colotrain.runs.resolving import resolve_config
from colotrain.spec.plan import AdapterPlan, ModelPlan

LOOKER = """
import json, multiprocessing, os, sys
from colotrain.errors import ColotrainError, ConfigError
from colotrain.launch.server.forked_calls import ForkedCaller, NotForked

def attempt(look, *words):
    try:
        return look(*words)
    except ConfigError as error:
        return [type(error).__name__, error.lines()]
    except ColotrainError as error:
        return [type(error).__name__, error.problem]
    except RuntimeError as error:
        return ["RuntimeError", str(error).splitlines()[-1]]

multiprocessing.set_forkserver_preload([])  # nothing: its own start is quick
os.environ["CHANGED"] = "by the launcher"
waited = []
with ForkedCaller(meanwhile=lambda: waited.append(1)) as look:
    first, second = look("mine:about"), look("mine:about")
    found = [first, second, attempt(look, "mine:refuse"), attempt(look, "mine:broken")]
    found += [attempt(look, "mine:die", 9), attempt(look, "mine:about")]
alone = look("mine:about")
assert look("mine:pool") == [1, 2, 3]
print(json.dumps({"found": found, "alone": alone, "waited": len(waited), "own": os.getpid()}))
"""

MINE = """
import multiprocessing, os, signal, sys
from colotrain.cli.main import guarded
from colotrain.errors import ConfigError, Problem

calls = []

def about():
    calls.append(1)
    print("printed by the user")
    os.system("echo printed by a program")
    return [os.getpid(), len(calls), os.getcwd(), os.environ["CHANGED"]]

def pool():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-1, -2, -3])

def refuse():
    raise ConfigError([Problem(key="model.target", expected="another", value="mine", fix="fix it")])

def broken():
    raise KeyError("lost")

def die(number):
    os.kill(os.getpid(), number)
"""


def test_functions_are_called_in_one_process_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "look.py").write_text(f"if __name__ == '__main__':\n  exec({LOOKER!r})\n")
    done = subprocess.run(
        [sys.executable, "look.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)  # nothing else is on stdout
    first, second, refused, broken, died, again = said["found"]
    assert first == [second[0], 1, str(tmp_path), "by the launcher"]
    assert second[1] == 2
    assert refused == ["ConfigError", ["error: model.target=mine: expected another; fix it"]]
    assert broken == ["RuntimeError", "KeyError: 'lost'"]
    assert died[0] == "ColotrainError"
    assert "was killed by SIGKILL" in died[1]
    assert again[1] == 1
    assert said["alone"][1] == 1
    assert len({said["own"], first[0], again[0], said["alone"][0]}) == 4
    assert said["waited"] == 1
    assert done.stderr.count("printed by the user") == 4
    assert done.stderr.count("printed by a program") == 4
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (first[0], again[0]))


def test_a_configuration_error_stays_itself_between_processes() -> None:
    import pickle

    error = ConfigError([Problem(key="a.b", expected="1", value=2, fix="do")])
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


# What a look depends on

PROJECT = {
    "package/__init__.py": "",
    "package/model.py": "import os\nfrom package import sizes\n\n"
    "def build():\n"
    "    text = open('size.json').read()\n"
    "    names = os.listdir('shards')\n"
    "    try:\n        open('optional')\n    except OSError:\n        pass\n"
    "    open('log', 'a').write('x')\n"
    "    return [sizes.SIZE, text, len(names), os.environ.get('LAYERS', '2')]\n",
    "package/sizes.py": "SIZE = 1\n",
    "package/unused.py": "",
    "size.json": "3",
    "shards/one": "",
}
LOOK = (
    "import json\n"
    "from colotrain.planner.dependencies import record_dependencies\n"
    "from colotrain.records import to_plain\n"
    "print(json.dumps(to_plain(record_dependencies('package.model:build'))))\n"
)


def look(folder: Path) -> tuple[list[object], Dependencies]:
    """As the forked process does, in `folder`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.fspath(folder), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    result, dependencies = json.loads(done.stdout)
    return result, from_plain(Dependencies, dependencies)


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dependencies]:
    folder = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    result, dependencies = look(folder)
    assert result == [1, "3", 1, "2"]
    return folder, dependencies


def test_what_a_look_depended_on_is_known(looked: tuple[Path, Dependencies]) -> None:
    folder, found = looked
    modules = {"package": "package/__init__.py"}
    modules |= {f"package.{name}": f"package/{name}.py" for name in ("model", "sizes")}
    assert found.modules == {name: str(folder / file) for name, file in modules.items()}
    assert set(found.files) == {
        str(folder / name) for name in (*modules.values(), "size.json", "optional")
    }
    assert set(found.folders) == {str(folder / "shards")}
    assert set(found.variables) == {"LAYERS"}


@pytest.mark.parametrize(
    ("changed", "text", "stays"),
    [
        ("package/sizes.py", "SIZE = 2\n", False),
        ("package/sizes.py", PROJECT["package/sizes.py"], True),  # touched, and no other content
        ("size.json", "30", False),
        ("optional", "", False),
        ("shards/two", "", False),
        ("package/sizes/__init__.py", "SIZE = 5\n", False),  # is found before package/sizes.py
        ("package/unused.py", "SIZE = 7\n", True),
        ("log", "", True),
        ("runs/one/plan.json", "", True),
        ("LAYERS", "9", False),
    ],
)
def test_a_look_is_used_again_until_something_of_that_changes(
    looked: tuple[Path, Dependencies],
    changed: str,
    text: str,
    stays: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, found = looked
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    assert found.are_unchanged()
    file, before = folder / changed, PROJECT.get(changed)
    if changed == "LAYERS":
        monkeypatch.setenv("LAYERS", text)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    try:
        assert found.are_unchanged() == stays
    finally:
        if changed != "LAYERS":
            times = found.files.get(str(file), "").split()
            file.unlink() if before is None else file.write_text(before)
            if before is not None and len(times) == 2:
                os.utime(file, ns=(int(times[1]), int(times[1])))
            if changed.startswith("package/sizes/"):
                file.parent.rmdir()


def test_what_was_loaded_before_is_not_kept() -> None:
    """Of a module that is loaded already, the file may have changed since."""
    import tests.running  # noqa: F401

    result, dependencies = record_dependencies("os:getcwd")
    assert (result, dependencies) == (os.getcwd(), None)


def test_the_key_holds_all_of_this_package_that_a_look_runs() -> None:
    code = (
        "import sys\n"
        f"import {cache.SURVEY_MODULE}\n"
        "print(*[name for name in sys.modules if name.startswith('colotrain.')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    loaded = {name for name in done.stdout.split() if cache._source(name)}
    assert {"colotrain.engine.model.freezing", "colotrain.models.loading"} <= loaded
    assert loaded <= set(cache.sources(cache.SURVEY_MODULE))


def test_a_kept_look_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path))
    model = ModelPlan(target="mine:build", args={"size": 3}, hf=None, adapter=None)
    file = tmp_path / "read"
    file.write_text("1")
    looks = 0

    def see() -> tuple[Problem, Dependencies]:
        nonlocal looks
        looks += 1
        marks = {str(file): f"{file.stat().st_size} {file.stat().st_mtime_ns}"}
        return Problem(key="found", expected=file.read_text()), Dependencies(files=marks)

    for text, num_looks in (("1", 1), ("1", 1), ("22", 2), ("22", 2)):
        if file.read_text() != text:
            file.write_text(text)
        assert cache.cached(Problem, model, (), see).expected == text
        assert looks == num_looks
    other = ModelPlan(**{**to_plain(model), "args": {"size": 4}})
    cache.cached(Problem, other, (), see)
    assert looks == 3
    cache.cached(Problem, model, (), lambda: (Problem(key="", expected=""), None))
    assert looks == 3


def test_a_trial_of_a_model_of_colotrain_s_is_that_of_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    shipped = ModelPlan(target="colotrain.models.llm:LLM", args={"d_model": 32})
    adapted = replace(shipped, adapter=AdapterPlan(rank=1, alpha=1.0, targets=("*",), path="mine"))
    for model, is_shipped in (
        (shipped, True),
        (adapted, False),
        (replace(shipped, target="", hf="x"), False),
    ):
        assert model.is_shipped is is_shipped
    trials = list[str]()

    def see(dependencies: Dependencies | None) -> tuple[Problem, Dependencies | None]:
        trials.append(os.getcwd())
        return Problem(key="found", expected="1"), dependencies

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        of_none = partial(see, None)  # modules of the user's, loaded before, do not matter
        cache.cached(Problem, shipped, (), of_none, runs_users_code=False)
        assert len(trials) == 1
    for name, expected in (("one", 2), ("two", 3), ("one", 3)):
        monkeypatch.chdir(tmp_path / name)
        cache.cached(Problem, adapted, (), partial(see, Dependencies()))
        assert len(trials) == expected


class Faulty:
    """A dataset, as users write them, whose second sample has a bug."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": {0: 1}[index]}


def test_a_bug_in_the_users_dataset_is_told_with_its_line() -> None:
    from colotrain.data.read.loader import read_sample

    line = Path(__file__).read_text().partition('{"x": {0: 1}[index]}')[0].count("\n") + 1
    assert read_sample(Faulty(), 0) == {"x": 1}
    with pytest.raises(ConfigError, match=rf"sample 1 raised KeyError: 1 \(.*:{line}\)"):
        read_sample(Faulty(), 1)


LOOKING_AT_VALUES = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(3, 1)

    def forward(self, x):
        if self.how == "item":
            x = x * x.sum().item()
        if self.how == "branch":
            x = x if x.sum() > 0 else -x
        if self.how == "shape":
            x = x[x.mean(1) > 0]
        return self.line(x).mean()


def rows():
    return [{"x": torch.ones(3)} for _ in range(8)]
"""


def test_a_measured_peak_is_of_one_plan_also_where_no_forward_can_be_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    Path("values_peaks.py").write_text(LOOKING_AT_VALUES)
    plan = ["model.target=values_peaks:Model", "model.args.how=item", "plugin=zero1"]
    plan += ["cluster.procs_per_node=1", "data.target=values_peaks:rows", "train.max_steps=8"]

    def shape(*changed: str) -> str:
        return resolve_config([*plan, "train.global_batch=4", *changed]).plan.memory_shape

    memory = (
        *("train.activation_checkpointing=full", "train.compile=true", "train.precision=bf16"),
        *("train.micro_batch=2", "plugin=zero3", "data.seq_len=7", "model.args.how=branch"),
        *("optim.name=sgd", "observe.grads_every=1"),
    )
    shapes = [shape(), *(shape(change) for change in memory)]
    assert len(set(shapes)) == len(shapes)
    assert shape("train.max_steps=6", "train.seed=3") == shapes[0]
    traced = resolve_config([*plan, "train.global_batch=4", "model.args.how=all"]).plan.time
    assert traced.step_s > 0 == traced.mfu  # samples are counted, no tokens


@pytest.mark.parametrize(("how", "line"), [("item", 13), ("branch", 15), ("shape", 17)])
def test_a_plan_names_the_line_of_a_forward_that_looks_at_values(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
    line: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    name = f"values_{how}"  # a module of its own: modules stay loaded
    Path(f"{name}.py").write_text(LOOKING_AT_VALUES)
    plan = ["plan", f"model.target={name}:Model", f"model.args.how={how}", "cluster=local"]
    plan += [f"data.target={name}:rows", "train.global_batch=4", "train.max_steps=2", "--json"]
    for _ in range(2):  # the second is kept from the first
        assert guarded(plan) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        (told,) = [w for w in warnings if w.startswith("activations and time are not estimated")]
        assert f"without values: {name}.py:{line} raised " in told
        assert "\n" not in told


def test_a_plan_counts_samples_of_the_user_s_own_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("values_none.py").write_text(LOOKING_AT_VALUES)
    plan = ["plan", "model.target=values_none:Model", "model.args.how=none", "cluster=local"]
    plan += ["data.target=values_none:rows", "train.global_batch=4", "train.max_steps=2"]
    compared = [*plan, "--compare", "plugin=zero1", "plugin=zero3"]
    for words in (plan, [*plan, "--advise"], compared):
        assert guarded(words) == 0
        shown = capsys.readouterr().out
        assert "samples/s" in shown
        assert "token" not in shown
