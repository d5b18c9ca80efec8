"""What people see: tables at 80 columns, scales, the name of a process."""

from __future__ import annotations

import io
import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from colotrain.cli.inspect_grads import print_table
from colotrain.cli.main import guarded
from colotrain.events.gradients import GradientRecord, ParameterGradient
from colotrain.export.job import dtype_of_directory
from colotrain.launch.server.forkserver import name_process
from colotrain.show.charts import scale_of
from colotrain.show.formatting import shortened, shown_loss
from colotrain.spec.plan import ModelPlan
from tests.running import SMALL
from tests.unit.events.test_view import plan_of


def test_the_help_says_every_verb_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert guarded(["--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("more", [[], ["--advise"]])
def test_a_plan_is_whole_at_any_width(
    columns: int,
    more: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert guarded(["plan", *SMALL, "cluster.memory=11GiB", *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    options = lines[next(n for n, line in enumerate(lines) if "  recompute" in line) + 1 :]
    assert len(options[1].split()) == len(options[0].split()) > 6  # no cell is empty
    (peak,) = [line for line in lines if line.startswith("peak")]
    assert peak.count("█") > 15  # of a small run, too
    assert peak.rstrip().endswith("→")
    assert any("of 11 GiB per rank: fits" in line for line in lines)


@pytest.mark.parametrize("columns", [80, 120])
def test_names_of_parameters_take_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, width=columns, force_terminal=True, no_color=True)
    monkeypatch.setattr("colotrain.cli.inspect_grads.stdout_console", lambda: console)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)]
    rest = {"reason": None, "zero_fraction": 0.1, "nonfinite": 0, "update_ratio": 1e-3}
    sizes = {"shape": (4096, 4096), "norm": 1.25, "rms": 0.5, "max_abs": 3.0, "aliases": ()}
    rows = [
        ParameterGradient(name=name, dtype="float32", status="trained", **rest, **sizes)
        for name in names
    ]
    record = GradientRecord(
        step=1, attempt=0, t=1.0, global_norm=1.0, clipped_to=None, parameters=tuple(rows)
    )
    print_table(record, rows, None)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()
    assert len(lines) == 5
    assert max(map(len, lines)) <= columns
    assert ["RMS" in lines[1], "self_attn" in lines[2]] == [columns > 80] * 2


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{}.self_attn.q_proj.weight",
        "transformer.h.{}.attn.c_proj.weight",
        "blocks.{}.attention.query.weight",
        "model.language_model.layers.{}.self_attn.q_proj.weight",
    ],
)
@pytest.mark.parametrize("width", [20, 30])
def test_shortened_names_of_layers_differ(name: str, width: int) -> None:
    found = [shortened(name.format(layer), width) for layer in (1, 10, 11, 21, 101)]
    assert len(set(found)) == len(found), found
    assert all(len(each) <= width and each.endswith("weight") for each in found)


@pytest.mark.parametrize(
    ("most", "limit", "scale"), [(1, 100, 1.5), (60, 100, 100), (120, 100, 120), (0, 0, 1)]
)
def test_small_bars_have_a_scale_of_their_own(most: float, limit: float, scale: float) -> None:
    assert scale_of(most, limit) == scale


def titled(connection: object) -> None:
    name_process("colotrain: x rank 3")
    connection.send((Path("/proc/self/cmdline").read_bytes(), Path("/proc/self/comm").read_text()))  # type: ignore[attr-defined]


def test_a_rank_has_its_runs_name_in_ps() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=titled, args=(theirs,))
    process.start()
    command, comm = ours.recv()
    process.join()
    assert command.rstrip(b"\0") == b"colotrain: x rank 3"
    assert comm == "colotrain: x ra\n"


def test_a_model_is_exported_in_the_dtype_that_it_came_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    plan = ModelPlan(target="", hf=str(tmp_path), args={})
    assert dtype_of_directory(plan) == "bfloat16"
    assert dtype_of_directory(replace(plan, args={"dtype": "float32"})) == ""
    assert dtype_of_directory(plan_of().model) == ""


@pytest.mark.parametrize(
    ("loss", "text"),
    [(2.34567, "2.3457"), (1.2e33, "1.2e+33"), (None, "-"), ("nan", "nan"), (float("inf"), "inf")],
)
def test_a_loss_stays_short_also_where_it_diverged(loss: float | str | None, text: str) -> None:
    assert shown_loss(loss) == text
