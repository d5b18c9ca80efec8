"""Gradient records: what survives of them, by parameter and layer, and where two runs part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from colotrain.events.comparison import compare
from colotrain.events.event import Event
from colotrain.events.fold import fold
from colotrain.events.gradients import MOST_COLUMNS, layer_of, losses, records
from colotrain.rundir import RunDir
from tests.unit.events.test_view import interleaved, step, view_of, worker, write_files
from tests.unit.generated import NAMES, STATUSES, gradients, parameters, rich_run


def run_of(path: Path, *files: Sequence[Event]) -> RunDir:
    rundir = RunDir(path)
    rundir.create()
    write_files(rundir, files)
    return rundir


def test_the_view_has_the_newest_record_by_parameter() -> None:
    record = view_of(parameters(), gradients(10), gradients(20)).gradients
    assert record is not None
    assert (record.step, record.global_norm, record.clipped_to) == (20, 2.5, 1.0)
    assert {row.name: row.status for row in record.parameters} == STATUSES
    head = record.parameters[-1]
    assert (head.shape, head.dtype, head.reason) == ((4, 8), "float32", "no path from the loss")
    assert record.parameters[0].aliases == ("tied.weight",)
    assert record.parameters[3].nonfinite == 32
    assert record.parameters[1].update_ratio == pytest.approx(2 / 20 / 100)


def test_a_record_before_its_names_are_known_is_none() -> None:
    assert view_of(gradients(10)).gradients is None


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.3.attention.wq.weight", "blocks.3"),
        ("model.layers.11.mlp.weight", "model.layers.11"),
        ("a.0.b.1.weight", "a.0"),
        ("embed.weight", "embed"),
        ("encoder.norm.bias", "encoder.norm"),
        ("scale", "scale"),
        ("0.weight", "0"),
    ],
)
def test_a_layer_is_a_module_up_to_its_first_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_a_layer_shows_the_weightiest_status_and_the_norm_of_all_it_has() -> None:
    heat = view_of(parameters(), gradients(10)).heat
    cells = dict(zip(heat.layers, heat.cells[0], strict=True))
    statuses = {layer: cell.status for layer, cell in cells.items()}
    assert statuses == {
        "embed": "frozen",
        "blocks.0": "trained",
        "blocks.1": "nonfinite",
        "blocks.2": "zero",
        "head": "unused",
    }
    assert cells["blocks.0"].norm == pytest.approx(math.hypot(2, 3) / 10)


def test_a_long_history_is_thinned_out_evenly_and_keeps_its_ends() -> None:
    events = [gradients(n) for n in range(1, 4 * MOST_COLUMNS)]
    view = view_of(parameters(), *events)
    steps = view.heat.steps
    assert MOST_COLUMNS // 2 <= len(steps) <= MOST_COLUMNS
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {4}
    assert view.gradients is not None
    assert view.gradients.step == events[-1].fields["step"]


RESTARTED = [
    [worker("started", 100, step=0), parameters(), *(gradients(n) for n in (1, 2, 3))],
    [
        worker("started", 200, attempt=1, step=1),
        parameters(200, attempt=1),
        gradients(2, t=202, attempt=1, scale=7.0),
    ],
]


def test_a_restart_forgets_the_records_above_the_step_it_resumed_from(tmp_path: Path) -> None:
    view = fold([event for file in RESTARTED for event in file])
    assert view.heat.steps == (1, 2)
    found = list(records(run_of(tmp_path, *RESTARTED)))
    assert [(record.step, record.attempt) for record in found] == [(1, 0), (2, 1)]
    assert view.gradients is not None
    assert view.gradients.parameters[1].norm == found[-1].parameters[1].norm == 7.0


def test_a_forgotten_record_is_not_the_newest() -> None:
    view = view_of(*RESTARTED[0], worker("started", 200, attempt=1, step=2))
    assert view.gradients is None or view.gradients.step <= 2


@pytest.mark.parametrize("seed", range(5))
def test_any_interleaving_gives_the_same_records(seed: int) -> None:
    ranks = {event.rank for event in rich_run()}
    files = [[event for event in rich_run() if event.rank == rank] for rank in ranks]
    whole = fold(rich_run(), max_steps=40)
    assert repr(fold(interleaved(files, seed), max_steps=40)) == repr(whole)  # NaN ≠ NaN


@pytest.mark.parametrize("junk", [None, "text", 3, [], {}, [None], ["x"] * 20, [[1]], math.nan])
def test_columns_that_make_no_sense_break_nothing(junk: Any) -> None:
    fields = ("status", "reason", "norm", "rms", "zero_fraction", "nonfinite", "global_norm")
    events = [
        *(gradients(n, **{name: junk}) for n, name in enumerate(fields, 1)),
        worker("nonfinite", 1.0, step=junk, rank=junk, module=junk, micro_batch=junk, phase=junk),
    ]
    for names in ("names", "shapes", "dtypes", "aliases"):
        fields_of_names = parameters().fields | {names: junk}
        view = view_of(worker("parameters", 1.0, **fields_of_names), *events)
        assert view.gradients is not None
    assert len(view_of(parameters(), *events).heat.steps) == len(fields)


def test_losses_are_those_of_the_steps_that_survived(tmp_path: Path) -> None:
    first = [worker("started", 1, step=0), *(step(n, loss=1.0) for n in (1, 2, 3))]
    again = [worker("started", 9, attempt=1, step=1), step(2, attempt=1, loss=5.0)]
    assert list(losses(run_of(tmp_path, first, again))) == [(1, 1.0), (2, 5.0)]


def a_run(path: Path, *, lr: float = 1.0, scale: float = 1.0, loss: float = 1.0) -> RunDir:
    events = [worker("started", 100, step=0), parameters()]
    for n in range(1, 5):
        update = [lr * 0.01] * len(NAMES)
        events.append(gradients(n, scale=scale if n > 2 else 1.0, update_ratio=update))
        events.append(step(n, loss=loss if n > 3 else 1.0))
    return run_of(path, events)


def test_two_runs_that_are_alike_do_not_part(tmp_path: Path) -> None:
    ours, theirs = a_run(tmp_path / "a"), a_run(tmp_path / "b", scale=1 + 1e-7, loss=1 + 1e-7)
    found = compare(ours, theirs, tolerance=1e-5)
    assert (found.first, found.losses, found.records) == (None, 4, 4)


def test_runs_part_at_the_first_parameter_that_differs(tmp_path: Path) -> None:
    found = compare(a_run(tmp_path / "a"), a_run(tmp_path / "b", scale=1.1), tolerance=1e-5)
    assert found.loss is None
    assert found.gradient is not None
    assert (found.gradient.step, found.gradient.parameter) == (3, "blocks.0.attention.weight")
    assert (found.gradient.field, found.gradient.num_parameters) == ("norm", 3)
    assert found.gradient.values == (2 / 3, pytest.approx(2.2 / 3))


def test_another_learning_rate_shows_in_the_updates_of_the_first_step(tmp_path: Path) -> None:
    found = compare(a_run(tmp_path / "a"), a_run(tmp_path / "b", lr=2.0), tolerance=1e-5)
    assert found.first is not None
    assert (found.first.step, found.first.field) == (1, "update_ratio")


def test_a_loss_that_differs_is_found_without_a_record(tmp_path: Path) -> None:
    found = compare(a_run(tmp_path / "a"), a_run(tmp_path / "b", loss=3.0), tolerance=1e-5)
    assert found.first is not None
    assert (found.first.step, found.first.parameter, found.first.values) == (4, None, (1.0, 3.0))


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        ({"status": ["trained"] * len(NAMES)}, "status", ("frozen", "trained")),
        ({"norm": [0.0] * len(NAMES)}, "norm", (0.5, 0.0)),
    ],
)
def test_every_way_to_differ_is_named(
    tmp_path: Path, change: dict[str, Any], field: str, values: tuple[Any, Any]
) -> None:
    ours = run_of(tmp_path / "a", [worker("started", 1, step=0), parameters(), gradients(4)])
    theirs = run_of(
        tmp_path / "b", [worker("started", 1, step=0), parameters(), gradients(4, **change)]
    )
    found = compare(ours, theirs, tolerance=1e-5).gradient
    assert found is not None
    assert (found.field, found.values) == (field, values)


def test_models_with_other_parameters_differ_by_name(tmp_path: Path) -> None:
    names = [*NAMES[:-1], "other.weight"]
    ours = run_of(tmp_path / "a", [parameters(), gradients(4)])
    theirs = run_of(tmp_path / "b", [parameters(names=names), gradients(4)])
    found = compare(ours, theirs, tolerance=1e-5).gradient
    assert found is not None
    assert (found.parameter, found.values) == ("head.weight", ("head.weight", None))


def test_rounding_noise_of_a_gradient_that_is_zero_in_theory_is_no_difference(
    tmp_path: Path,
) -> None:
    tiny = [[1e-9 * k] * len(NAMES) for k in (1, 2)]
    runs = [
        run_of(tmp_path / str(k), [parameters(), gradients(4, norm=norm, update_ratio=norm)])
        for k, norm in enumerate(tiny)
    ]
    assert compare(*runs, tolerance=1e-5).gradient is None
