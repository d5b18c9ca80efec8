"""A run directory from elsewhere runs no code that it names, unless the user says so."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from colotrain import signatures
from colotrain.cli.main import guarded
from colotrain.errors import ConfigError, UsageError
from colotrain.export import check, write  # noqa: F401  # before `choose` is replaced
from colotrain.export.receipt import RECEIPT, digests
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.runs import start, trust
from colotrain.runs.resolving import compose, plan_from, resolve_config
from colotrain.runs.trust import write_signed

TARGETS = (
    "model.target=tests.dist.difficult:make",
    "model.args.name=Stack",
    "data.target=tests.dist.difficult:samples",
    "train.global_batch=4",
    "cluster.procs_per_node=1",
)
EVIL = {"target": "os:system", "args": {"command": "touch touched"}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rundir(home: Path) -> RunDir:
    """A run of this user's own."""
    resolved = resolve_config([*TARGETS, "name=mine"])
    rundir = RunDir(home / "runs" / "mine")
    rundir.create()
    write_signed(resolved.plan, rundir, resolved.config)
    return rundir


def test_ones_own_run_is_trusted_wherever_it_is_moved(rundir: RunDir, home: Path) -> None:
    assert signatures.key_file().stat().st_mode & 0o777 == 0o600
    moved = RunDir(shutil.move(rundir.path, home / "runs" / "moved"))
    trust.check(moved, moved.plan(), trusted=False)
    compose([], saved=moved, notices=[])


def test_what_another_user_wrote_is_refused_also_under_runs(
    rundir: RunDir, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "another"))
    for trusted_key in (False, True):  # without a key, and with one of the user's own
        if trusted_key:
            trust.sign(RunDir(home), rundir.plan())
        with pytest.raises(UsageError, match=r"data\.target=tests\.dist\.difficult:samples"):
            trust.check(rundir, rundir.plan(), trusted=False)
        with pytest.raises(UsageError, match="--trust-code"):
            compose([], saved=rundir, notices=[])
    trust.check(rundir, rundir.plan(), trusted=True)
    compose([], saved=rundir, trusted=True, notices=[])
    named = [word for word in TARGETS if "target" in word]
    with pytest.raises(UsageError, match=r"model\.args\.name=Stack"):  # what the call is given, too
        compose(named, saved=rundir, notices=[])
    compose([*named, "model.args.name=Stack"], saved=rundir, notices=[])


