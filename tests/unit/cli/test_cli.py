"""The command line: what is printed where, exit codes, and what must not be loaded."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from colotrain import host
from colotrain.cli.completion import complete
from colotrain.cli.main import guarded, verbs
from colotrain.config.shipped import Search
from colotrain.errors import ConfigError, DoesNotFit
from colotrain.launch.causes import describe
from colotrain.rundir import RunDir, write_atomically
from colotrain.runs import resolving
from colotrain.runs.trust import write_signed
from colotrain.show.console import print_json, stdout_console
from colotrain.show.terminal import is_live
from colotrain.spec.exit_codes import INTERRUPTED
from colotrain.spec.plan import RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.spec.survey import LossStudy, ParameterInfo, Survey

Run = Callable[..., tuple[int, str, str]]

RECIPE = """
model: {target: "package.module:Model"}
data: {corpus: stdlib, seq_len: 128}
train: {global_batch: 64, micro_batch: 4}
cluster: {procs_per_node: 2, device: cpu, memory: 1GiB}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def colotrain(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = guarded(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of a model that would have to be built."""
    looked = Survey(
        parameters=(
            ParameterInfo(
                name="embed.weight", shape=(64, 64), numel=4096, itemsize=4, frozen_by="embed*"
            ),
            ParameterInfo(
                name="head.weight", shape=(64, 64), numel=4096, itemsize=4, frozen_by=None
            ),
        ),
        matched={"embed*": 1},
        flops_per_token=1.0,
    )
    module = type(sys)("colotrain.planner.traced.survey")
    module.survey = lambda *_: looked  # type: ignore[attr-defined]
    module.trace_micro_batch = lambda *_: ""  # type: ignore[attr-defined]
    module.study_loss = lambda *_: LossStudy()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "colotrain.planner.traced.survey", module)


# Fast and light


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["__complete", "plugin="]])
def test_help_and_completion_load_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from colotrain.cli.main import guarded\n"
        f"code = guarded({arguments!r})\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(code or ' '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_without_arguments_the_verbs_are_shown(colotrain: Run) -> None:
    code, out, _ = colotrain()
    assert code == 0
    assert {"run", "plan", "resume", "stop", "runs"} <= set(verbs())
    assert [verb for verb in verbs() if f"  {verb}" not in out] == []
    assert "__complete" not in out


# Mistakes


@pytest.mark.usefixtures("_model")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "--jsn"], "error: No such option: --jsn"),
        (["rnu"], "error: No such command 'rnu'"),
        (["--nope"], "error: No such option: --nope"),
        (["plan", "--json=3"], "error: Option '--json' does not take a value"),
        (["completion", "tcsh"], "error: completion tcsh: expected one of bash, zsh, fish"),
        (["run", "--sweep", "--detach"], "error: --detach: cannot be had beside --sweep; leave"),
        (["logs", "-f", "--json"], "error: --follow: cannot be had beside --json; leave"),
        (
            ["doctor", "cluster.rdzv_endpoint=node0"],
            "error: cluster.rdzv_endpoint=node0: expected HOST:PORT of node 0",
        ),
        (["stop", "nope"], "error: no run 'nope'"),
        (["plan"], "error: recipe: expected a recipe (recipe=NAME), or model.target; for example "),
        (["plan", "recipe=mien"], "error: recipe=mien: expected a known recipe; did you mean mine"),
        (["plan", "mine"], "error: mine: expected KEY=VALUE; did you mean recipe=mine?"),
        (["data", "inspect", "recipes"], "error: recipes: expected KEY=VALUE; write data.path="),
        (["plan", "recipe=mine", "plugin=zero1,zero2"], "error: plugin=zero1,zero2: expected one"),
        (["verify", "--accumulation", ""], "error: --accumulation=: expected at least one; for"),
        (["verify", "--accumulation", ","], "error: --accumulation=,: expected at least one;"),
        (["verify", "--plugins", ","], "error: --plugins=,: expected at least one; for example"),
        (["verify", "--world-sizes", " "], "error: --world-sizes= : expected at least one; for"),
        (["verify", "--optimizer", "adamw"], "error: --optimizer=adamw: expected sgd, or recipe;"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_two(
    colotrain: Run, arguments: list[str], line: str
) -> None:
    code, out, err = colotrain(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.usefixtures("_model")
def test_all_mistakes_of_all_kinds_are_reported_at_once(colotrain: Run) -> None:
    wrong = [
        "plugin=zero9",
        "train.max_steps=abc",
        "train.global_batch=63",
        "trian.seed=1",
        "foo",
        "freeze.patterns=[nope*]",
        "data.tokenizer=bites",
    ]
    code, out, err = colotrain("plan", "recipe=mine", *wrong, "accumulate.steps=8")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == len(wrong), err
    assert all(line.startswith("error: ") for line in err.splitlines())


def test_a_bug_shows_its_traceback() -> None:
    code = (
        "import sys; from colotrain.cli import plan, main\n"
        "plan.resolve_config = lambda *a, **k: 1 / 0\n"
        "sys.argv = ['colotrain', 'plan']; main.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_path_that_cannot_be_used_is_one_line(colotrain: Run, folder: Path) -> None:
    name = "a" * 300
    fix = "correct the path, or get access to it\n"
    line = f"error: {name}/plan.json: File name too long; {fix}"
    assert colotrain("stop", name) == (2, "", line)
    (folder / "theirs.json").write_text('{"train_batch_size": 8}')
    line = f"error: theirs.json: File exists; {fix}"
    to = "theirs.json/mine.yaml"
    words = ["import-config", "theirs.json", "--kind", "deepspeed", "--to", to]
    assert colotrain(*words) == (2, "", line)


def test_a_full_disk_is_a_line(
    colotrain: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(*_: Any, **__: Any) -> None:
        write_atomically(tmp_path / "plan.json", "{}")

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr("colotrain.cli.plan.resolve_config", fill)
    line = f"error: {tmp_path}/plan.json: No space left on device; make room\n"
    assert colotrain("plan") == (1, "", line)
    monkeypatch.setattr("colotrain.cli.plan.resolve_config", lambda *_, **__: full(0))
    assert colotrain("plan") == (1, "", "error: a disk: No space left on device; make room\n")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    ],
    ids=["thread", "process"],
)
def test_a_limit_of_processes_is_a_line(
    colotrain: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    line = "no further process or thread may be started here; raise the limit (`ulimit -u`, or the "
    monkeypatch.setattr("colotrain.cli.plan.resolve_config", fail)
    assert colotrain("plan") == (1, "", f"error: {line}container's)\n")
    assert describe([], [], error) == f"the launcher failed: {line}container's)"


def test_a_bug_stays_one_and_an_abort_is_none(
    colotrain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = [typer.Abort(), RuntimeError("a bug"), OSError("a bug")]

    def fail(*_: Any, **__: Any) -> None:
        raise raised.pop(0)

    monkeypatch.setattr("colotrain.cli.plan.resolve_config", fail)
    assert colotrain("plan")[0] == INTERRUPTED
    for kind in (RuntimeError, OSError):
        with pytest.raises(kind, match="a bug"):
            colotrain("plan")


def test_the_limit_of_open_files_is_raised_or_told(
    colotrain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, set_to = (24, 24), []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: set_to.append(pair))
    code, _, err = colotrain("plan", "recipe=mine")
    assert code == 1
    assert err.startswith("error: open files: at most 24 are allowed here")
    assert err.endswith("; raise the limit, as with `ulimit -n 4096`\n")
    limits = (24, 2000)
    assert host.allow_open_files() == 2000
    assert set_to == [(2000, 2000)]


def test_an_error_of_the_system_without_a_path_is_a_bug(
    colotrain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no path")

    monkeypatch.setattr("colotrain.cli.plan.resolve_config", fail)
    with pytest.raises(OSError, match="no path"):
        colotrain("plan")


@pytest.mark.parametrize("length", [1, 1 << 20])
def test_a_reader_that_has_gone_ends_it_quietly(length: int) -> None:
    code = (
        "import sys; from colotrain.cli import completion, main\n"
        f"completion.script = lambda *a: 'x' * {length}\n"
        "sys.argv = ['colotrain', 'completion', 'bash']; sys.exit(main.main())"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_interrupt_is_exit_code_130(colotrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("colotrain.cli.plan.resolve_config", interrupted)
    code, out, err = colotrain("plan")
    assert (code, out, err.strip()) == (130, "", "")


# plan


@pytest.mark.usefixtures("_model")
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--json", "recipe=mine", "plugin=zero2"],
        ["plan", "recipe=mine", "--json", "plugin=zero2"],
        ["plan", "recipe=mine", "plugin=zero2", "--json"],
    ],
)
def test_plan_prints_one_document(colotrain: Run, arguments: list[str]) -> None:
    code, out, err = colotrain(*arguments, "freeze.patterns=[embed*]", "+train.seed=3", "~optim")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["schema"] == 1
    assert document["world_size"] == 2
    assert document["plugin"] == {"name": "zero2", "reason": "asked for"}
    assert document["batch"] == {
        "global": 64,
        "micro": 4,
        "accumulation_steps": 8,
        "data_parallel": 2,
        "context_parallel": 1,
        "expert_parallel": 1,
        "tensor_parallel": 1,
        "owner": "colotrain",
        "tokens_per_step": 64 * 128,
        "unit": "tokens",
    }
    assert document["parameters"] == {"total": 8192, "trainable": 4096, "frozen": 4096}
    assert document["freeze"] == [{"pattern": "embed*", "matched": 1}]
    assert document["communication"]["bytes_per_step"] > 0
    assert set(document["time"]) == {"step_s", "tokens_per_s", "mfu", "waits"}
    assert [line for line in document["warnings"] if "are not estimated" in line]


@pytest.mark.usefixtures("_model")
def test_memory_adds_up_and_is_compared_with_what_there_is(colotrain: Run) -> None:
    _, out, _ = colotrain("plan", "--json", "recipe=mine", "plugin=zero2")
    document = json.loads(out)
    memory = document["memory"]
    parts = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")
    parts = (*parts, "baseline")
    sums = {"peak", "peak_low", "peak_high", "capacity", "fits", "verdict"}
    assert set(memory) == {*parts, *sums}
    assert memory["peak_low"] <= memory["peak"] <= memory["peak_high"]
    assert memory["peak"] == sum(memory[part] for part in parts)
    assert (memory["capacity"], memory["fits"], memory["verdict"]) == (1 << 30, True, "yes")
    others = {other["plugin"]: other for other in document["alternatives"]}
    assert set(others) == set(ROWS) - {"zero2"}
    assert others["zero1"]["memory"]["gradients"] == 2 * memory["gradients"]
    assert all(set(other["memory"]) == set(memory) for other in others.values())


@pytest.mark.usefixtures("_model")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_plan_that_does_not_fit_is_printed_with_exit_code_three(
    colotrain: Run, as_json: bool
) -> None:
    options = ["--json"] if as_json else []
    code, out, _ = colotrain("plan", "recipe=mine", "cluster.memory=1KiB", *options)
    assert code == 3
    assert '"fits": false' in out if as_json else "does not fit" in out


@pytest.mark.usefixtures("_model")
def test_plan_shows_people_the_same_on_lines_that_can_be_searched(
    colotrain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    code, out, err = colotrain("plan", "recipe=mine", "freeze.patterns=[embed*]", "plugin=zero2")
    assert (code, err) == (0, "")
    assert "64 = micro-batch 4 × accumulation 8 × 2 ranks; 8,192 tokens per step" in out
    assert "zero2: asked for" in out
    assert "8,192: 4,096 trained, 4,096 frozen" in out
    assert "\x1b" not in out


# Places


@pytest.mark.usefixtures("_model")
def test_ranks_need_a_place_here_to_run_but_not_to_be_planned() -> None:
    elsewhere = ["recipe=mine", "cluster.device=cuda", "cluster.procs_per_node=16"]
    assert resolving.plan_from(elsewhere, here=False).world_size == 16
    with pytest.raises(ConfigError, match="a GPU that torch can use: this machine has none"):
        resolving.plan_from(elsewhere)
    with pytest.raises(ConfigError, match=r"at most \d+ ranks on this machine"):
        resolving.plan_from(
            ["recipe=mine", "cluster.procs_per_node=9999", "train.global_batch=null"]
        )


@pytest.mark.usefixtures("_model")
def test_a_plan_that_cannot_fit_is_refused_before_it_runs() -> None:
    resolving.check_fits(resolving.resolve_config(["recipe=mine"]))
    with pytest.raises(DoesNotFit, match="--force"):
        resolving.check_fits(resolving.resolve_config(["recipe=mine", "cluster.memory=1KiB"]))


@pytest.mark.usefixtures("_model")
def test_resume_with_changes_takes_any_folder_and_refuses_what_does_not_fit(
    colotrain: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolving.resolve_config(["recipe=mine"])
    rundir = RunDir(folder / "josé, (old)" / "runs" / "one")
    rundir.create()
    write_signed(made.plan, rundir, made.config)
    trained: list[RunPlan] = []
    monkeypatch.setattr("colotrain.runs.start.warm_up", lambda: None)
    monkeypatch.setattr("colotrain.runs.start.train", lambda p, *_, **__: trained.append(p) or 0)
    monkeypatch.chdir(folder / "josé, (old)")
    assert colotrain("resume", "one", "train.seed=9") == (0, "", "")
    assert (trained[0].train.seed, trained[0].name) == (9, "one")
    code, _, err = colotrain("resume", "one", "cluster.memory=1KiB")
    assert (code, len(trained)) == (3, 1)
    assert "--force" in err
    assert colotrain("resume", "one", "cluster.memory=1KiB", "--force") == (0, "", "")


# Output


@pytest.mark.parametrize(
    ("environment", "coloured", "live"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "xterm", "CI": "true"}, False, False),
    ],
)
def test_colour_and_movement_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], coloured: bool, live: bool
) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console = stdout_console()
    with console.capture() as capture:
        console.print("text", style="red")
    assert ("\x1b[31m" in capture.get()) == coloured
    assert is_live(console) == live


def test_off_a_terminal_nothing_is_coloured_and_names_are_no_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = stdout_console()
    console.print("blocks[0] :smile: [red]", style="red")
    assert capsys.readouterr().out == "blocks[0] :smile: [red]\n"
    assert not is_live(console)


def test_json_has_no_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": [float("nan"), 1.0], "norm": float("inf")})
    assert json.loads(capsys.readouterr().out) == {"loss": [None, 1.0], "norm": None}


# Completion


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("rec", ["recipe="]),
        ("recipe=mi", ["recipe=mine"]),
        ("plugin=zero", ["plugin=zero1", "plugin=zero2", "plugin=zero3"]),
        ("plugin.name=gem", ["plugin.name=gemini"]),
        ("cluster=lo", ["cluster=local"]),
        ("train.max_s", ["train.max_steps="]),
        ("optim.schedule.warmup_s", ["optim.schedule.warmup_steps="]),
        ("train.precision=b", ["train.precision=bf16"]),
        ("train.compile=", ["train.compile=true", "train.compile=false"]),
        ("accumulate.steps=", ["accumulate.steps=auto"]),
        ("~optim.l", ["~optim.lr="]),
        ("+see", []),
        ("--j", ["--json"]),
        ("nope=", []),
    ],
)
def test_a_word_is_completed_to_whole_overrides(word: str, found: list[str]) -> None:
    assert complete(word, Search.at(Path.cwd())) == found


def test_without_a_word_the_keys_at_the_top_are_offered() -> None:
    found = complete("", Search.at(Path.cwd()))
    assert {"recipe=", "plugin=", "cluster=", "train.", "name="} <= set(found)


def in_bash(words: Sequence[str], tmp_path: Path) -> list[str]:
    """COMPREPLY of a real bash that has sourced the script."""
    program = tmp_path / "bin/colotrain"
    program.parent.mkdir(exist_ok=True)
    python = "from colotrain.cli.main import main; main()"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{python}" "$@"\n')
    program.chmod(0o755)
    quoted = " ".join(f"'{word}'" for word in words)
    text = (
        "source <(colotrain completion bash)\n"
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        "_colotrain; printf '%s\\n' \"${COMPREPLY[@]}\"\n"
        "[[ $COMP_WORDBREAKS == *=* ]] && echo 'breaks at ='\n"
        "complete -p colotrain | grep -q nospace || echo 'adds a space'\n"
    )
    path = f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PATH": path},
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["colotrain", "res"], ["resume"]),
        (["colotrain", "run", "recipe=mi"], ["recipe=mine"]),
        (["colotrain", "run", "recipe=mine", "plugin=zero"], ["zero1", "zero2", "zero3"]),
        (["colotrain", "plan", "train.max_s"], ["train.max_steps="]),
        (["colotrain", "plan", "nope="], []),
    ],
)
def test_bash_completes_words_that_hold_an_equals_sign(
    tmp_path: Path, words: list[str], found: list[str]
) -> None:
    prefix = "plugin=" if words[-1].startswith("plugin=") else ""
    assert in_bash(words, tmp_path) == [prefix + name for name in found]


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_with_every_verb(colotrain: Run, name: str) -> None:
    code, out, _ = colotrain("completion", name)
    assert code == 0
    assert " ".join(verbs()) in out
    assert "VERBS" not in out


# The way to a plan


@pytest.mark.usefixtures("_model")
def test_every_verb_gets_its_plan_from_the_same_arguments() -> None:
    made = resolving.plan_from(["recipe=mine", "plugin=zero3", "name=mine"])
    assert isinstance(made, RunPlan)
    assert (made.name, made.recipe, made.plugin.name) == ("mine", "mine", "zero3")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["export", "nothing"], "no run 'nothing'"),
        (["plot", "nothing"], "no run 'nothing'"),
        (["import-config", "nothing.yaml"], "nothing.yaml: cannot be read"),
    ],
)
def test_what_is_written_is_named_by_to_and_also_by_out(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for option in ("--to", "--out"):
        assert guarded([*words, option, "a.svg" if "plot" in words else "a.yaml"]) == 2
        assert told in capsys.readouterr().err
    assert guarded([*words, "--to", "a", "--out", "b"]) == 2
    assert "--out: cannot be had beside --to" in capsys.readouterr().err
    assert guarded([words[0], "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--to" in shown
    assert "--out" not in shown
