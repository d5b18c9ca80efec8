"""`colotrain inspect-grads`: the gradients of one step by parameter name, for any plugin."""

from __future__ import annotations

import csv
import dataclasses
import fnmatch
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from colotrain.cli.arguments import refuse, write_file
from colotrain.config.stores import is_address
from colotrain.errors import ColotrainError, UsageError, suggest
from colotrain.events.comparison import Comparison, Difference, compare
from colotrain.events.fold import Fold, follow
from colotrain.events.gradients import GradientRecord, NoiseRecord, ParameterGradient, records
from colotrain.events.kinds import Nonfinite
from colotrain.events.liveness import find, is_waiting, state
from colotrain.events.log import EventReader
from colotrain.events.view import LIVE
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.runs.fetching import GRADIENTS, fetch_if_address
from colotrain.runs.naming import describe_differences
from colotrain.show.charts import STATUS_STYLES
from colotrain.show.console import print_json, stderr_console, stdout_console
from colotrain.show.formatting import clean, shortened, shown
from colotrain.show.terminal import is_live
from colotrain.spec.exit_codes import DONE, UNVERIFIED
from colotrain.spec.plan import RunPlan

POLL_S = 0.1
WITHOUT_TERMINAL = 1000  # columns, so that each parameter is one line, however long its name
ROOMY = 100
"""Columns from which all numbers fit beside unshortened names."""
NARROW = {"RMS", "MAX"}
"""Columns left out on narrower terminals, where names are shortened to `NAME_WIDTH`."""
NAME_WIDTH = 30
TOLERANCE = 1e-5
"""Maximum relative difference between two runs' gradients."""
TITLES = ("PARAMETER", "SHAPE", "STAGE", "STATUS", "NORM", "RMS", "MAX", "ZEROS", "UPDATE")
SORTS = ("norm", "update", "zero", "name")
ORIGIN = ("parameter", "module", "rank", "step", "micro_batch", "phase")
NOT_WITH_NOISE = {
    "pp": "micro-batches overlap on each stage",
    "cp": "each rank has the gradient of parts of samples",
    "ep": "experts have the gradients of all ranks' samples",
    "tp": "each rank has a part of the gradient",
}
"""Axis of the mesh → why the noise cannot be measured where it divides ranks."""
FIELDS = [field.name for field in dataclasses.fields(ParameterGradient)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Rows to show, their order, and the output format."""

    param: str = ""
    sort: str = ""
    """One of `SORTS`; empty: the model's order."""
    top: int | None = None
    noise: bool = False
    as_json: bool = False
    csv: str = ""


def inspect_grads(words: Sequence[str], *, step: int | None, live: bool, choice: Choice) -> int:
    """Show a record of the run named in `words` (default: the newest), or one step of a plan."""
    if choice.sort and choice.sort not in SORTS:
        expected = f"expected one of {', '.join(SORTS)}"
        raise UsageError(f"--sort {choice.sort}: {expected}", suggest(choice.sort, SORTS))
    if any(_is_override(word) for word in words):
        refuse("KEY=VALUE", step=step, live=live)
        return of_one_step(words, choice)
    if len(words) > 1:
        raise UsageError(f"{words[1]}: expected one run", "compare two with --against RUN")
    if live:
        refuse("--live", step=step)
    if live and words and is_address(words[0]):
        raise UsageError(f"--live: {words[0]} is in a store", "ask on the machine that trains")
    rundir = find(fetch_if_address(words[0] if words else None, wanted=GRADIENTS))
    if choice.noise:
        check_noise(rundir.plan())
    record = ask(rundir, noise=choice.noise) if live else recorded(rundir, step)
    if choice.noise and record.noise is None:
        fix = f"ask a running one with `colotrain inspect-grads --live --noise {rundir.argument}`"
        raise UsageError(f"{rundir.name}: the noise of step {record.step} was not measured", fix)
    return show(rundir, record, choice)


def check_noise(plan: RunPlan) -> None:
    """Refuse a step of a single micro-batch: noise is measured between micro-batches."""
    batch = plan.batch
    for axis, why in NOT_WITH_NOISE.items():
        if (size := getattr(plan.mesh, axis)) > 1:
            fix = f"measure it with mesh.{axis}=1"
            raise UsageError(f"--noise: with mesh.{axis}={size} {why}", fix)
    if batch.accumulation_steps * batch.data_parallel < 2:
        raise UsageError(
            f"--noise: a step is one micro-batch of {batch.micro_batch}, and none to compare it to",
            "lower train.micro_batch, or take more ranks",
        )


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith(("~", "+"))


def recorded(rundir: RunDir, step: int | None) -> GradientRecord:
    """Return the record of `step`, or the last one."""
    steps: list[int] = []
    last: GradientRecord | None = None
    for record in records(rundir):
        if record.step == step:
            return record
        steps.append(record.step)
        last = record
    if step is None and last is not None:
        return last
    if not steps:
        now = state(rundir, follow(rundir, ranks={0}))
        fix = "set observe.grads_every, or look at one step of its plan: `inspect-grads KEY=VALUE`"
        if now in LIVE:
            fix = f"ask for one with `colotrain inspect-grads --live {rundir.argument}`, or wait"
        raise UsageError(f"{rundir.name} ({now}): has no gradient records", fix)
    near = ", ".join(map(str, sorted(sorted(steps, key=lambda at: abs(at - (step or 0)))[:6])))
    raise UsageError(f"{rundir.name}: has no record of step {step}", f"near it are {near}")


def ask(rundir: RunDir, *, noise: bool = False, timeout_s: float = 120.0) -> GradientRecord:
    """Ask a running job for a record of its next step, and wait for it."""
    reader, fold = EventReader(rundir, ranks={0}), Fold()
    view = fold.add(reader.drain()).view()
    before, now = view.gradients, state(rundir, view)
    if now not in LIVE or is_waiting(rundir, view):
        raise UsageError(f"{rundir.name}: not running ({now})", "leave --live out for its last")
    rundir.request_grads(noise=noise)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = (view := fold.add(reader.drain()).view()).gradients
        if found is not None and found != before and not (noise and found.noise is None):
            return found
        if (now := state(rundir, view)) not in LIVE:
            raise ColotrainError(f"{rundir.name}: {now} before it made another step", "resume it")
        time.sleep(POLL_S)
    raise ColotrainError(
        f"{rundir.name}: no record after {timeout_s:.0f} s", "is it making steps? `colotrain runs`"
    )


def of_one_step(overrides: Sequence[str], choice: Choice) -> int:
    """Run the first step of a plan in a temporary folder, and show its gradients."""
    from colotrain.launch.server.forkserver import warm_up
    from colotrain.runs.resolving import check_fits, resolve_config
    from colotrain.runs.start import execute

    warm_up()
    resolved = resolve_config(list(overrides))
    check_fits(resolved)
    plan = for_one_step(resolved.plan)
    if choice.noise:
        check_noise(plan)
    with tempfile.TemporaryDirectory(prefix="colotrain-") as folder:
        rundir = RunDir(Path(folder) / plan.name)
        rundir.path.mkdir()
        if choice.noise:
            rundir.request_grads(noise=True)
        exit_code, cause = execute(plan, rundir, None, console=stderr_console())
        found = list(records(rundir))
        if not found:
            raise ColotrainError(cause or "the step left no record", "try `colotrain run`")
        show(rundir, found[-1], choice)
    return exit_code


def for_one_step(plan: RunPlan) -> RunPlan:
    """Return the plan cut to one recorded step, without evaluation, checkpoints and trackers.

    Warm-up and batch are unchanged, so the step is the first step of the full run.
    """
    return dataclasses.replace(
        plan,
        train=dataclasses.replace(
            plan.train, max_steps=1, eval_every=0, eval_steps=0, profile=None
        ),
        observe=dataclasses.replace(
            plan.observe, grads_every=1, trackers=(), notify=None, metrics_port=None
        ),
        checkpoint=dataclasses.replace(plan.checkpoint, enabled=False, resume="none"),
        elastic=dataclasses.replace(plan.elastic, max_restarts=0),
    )


def show(rundir: RunDir, record: GradientRecord, choice: Choice) -> int:
    rows, nonfinite = chosen(record.parameters, choice), follow(rundir, outline=True).nonfinite
    if choice.csv:
        write_csv(choice.csv, rows)
    if choice.as_json:
        print_json(document(rundir, record, rows, nonfinite))
    elif not choice.csv:
        print_table(record, rows, nonfinite)
    return 0


def chosen(rows: Sequence[ParameterGradient], choice: Choice) -> list[ParameterGradient]:
    """Return the rows selected by `choice`; numbers sort in descending order, None last."""
    found = [row for row in rows if not choice.param or _matches(row, choice.param)]
    if choice.param and not found:
        near = suggest(choice.param.strip("*"), (row.name for row in rows))
        raise UsageError(f"--param {choice.param}: no parameter has such a name", near)
    keys = {"norm": "norm", "update": "update_ratio", "zero": "zero_fraction"}
    if choice.sort == "name":
        found.sort(key=lambda row: row.name)
    elif choice.sort:
        found.sort(key=lambda row: _order(getattr(row, keys[choice.sort])))
    return found[: choice.top]


def _matches(row: ParameterGradient, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (row.name, *row.aliases))


def _order(value: float | None) -> float:
    """Return a sort key: NaN first, then descending, None last."""
    if value is None:
        return float("inf")
    return float("-inf") if value != value else -value


def document(
    rundir: RunDir,
    record: GradientRecord,
    rows: Sequence[ParameterGradient],
    nonfinite: Nonfinite | None,
) -> dict[str, Any]:
    """Return the document of `inspect-grads --json`."""
    noise = {} if record.noise is None else {"noise": to_plain(record.noise)}
    return {
        "run": rundir.name,
        "step": record.step,
        "global_norm": record.global_norm,
        "clipped_to": record.clipped_to,
        "parameters": [
            {k: v for k, v in to_plain(row).items() if k != "stages" or v} for row in rows
        ],
        "first_nonfinite": nonfinite and {name: getattr(nonfinite, name) for name in ORIGIN},
        **noise,
    }


def write_csv(path: str, rows: Sequence[ParameterGradient]) -> None:
    text = io.StringIO()
    out = csv.writer(text)
    out.writerow(FIELDS)
    for row in rows:
        plain = to_plain(row)
        plain["shape"] = "x".join(map(str, row.shape))
        plain["aliases"] = " ".join(row.aliases)
        plain["stages"] = " ".join(map(str, row.stages))
        out.writerow([plain[field] for field in FIELDS])
    write_file(path, text.getvalue())


def print_table(
    record: GradientRecord, rows: Sequence[ParameterGradient], nonfinite: Nonfinite | None
) -> None:
    console = stdout_console()
    if not is_live(console):
        console.width = WITHOUT_TERMINAL
    clipped = f", clipped to {shown(record.clipped_to, '.6g')}" if record.clipped_to else ""
    console.print(f"step {record.step}: gradient norm {shown(record.global_norm, '.6g')}{clipped}")
    if nonfinite is not None:
        console.print(clean(f"first not finite: {nonfinite}"), style="bold red")
    if (noise := record.noise) is not None:
        scale = f"{shown(noise.scale, ',.1f')} samples" if noise.scale is not None else "unknown"
        between = f"{noise.micro_batches} micro-batches of {noise.samples}"
        console.print(f"noise scale {scale}, cosine {shown(noise.cosine, '.3f')} between {between}")
    reasons = {row.name: why_of(row) for row in rows}
    if console.width >= ROOMY:
        console.print(_table(record, rows, set() if any(reasons.values()) else {"WHY"}))
        return
    console.print(_table(record, rows, {*NARROW, "WHY"}, name_width=NAME_WIDTH))
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(reasons[row.name], []).append(clean(row.name))
    for why, names in by_reason.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        if why:
            console.print(f"{names[0]}{more}: {why}", markup=False)


def _table(
    record: GradientRecord,
    rows: Sequence[ParameterGradient],
    left_out: set[str],
    *,
    name_width: int | None = None,
) -> Table:
    """Return the table without the columns `left_out`; `name_width` shortens the names."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    if not any(row.stages for row in rows):
        left_out = left_out | {"STAGE"}
    noise_titles = ("NOISE", "COSINE") if record.noise else ()
    titles = [*TITLES, *noise_titles, "WHY"]
    kept = [index for index, title in enumerate(titles) if title not in left_out]
    for title in (titles[index] for index in kept):
        left = title in ("PARAMETER", "STATUS", "WHY")
        fold = title == "WHY" or (title == "PARAMETER" and name_width is None)
        table.add_column(
            title, justify="left" if left else "right", no_wrap=not fold, overflow="fold"
        )
    for row in rows:
        made = cells(row, record.noise)
        if name_width is not None:
            made[0] = Text(shortened(made[0].plain, name_width))
        table.add_row(*(made[index] for index in kept))
    return table


def why_of(row: ParameterGradient) -> str:
    """Return what there is to say about a row: its reason, bad values, and shared names."""
    why = [row.reason] if row.reason else []
    why += [f"{row.nonfinite} elements are not finite"] if row.nonfinite else []
    why += [f"tied to {', '.join(row.aliases)}"] if row.aliases else []
    return clean("; ".join(why))


def cells(row: ParameterGradient, noise: NoiseRecord | None) -> list[Text]:
    of_row = None if noise is None else noise.parameters.get(row.name)
    return [
        Text(clean(row.name)),
        Text("×".join(map(str, row.shape)) or "scalar"),
        Text(", ".join(map(str, row.stages))),
        Text(clean(row.status), STATUS_STYLES.get(row.status, "")),
        *(Text(shown(value, ".4g")) for value in (row.norm, row.rms, row.max_abs)),
        Text(shown(row.zero_fraction, ".1%")),
        Text(shown(row.update_ratio, ".2e")),
        *([Text(shown(of_row.scale, ".4g")), Text(shown(of_row.cosine, ".3f"))] if of_row else []),
        Text(why_of(row)),
    ]


def against(words: Sequence[str], other: str, *, tolerance: float, as_json: bool) -> int:
    """Print the first step and parameter at which two runs differ; return 4 if they do, else 0."""
    if len(words) > 1 or any(_is_override(word) for word in words):
        raise UsageError("--against: expected two runs that were made", "name them, not settings")
    first, second = find(words[0] if words else None), RunDir.find(other)
    found = compare(first, second, tolerance=tolerance)
    if not found.losses and not found.records:
        raise UsageError(f"{first.name} and {second.name}: they share no step", "run them longer")
    exit_code = DONE if found.first is None else UNVERIFIED
    if as_json:
        names = {"run": first.name, "against": second.name, "tolerance": tolerance}
        print_json({**names, "same": found.first is None, **to_plain(found)})
        return exit_code
    for line in _report(found, first.name, second.name, tolerance):
        sys.stdout.write(f"{clean(line)}\n")
    for line in describe_differences([first, second]):
        sys.stdout.write(f"{clean(line)}\n")
    return exit_code


def _report(found: Comparison, first: str, second: str, tolerance: float) -> list[str]:
    seen = f"{found.losses} losses and {found.records} gradient records"
    if found.first is None:
        return [f"{first} and {second}: no difference above {tolerance:g} in {seen}"]
    parts = [part for part in (found.loss, found.gradient) if part is not None]
    lines = [_part(part, first, second) for part in sorted(parts, key=lambda part: part.step)]
    if found.loss is None and found.losses:
        lines.append(f"the losses of {found.losses} steps agree within {tolerance:g}")
    return lines


def _part(part: Difference, first: str, second: str) -> str:
    ours, theirs = (_value(value) for value in part.values)
    what = f"{part.field} of {part.parameter}" if part.parameter else part.field
    more = f" ({part.num_parameters} parameters differ)" if part.num_parameters > 1 else ""
    return f"step {part.step}: {what}: {first} {ours}, {second} {theirs}{more}"


def _value(value: float | str | None) -> str:
    return shown(value, ".9g") if not isinstance(value, str) else value