@pytest.mark.parametrize(
    "words",
    [
        ["resume", "mine"],
        ["resume", "mine", "train.max_steps=3"],
        ["resume", "mine", "data.target=tests.dist.difficult:samples"],
        ["export", "mine", "--to", "out"],
        ["node", "runs/mine"],
    ],
)
def test_no_verb_runs_what_was_changed_in_a_run_directory(
    rundir: RunDir, home: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (rundir.plan_file, rundir.config_file):
        document = json.loads(file.read_text())
        document["model"] |= EVIL
        file.write_text(json.dumps(document))
    assert guarded(words) == 2
    assert "model.target=os:system" in capsys.readouterr().err
    assert not (home / "touched").exists()


def test_an_export_of_others_calls_nothing_that_it_names(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / "out"
    folder.mkdir()
    (folder / "colotrain.json").write_text(json.dumps({"model": EVIL}))
    write_receipt(folder, digests(folder))
    assert guarded(["export", "out", "--check"]) == 0
    assert "the model's class is not called" in capsys.readouterr().out
    receipt = json.loads((folder / RECEIPT).read_text())
    (folder / RECEIPT).write_text(json.dumps(receipt | {"format": "peft"}))
    assert guarded(["export", "out", "--check"]) == 4
    assert "the format peft, the directory of own" in capsys.readouterr().out
    assert not (home / "touched").exists()


def test_a_refusal_names_all_settings_as_arguments_that_can_be_given(
    rundir: RunDir, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(rundir.plan_file.read_text())
    document["model"] |= {"loss": "own.losses:smooth", "args": {f"a{n}": "x y" for n in range(12)}}
    rundir.plan_file.write_text(json.dumps(document))
    assert guarded(["export", "mine", "--to", "out"]) == 2
    told = capsys.readouterr().err
    named = shlex.split(re.search(r"addresses \((.*)\), and", told)[1])
    assert "train.loss=own.losses:smooth" in named
    assert 'model.args.a11="x y"' in named
    assert "model.loss" not in told
    assert " more" not in told


def write_receipt(folder: Path, files: dict[str, str]) -> None:
    """Write the receipt of an export whose run is gone."""
    receipt = {
        "run": {"path": "gone", "step": 1},
        **{"format": "own", "files": files, "tokenizer": {}, "notes": [], "validation_loss": {}},
        **{"probe": {"input_ids": [[1]], "logits": []}, "outputs": {"largest_difference": None}},
    }
    (folder / RECEIPT).write_text(json.dumps(receipt))


@pytest.mark.parametrize(
    "added", ["modeling_x.py", "adapter_config.json", "b.safetensors", "additional_chat_templates"]
)
def test_what_was_added_to_an_export_is_refused_before_it_is_read(
    rundir: RunDir, home: Path, added: str, monkeypatch: Any, capsys: Any
) -> None:
    folder = home / "out"
    folder.mkdir()
    (folder / "colotrain.json").write_text(json.dumps({"model": EVIL}))
    write_receipt(folder, digests(folder))
    (folder / ".gitattributes").touch()  # hidden, and read by no library of models
    assert guarded(["export", "out", "--check"]) == 0
    (folder / added).mkdir() if "." not in added else (folder / added).touch()
    monkeypatch.setattr(check, "_ask", pytest.fail)
    importlib.import_module("colotrain.export.write")  # which would keep the patched one
    monkeypatch.setattr("colotrain.export.source.choose", lambda *_: rundir.checkpoint(1))
    for words in (["out"], ["mine", "--to", "out"]):
        capsys.readouterr()
        assert guarded(["export", *words, "--check"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: out: {RECEIPT} does not list {added}; take that out")


def test_a_receipt_of_a_check_that_did_not_pass_vouches_for_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "out").mkdir()
    (home / "out" / "colotrain.json").write_text("{}")
    write_receipt(home / "out", {})
    assert guarded(["export", "out", "--check"]) == 2
    assert "check it with its run: no check has passed" in capsys.readouterr().err


HIDDEN = (
    "defaults: [x]",
    '{"defaults": ["evil"]}',
    '{"plugin": "evil"}',
    '{"plugin": "../../runs/mine/evil"}',
    '{"model": "\\u0024{data}"}',
    '{"model": {"target": "\\u0024{oc.env:EVIL}"}}',
    '{"model": {"target": "${oc.decode:${oc.env:EVIL}}"}}',
    '{"recipe": "evil", "model": {"target": "${.args.x}", "args": {"x": "os:system"}}}',
    '{"model": {"target": "a:b"}, "model": {"target": "os:system", "args": {"command": "x"}}}',
    "model: {target: !!python/name:os.system , args: {command: touch touched}}",
    "[" * 5000,
)
"""Ways to name code in files that a search for texts, or another parser, does not see."""


@pytest.mark.parametrize("text", HIDDEN)
def test_a_configuration_that_hides_what_it_names_is_refused(
    home: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVIL", "os:system")
    evil = "# @package _global_\nmodel: {target: 'os:system', args: {command: touch touched}}\n"
    rundir = RunDir(home / "runs" / "mine")
    rundir.create()
    rundir.plan_file.write_text("{}")
    rundir.config_file.write_text(text)
    for file in ("conf/plugin/evil.yaml", "recipes/evil.yaml", "runs/mine/evil.yaml"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(evil)
    words = [f"recipe={rundir.config_file}"]
    for given, saved in (([], rundir), (words, None)):
        try:
            config, problems = compose(given, saved=saved, notices=[])
        except UsageError:
            continue
        assert problems or isinstance(config["plugin"], str)
        assert "os:system" not in str(config)


@pytest.mark.parametrize("verb", ["run", "plan", "submit", "verify"])
def test_a_run_directory_as_a_recipe_names_no_code(
    home: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = run_of_others(home, {"model": EVIL})
    assert guarded([verb, f"recipe={foreign.config_file}", "name=other"]) == 2
    assert "model.target=os:system" in capsys.readouterr().err
    assert not (home / "touched").exists()


AS_A_RECIPE = (
    "runs/foreign/config.yaml",
    "runs/foreign/config.yml",
    "runs/foreign/evil.yaml",
    "runs/foreign/code/recipes/evil.yml",
    "../runs/foreign/config",
    "../runs/foreign/evil",
    "link.yaml",
    "mine",
    "config.yaml",
)
"""Ways to give a file of the run directory runs/foreign, which is also the last one's folder."""


@pytest.mark.parametrize(
    ("recipe", "mark"),
    [
        *((recipe, "plan.json") for recipe in AS_A_RECIPE),
        *((recipe, None) for recipe in AS_A_RECIPE if "evil" not in recipe),
        ("runs/foreign/evil.yaml", "signature.json"),
        ("runs/foreign/evil.yaml", "events/launcher.jsonl"),
    ],
)
def test_a_run_directory_is_known_by_each_of_its_files(
    home: Path, recipe: str, mark: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    foreign = run_of_others(home, {"model": EVIL})
    foreign.plan_file.unlink()
    if mark:
        (foreign.path / mark).write_text("{}")
    shutil.copytree(foreign.path, foreign.code)
    (foreign.code / "recipes").mkdir()
    (home / "recipes").mkdir()
    for name in ("config.yml", "evil.yaml", "code/recipes/evil.yml"):
        shutil.copy(foreign.config_file, foreign.path / name)
    (home / "link.yaml").symlink_to(foreign.config_file)
    (home / "recipes" / "mine.yaml").write_text("defaults: [../runs/foreign/config]\n")
    if recipe == AS_A_RECIPE[-1]:
        monkeypatch.chdir(foreign.path)
    assert guarded(["plan", f"recipe={recipe}"]) == 2
    told = capsys.readouterr().err
    assert "model.target=os:system" in told or "no file of a run directory" in told
    assert not list(home.rglob("touched"))


def test_recipes_of_ones_own_may_stand_beside_a_plan(home: Path) -> None:
    (home / "plan.json").write_text("{}")
    (home / "mine.yaml").write_text("defaults: [llm-tiny]\ntrain: {seed: 7}\n")
    assert compose(["recipe=mine.yaml"], notices=[])[0]["train"]["seed"] == 7


def test_a_recipe_given_as_a_file_is_that_file(home: Path) -> None:
    for name, seed in (("x.yaml", 1), ("x.yml", 2), ("recipes/x.yaml", 3), ("recipes/x.yml", 4)):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(f"defaults: [llm-tiny]\ntrain: {{seed: {seed}}}\n")
    (home / "recipes" / "by.yaml").write_text("defaults: [x.yml]\n")
    by_name = {
        "x": 3,
        "by": 4,
        "recipes/x.yml": 4,
        "x.yml": 2,
        "./x.yaml": 1,
        str(home / "x.yml"): 2,
    }
    for recipe, seed in by_name.items():
        assert compose([f"recipe={recipe}"], notices=[])[0]["train"]["seed"] == seed, recipe


@pytest.mark.parametrize(
    ("words", "ended"),
    [
        (["export", "foreign", "--to", "out"], 2),  # it has no checkpoints
        (["resume", "foreign"], 0),
        (["plan", "recipe=runs/foreign/config.yaml", "name=other"], 0),
    ],
)
def test_each_advice_about_a_run_of_others_can_be_followed(
    rundir: RunDir, home: Path, words: list[str], ended: int, monkeypatch: Any, capsys: Any
) -> None:
    """Follow each advice, in a new folder, until nothing of the run is refused."""
    shutil.move(rundir.path, home / "runs" / "foreign")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "another"))
    trained = []
    monkeypatch.setattr(start, "train", lambda *given, **_: trained.append(given[0]) or 0)
    assert guarded(words) == 2
    told = capsys.readouterr().err
    ways = [w for w in (trust.TRUST_IT, trust.GIVE_IT, trust.KEEP_IT) if w in told]
    assert not re.search(r"and \d+ more", told)
    for way in ways:
        given = list(words)
        if way == trust.TRUST_IT:
            given.append("--trust-code")
        elif way == trust.GIVE_IT:
            listed = re.search(rf"{trust.GIVE_IT}: (.*)", told)
            listed = listed or re.search(r"addresses \((.*)\), and", told)
            given += shlex.split(listed[1])
        else:
            (home / "recipes").mkdir()
            shutil.copy(home / "runs" / "foreign" / "config.yaml", home / "recipes" / "own.yaml")
            given[1] = "recipe=own"
        assert guarded(given) == ended, way
        assert "no checkpoint;" in capsys.readouterr().err or not ended


FOREIGN: dict[str, Any] = {
    "model.hf": "/etc",
    "model.args": {"trust_remote_code": True},
    "data.path": "~/.ssh/id_ed25519",
    "data.mixture": [{"path": "/etc/passwd", "weight": 1.0}],
    "data.tokenizer": "/etc/passwd",
    "data.chat_template": "evil.jinja",
    "train.distill": {"teacher": "/etc"},
    "adapter.path": "/etc",
    "adapter.merge": ["/etc"],
    "checkpoint.resume": "s3://elsewhere/run",
    "runs_dir": "s3://elsewhere/runs",
    "plugin.disk_path": "/home",
    "optim.name": "os:system",
    "optim.schedule": {"name": "os:system"},
    "observe.notify": {"url": "http://elsewhere"},
    "observe.trackers": ["wandb"],
    "observe.metrics_port": 9000,
    "cluster.rdzv_endpoint": "elsewhere:29500",
    "cluster.slurm": {"setup": ["touch touched"]},
    "cluster.hosts": {"names": ["elsewhere"]},
    "cluster.kubernetes": {"image": "elsewhere/image"},
    "unknown.key": "os:system",
}
"""Key → value that no run directory of somebody else may decide."""


def run_of_others(home: Path, settings: dict[str, Any]) -> RunDir:
    rundir = RunDir(home / "runs" / "foreign")
    rundir.create()
    rundir.plan_file.write_text("{}")
    rundir.config_file.write_text(json.dumps(settings))
    return rundir


@pytest.mark.parametrize("key", FOREIGN)
def test_others_decide_no_code_command_address_or_file(home: Path, key: str) -> None:
    section, _, name = key.partition(".")
    settings = {section: {name: FOREIGN[key]} if name else FOREIGN[key]}
    rundir = run_of_others(home, settings)
    with pytest.raises(UsageError, match=re.escape(key)) as error:
        compose(["train.max_steps=3"], saved=rundir, notices=[])
    compose([], saved=rundir, trusted=True, notices=[])
    told = str(error.value)  # named again as the error shows it, it is this user's
    given = shlex.split(re.search(r"addresses \((.*)\), and", told)[1])  # type: ignore[index]
    config, _ = compose(given, saved=rundir, notices=[])
    assert trust.calls(config)


def test_texts_of_a_run_stay_as_they_are(home: Path) -> None:
    texts = {"notify": {"url": "${oc.env:HOOK}"}, "samples": {"prompts": ["${a} \\${b}"]}}
    rundir = run_of_others(home, {"observe": texts})
    observe = compose([], saved=rundir, trusted=True, notices=[])[0]["observe"]
    assert observe["notify"]["url"] == "${oc.env:HOOK}"
    assert observe["samples"]["prompts"] == ["${a} \\${b}"]


def notified_by(command: str | list[str]) -> dict[str, Any]:
    return {"observe": {"notify": {"command": command}}}


def test_a_signature_is_of_one_part_and_one_form(home: Path) -> None:
    signed = [
        signatures.signature(part, trust.calls(notified_by(command)))
        for part in ("plan", "config")
        for command in (["ls -l"], ["ls", "-l"], "ls -l")
    ]
    assert len(set(signed)) == len(signed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.validation_fraction", float("nan")),
        ("data.validation_fraction", -1.0),
        ("elastic.hang_timeout_s", float("inf")),
        ("train.seed", -1),
        ("mesh.pp", 0),
    ],
)
def test_numbers_that_no_settings_can_have_are_refused(
    rundir: RunDir, key: str, value: float, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """No signature is of them: a plan's numbers may be changed."""
    document = json.loads(rundir.plan_file.read_text())
    section, name = key.split(".")
    document[section][name] = value
    rundir.plan_file.write_text(json.dumps(document))
    for trusted in (False, True):
        with pytest.raises(ConfigError, match=key):
            trust.check_resumed(rundir, rundir.plan(), trusted=trusted, given={})


def test_text_that_is_no_unicode_is_no_signature(home: Path) -> None:
    content = trust.calls(notified_by("ls"))
    signatures.signature("plan", content)
    assert not signatures.is_signature("\ud800", "plan", content)


def test_a_run_that_cannot_be_signed_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    for words in (["recipe=llm-tiny"], TARGETS):
        resolved = resolve_config([*words, "name=unsigned"])
        rundir = RunDir(home / "runs" / "unsigned")
        rundir.create()
        capsys.readouterr()
        write_signed(resolved.plan, rundir, resolved.config)
        said = capsys.readouterr().err
        assert ("unsigned is not signed (the key in the home: Not a directory)" in said) == (
            words == TARGETS
        )


def test_a_run_that_names_no_code_needs_no_signature(home: Path) -> None:
    resolved = resolve_config(["recipe=llm-tiny", "name=plain"])
    rundir = RunDir(home / "plain")
    rundir.create()
    write_signed(resolved.plan, rundir, resolved.config)
    rundir.signature_file.unlink()
    trust.check(rundir, rundir.plan(), trusted=False)
    compose([], saved=rundir, notices=[])


def spoil_key(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = signatures.key_file()
    if how == "is a link, which is not followed":
        key.symlink_to(shutil.move(key, key.with_name("elsewhere")))
    elif how == "others can read or write it":
        key.chmod(0o644)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize(
    "how",
    [
        "is a link, which is not followed",
        "others can read or write it",
        "belongs to another user",
    ],
)
def test_a_key_that_is_not_this_users_alone_signs_nothing(
    rundir: RunDir, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_key(how, monkeypatch)
    for _ in range(2):
        with pytest.raises(UsageError, match="was not written by you"):
            trust.check(rundir, rundir.plan(), trusted=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {signatures.key_file()}: {how}, so it is not used; ")


def test_a_plan_of_shipped_parts_needs_nobody_s_trust() -> None:
    plan = plan_from(["recipe=llm-tiny"], here=False)
    assert trust.calls(to_plain(plan)) == {}


def test_of_a_distillation_the_teacher_alone_needs_trust() -> None:
    """Numbers of an objective are nobody's code, in a plan as in a configuration."""
    numbers = {"top_k": 64, "alpha": 0.5, "temperature": 2.0}
    for plain, key in (
        ({"model": {"objective": numbers | {"teacher": "/m"}}}, "model.objective.teacher"),
        ({"train": {"distill": numbers | {"teacher": "/m"}}}, "train.distill.teacher"),
    ):
        assert trust.calls(plain) == {key: "/m"}
