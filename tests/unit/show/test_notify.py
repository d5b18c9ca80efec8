"""A run tells how it ended, and nothing that is told or fails to be told can reach the run."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from colotrain.config.compose import gather
from colotrain.config.observing import notify_plan
from colotrain.errors import ColotrainError, ConfigError
from colotrain.events.event import Event
from colotrain.events.fold import fold
from colotrain.events.view import RunView
from colotrain.rundir import RunDir
from colotrain.runs import trust
from colotrain.runs.resolving import compose, resolve_config
from colotrain.show import notify as module
from colotrain.show.notify import Notifier, check_notify
from colotrain.spec.observing import Notify
from colotrain.spec.plan import RunPlan
from tests.unit.events.test_view import launcher, plan_of, step

SECRET = "s3cret-token"
RESTART = launcher("restart", 3.0, cause="rank 1 was killed")
DONE = launcher("done", 9.0, status="finished", exit_code=0, cause="")
EVENTS = [launcher("launch", 1.0, world_size=2), step(1), step(2)]


def plan_with(**settings: Any) -> RunPlan:
    plan, notify = plan_of(), notify_plan(Notify(**settings))
    return dataclasses.replace(plan, observe=dataclasses.replace(plan.observe, notify=notify))


def rundir_in(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "my run")
    rundir.create()
    return rundir


def tell(plan: RunPlan, rundir: RunDir, *events: Event, view: RunView | None = None) -> list[str]:
    """Tell the events, all at once; the warnings."""
    with Notifier(plan, rundir) as notifier:
        notes = notifier.take(events, view or fold(EVENTS, max_steps=10))
        notes += notifier.close()
    return [note.fields["text"] for note in notes]


@dataclasses.dataclass
class Hook:
    """A webhook on the loopback address; `answers` are its statuses, the last one for good."""

    answers: list[int]
    got: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    url: str = ""


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    known = Hook([200])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kind = self.headers["Content-Type"]
            known.got.append({"path": self.path, "type": kind, "body": body})
            status = known.answers.pop(0) if len(known.answers) > 1 else known.answers[0]
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    known.url = f"http://127.0.0.1:{server.server_port}/{SECRET}"
    monkeypatch.setenv("HOOK", known.url)
    monkeypatch.setattr(module, "PAUSES_S", (0.01, 0.01))
    yield known
    server.shutdown()
    server.server_close()


SAY = "import json, os, sys; open(sys.argv[1], 'a').write(json.dumps([json.load(sys.stdin), "
SAY += "{k: v for k, v in os.environ.items() if k.startswith('COLOTRAIN_')}]) + chr(10))"


def test_a_command_gets_json_and_variables_without_a_shell(tmp_path: Path) -> None:
    rundir, out = rundir_in(tmp_path), tmp_path / "out $(touch hacked); x"
    plan = plan_with(command=[sys.executable, "-c", SAY, str(out)])
    assert tell(plan, rundir, RESTART, DONE) == []
    (restart, variables), (end, _) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (restart["status"], restart["reason"]) == ("restarted", "rank 1 was killed")
    assert (end["status"], end["reason"]) == ("finished", None)
    assert {key: end[key] for key in ("run", "step", "max_steps", "loss", "run_dir")} == {
        "run": "my run",
        "step": 2,
        "max_steps": 10,
        "loss": 0.5,
        "run_dir": str(rundir.path),
    }
    assert end["text"] == "my run finished at step 2 of 10, loss 0.5"
    assert variables["COLOTRAIN_STATUS"] == "restarted"
    assert variables["COLOTRAIN_REASON"] == "rank 1 was killed"
    assert not (tmp_path / "hacked").exists()


def test_a_command_as_one_text_is_words_and_a_shell_runs_it_if_asked(tmp_path: Path) -> None:
    rundir, out = rundir_in(tmp_path), tmp_path / "out"
    words = notify_plan(Notify(command="say 'two words' $HOME"))
    assert words is not None
    assert words.command == ("say", "two words", "$HOME")
    shell = plan_with(command=f'echo "$COLOTRAIN_TEXT" > {out}', shell=True)
    hostile = launcher("done", 9.0, status="failed", exit_code=1, cause='"; touch hacked; $(id)')
    assert tell(shell, rundir, hostile) == []
    assert out.read_text().strip().endswith('"; touch hacked; $(id)')


@pytest.mark.parametrize(
    ("status", "told"), [("preempted", "stopped"), ("interrupted", "stopped"), ("failed", "failed")]
)
def test_a_webhook_gets_a_post(tmp_path: Path, hook: Hook, status: str, told: str) -> None:
    end = launcher("done", 9.0, status=status, exit_code=1, cause="because")
    assert tell(plan_with(url="${oc.env:HOOK}"), rundir_in(tmp_path), end) == []
    (got,) = hook.got
    assert (got["path"], got["type"]) == (f"/{SECRET}", "application/json")
    assert (json.loads(got["body"])["status"], json.loads(got["body"])["reason"]) == (
        told,
        "because",
    )


def test_only_what_is_asked_for_is_told(tmp_path: Path, hook: Hook) -> None:
    plan = plan_with(url="${oc.env:HOOK}", events=["finished"])
    assert tell(plan, rundir_in(tmp_path), RESTART, DONE) == []
    assert [json.loads(got["body"])["status"] for got in hook.got] == ["finished"]


@pytest.mark.parametrize(
    ("answers", "tries", "problem"),
    [
        ([503, 429, 200], 3, None),
        ([500], 3, "HTTP status 500"),
        ([404], 1, "HTTP status 404"),
        ([302], 1, "HTTP status 302"),
    ],
)
def test_what_may_pass_is_tried_again_three_times_at_most(
    tmp_path: Path, hook: Hook, answers: list[int], tries: int, problem: str | None
) -> None:
    hook.answers = answers
    warnings = tell(plan_with(url="${oc.env:HOOK}"), rundir_in(tmp_path), DONE)
    expected = f"warning: observe.notify (url): finished was not told: {problem}"
    assert warnings == ([] if problem is None else [expected])
    assert len(hook.got) == tries


@pytest.mark.parametrize(
    "value",
    [
        f"http://127.0.0.1:9/{SECRET}",
        f"http://[{SECRET}/",
        f"http://host:{SECRET}/",
        f"http://127.0.0.1:9/\n{SECRET}",
        f"file:///etc/{SECRET}",
        f"{SECRET}",
    ],
)
def test_a_url_that_cannot_be_reached_is_a_warning_without_the_url(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HOOK", value)
    (warning,) = tell(plan_with(url="${oc.env:HOOK}"), rundir_in(tmp_path), DONE)
    assert warning.startswith("warning: observe.notify (url): finished was not told: ")
    assert SECRET not in warning


def test_a_command_that_fails_or_is_missing_is_a_warning(tmp_path: Path) -> None:
    rundir = rundir_in(tmp_path)
    (warning,) = tell(plan_with(command="echo why; exit 3", shell=True), rundir, DONE)
    assert warning.endswith(f"finished was not told: exit code 3; see {rundir.notify_log}")
    assert rundir.notify_log.read_text() == "why\n"
    assert rundir.notify_log.stat().st_mode & 0o777 == 0o600
    (warning,) = tell(plan_with(command="/no/such/program"), rundir, DONE)
    assert warning.endswith("finished was not told: FileNotFoundError")


def test_a_command_that_hangs_holds_nothing_up_and_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND_S", 1.0)
    seconds = str(600 + random.random())  # tells the child from other processes
    plan = plan_with(command=f"sleep {seconds} & wait", shell=True)
    with Notifier(plan, rundir_in(tmp_path)) as notifier:
        began = time.monotonic()
        notifier.take([RESTART], RunView())
        assert time.monotonic() - began < 1.0  # what the command may take
        (note,) = notifier.close()
    assert note.fields["text"].endswith("it took longer than 1 s and was killed")
    until = time.monotonic() + 30
    while any(seconds in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < until, "the command's child is left"
        time.sleep(0.05)


def test_the_end_of_a_run_waits_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    began = time.monotonic()
    (warning,) = tell(plan_with(command="sleep 20"), rundir_in(tmp_path), DONE)
    assert time.monotonic() - began < 5
    assert "was left behind" in warning


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ColotrainError("no data"), "failed"),
        (ValueError("x"), "failed"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_a_run_that_ends_before_its_workers_is_told(
    tmp_path: Path, hook: Hook, error: BaseException, status: str
) -> None:
    with pytest.raises(type(error)), Notifier(plan_with(url="${oc.env:HOOK}"), rundir_in(tmp_path)):
        raise error
    assert [json.loads(got["body"])["status"] for got in hook.got] == [status]


WORDS = ["recipe=llm-tiny", "name=told", "cluster.procs_per_node=1"]


def test_the_value_of_a_variable_stands_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOOK", f"https://host/{SECRET}")
    monkeypatch.setenv("VOCABULARY", "bpe-512")
    words = ["observe.notify.url=https://${oc.env:HOOK}"]
    words += ["observe.notify.command=[echo,'${oc.env:HOOK}']"]
    words += ["data.tokenizer=${oc.env:VOCABULARY}"]
    config, problems = gather([*WORDS, *words])
    assert problems == []
    assert config["data"]["tokenizer"] == "bpe-512"  # others are read at once, as ever
    rundir = rundir_in(tmp_path)
    trust.write_signed(plan_with(**config["observe"]["notify"]), rundir, config)
    files = [path for path in rundir.path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert not [path for path in files if SECRET in path.read_text("utf-8")]
    again, _ = compose([f"recipe={rundir.config_file}", "name=told"], notices=[])
    assert again["observe"]["notify"] == config["observe"]["notify"]
    assert again["observe"]["notify"]["url"] == "https://${oc.env:HOOK}"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["observe.notify.url=https://h/T0/secret"], "expected a reference to an environment var"),
        (["observe.notify.url='${oc.env:A}${name}'"], "expected no other references beside"),
        (['observe.notify.command="echo \'a"'], "expected words (No closing quotation)"),
        (["observe.notify.command=''"], "expected a program and its arguments"),
        (["observe.notify.shell=true"], "expected a command for the shell to run"),
        (
            ["observe.notify.command=[a,b]", "observe.notify.shell=true"],
            "expected one text, which a shell runs",
        ),
        (
            ["observe.notify.events=[finish]"],
            "expected one of finished, failed, stopped, restarted",
        ),
    ],
)
def test_settings_that_cannot_be_right_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config([*WORDS, *words])
    (line,) = refused.value.lines()
    assert problem in line
    assert "secret" not in line.replace("is a secret", "")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": "${oc.env:NOT_SET}"}, "observe.notify.url: expected the environment variable NOT"),
        ({"command": ["echo", "${oc.env:NOT_SET}"]}, "observe.notify.command: expected the env"),
        ({"command": "/no/such"}, "observe.notify.command=/no/such: expected a program"),
        ({"url": "${oc.env:SECRET}"}, "observe.notify.url: expected a URL that begins with http"),
    ],
)
def test_what_this_machine_lacks_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], problem: str
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    with pytest.raises(ConfigError) as refused:
        check_notify(plan_with(**settings))
    (line,) = refused.value.lines()
    assert problem in line
    assert SECRET not in line


@pytest.mark.parametrize("settings", [{"command": ["id"]}, {"url": "${oc.env:TOKEN}"}])
def test_a_plan_from_elsewhere_tells_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(ColotrainError, match=r"observe\.notify\."):
        trust.check(rundir_in(tmp_path), plan_with(**settings), trusted=False)
