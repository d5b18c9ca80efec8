"""A sweep on this machine: one run after another, and a table of what came out."""

from __future__ import annotations

from tests.dist.conftest import SMALL, Colotrain


def test_a_sweep_runs_every_combination_and_lists_the_best_first(colotrain: Colotrain) -> None:
    arguments = [o for o in SMALL if not o.startswith("cluster.")]
    sweep = ("optim.lr=1e-2,1e-4", "plugin=zero1,zero3", "name=best", "train.max_steps=3")
    result = colotrain("run", "--sweep", *arguments, "cluster.procs_per_node=1", *sweep, "--json")
    assert result.code == 0, result.err
    rows = result.json["runs"]
    assert result.json["exit_codes"] == {f"best-{i}": 0 for i in range(4)}
    assert [row["loss"] for row in rows] == sorted(row["loss"] for row in rows)
    assert {row["chosen"]["optim.lr"] for row in rows[:2]} == {"0.01"}
    table = colotrain("runs", "--sweep", "best")
    assert table.out.splitlines()[0].split()[:4] == ["RUN", "STATE", "optim.lr", "plugin"]
    assert len(table.out.splitlines()) == 5


def test_a_sweep_is_looked_at_as_a_whole_before_it_begins(colotrain: Colotrain) -> None:
    words = ("plugin=zero1,zero9", "train.seed=1,-2", "optim.nesterov=1", "name=odd")
    result = colotrain("run", "--sweep", *SMALL, *words)
    assert result.code == 2
    told = [line.partition(" expected ")[0] for line in result.err.splitlines()]
    assert told == [
        "error: optim.nesterov=1:",
        "error: with train.seed=-2: train.seed=-2:",
        "error: with plugin=zero9: plugin=zero9:",
    ]
    assert not (colotrain.cwd / "runs").exists()
