"""`colotrain verify`: compare all plugins with plain torch on the user's own model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from colotrain.errors import ConfigError, DoesNotFit, Problem, suggest
from colotrain.launch.server.compiler import postpone_compiler
from colotrain.launch.server.forkserver import warm_up
from colotrain.launch.startup import ended_by_signals
from colotrain.runs.resolving import ResolvedConfig, resolve_config
from colotrain.show.console import print_json, stderr_console, stdout_console
from colotrain.spec.exit_codes import DONE, UNVERIFIED
from colotrain.spec.plan import DataPlan, RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.spec.quantities import format_size, short_duration
from colotrain.verify.cases import AXES, all_cases, batch_size, freeze_sets

if TYPE_CHECKING:
    from colotrain.verify.compare import CaseResult

OPTIMIZERS = ("sgd", "recipe")
FREEZES = ("auto", "none")
WORTH_SAYING_S = 60.0
SGD = {
    "name": "sgd",
    "lr": 0.1,
    "betas": [0.9, 0.95],
    "weight_decay": 0.01,
    "schedule": {"name": "linear", "warmup_steps": 1, "min_lr_ratio": 0.5},
}
"""Optimizer used by default: AdamW hides a wrongly scaled gradient, SGD shows it."""


def verify(
    overrides: list[str],
    *,
    plugins: str,
    world_sizes: str,
    axes: dict[str, str],
    accumulation: str,
    freeze: str,
    optimizer: str,
    steps: int,
    resume: bool,
    tolerance: float | None,
    as_json: bool,
) -> int:
    """Compare plugins with one process of plain torch; return 0 if all agree, 4 otherwise.

    `axes` has the values of each axis of the mesh, such as 1,2 for cp; "" for the plan's own.
    `freeze` is none where nothing but the plan's own patterns is to be frozen. With `resume` each
    case stops in the middle, and goes on from its checkpoint.
    """
    postpone_compiler()
    names = _names(plugins) if plugins else list(ROWS)
    sizes = _numbers("--world-sizes", world_sizes) if world_sizes else []
    cuts = _numbers("--accumulation", accumulation)
    fix = "recipe is the plan's own optimizer, whatever it is"
    _check_choice("--optimizer", optimizer, OPTIMIZERS, fix)
    if resume and steps == 1:
        fix = "leave one of both out"
        raise ConfigError([Problem(key="--steps", value=1, expected="2 with --resume", fix=fix)])
    _check_choice("--freeze", freeze, FREEZES, "none freezes nothing but what the plan freezes")
    warm_up()
    resolved = resolve_config(overrides)
    _check_reference(resolved, steps)
    plans = _plans(
        resolved,
        plugins=names,
        world_sizes=sizes or [resolved.plan.world_size],
        axes={
            axis: _numbers(f"--{axis}", text) if text else [getattr(resolved.plan.mesh, axis)]
            for axis, text in axes.items()
        },
        accumulation=cuts,
        freezes=freeze == "auto",
        optimizer=optimizer,
        steps=steps,
        resumes=resume,
    )
    console = stderr_console()
    _tell_duration(console, plans, steps)
    results = _compare(plans, resolved.plan.data, tolerance, console)
    return _report(results, console, as_json=as_json)


def _compare(
    plans: Sequence[RunPlan], data: DataPlan, tolerance: float | None, console: Console
) -> list[CaseResult]:
    """Prepare the data, and run the cases and the reference in a folder of their own."""
    from colotrain.data.prepare.tokens import prepare_all
    from colotrain.show.progress import preparation
    from colotrain.verify.compare import Tolerance
    from colotrain.verify.runner import verify as run_cases

    limits = None
    if tolerance is not None:
        limits = Tolerance(loss=tolerance, gradient=tolerance, parameter=tolerance)
    with preparation(console) as progress, ended_by_signals("stopped", "begin it again"):
        if data.source != "target":
            prepare_all(data, progress=progress)
        with _folder_of_cases() as folder:
            return list(run_cases(plans, folder, tolerance=limits, progress=progress))


def _report(results: Sequence[CaseResult], console: Console, *, as_json: bool) -> int:
    """Show the results, and return the exit code that they amount to."""
    from colotrain.verify.compare import to_json

    if as_json:
        print_json(to_json(results))
    else:
        stdout_console().print(_table(results))
    for note in _notes(results):
        console.print(f"note: {note}", soft_wrap=True)
    wrong = [result for result in results if not result.passed]
    for result in wrong[:1]:
        console.print(f"error: {_describe(result)}", soft_wrap=True)
    return UNVERIFIED if wrong else DONE


def _tell_duration(console: Console, plans: Sequence[RunPlan], steps: int) -> None:
    """Say how long the cases are going to take, where one would wonder."""
    seconds = steps * sum(plan.time.step_s for plan in plans)
    if seconds > WORTH_SAYING_S:
        text = f"note: {len(plans)} cases of {steps} steps: about {short_duration(seconds)}"
        console.print(f"{text}, and the reference beside them", soft_wrap=True)


@contextmanager
def _folder_of_cases() -> Iterator[Path]:
    """A folder that is gone afterwards, but where workers failed: that error names it."""
    from colotrain.verify.runner import WorkersFailed

    folder = tempfile.mkdtemp(prefix="colotrain-verify-")
    try:
        yield Path(folder)
    except WorkersFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)


def _check_reference(resolved: ResolvedConfig, steps: int) -> None:
    """Refuse a reference that this machine's memory certainly cannot hold (`DoesNotFit`)."""
    from colotrain.verify.reference import min_bytes

    least = min_bytes(resolved.survey.parameters, steps=steps)
    room = resolved.context.machine.host_memory_bytes
    if least > room:
        raise DoesNotFit(
            f"the reference, one process that keeps all values of {steps} steps in float64, needs "
            f"at least {format_size(least)}, of {format_size(room)}",
            "verify a smaller model of the same kind (model.args.num_layers=2), or fewer --steps",
        )


def _plans(
    resolved: ResolvedConfig,
    *,
    plugins: Sequence[str],
    world_sizes: Sequence[int],
    axes: Mapping[str, Sequence[int]],
    accumulation: Sequence[int],
    freezes: bool,
    optimizer: str,
    steps: int,
    resumes: bool,
) -> list[RunPlan]:

    freeze = resolved.plan.freeze
    own = bool(freeze.patterns or freeze.unfreeze) or not freezes
    cases = all_cases(
        plugins=plugins,
        world_sizes=world_sizes,
        axes=axes,
        accumulation=accumulation,
        freezes=freeze_sets(resolved.survey.parameters, own=own),
    )
    if not (found := list(cases)):
        above_one = [axis for axis in reversed(AXES) if max(axes[axis]) > 1]
        key, values = f"--{above_one[0]}", axes[above_one[0]]
        others = " and ".join(f"--{axis}" for axis in above_one[1:])
        whose = f"with {others} a product that divides one" if others else "a divisor"
        expected = f"{whose} of one of the world sizes {', '.join(map(str, world_sizes))}"
        value, fix = ", ".join(map(str, values)), f"for example --world-sizes 2,4 {key} 1,2"
        raise ConfigError([Problem(key=key, value=value, expected=expected, fix=fix)])
    of_micro_batch = 2 if resolved.survey.batch_norms else 1  # one sample has no variance
    global_batch = batch_size(world_sizes, accumulation) * of_micro_batch
    config = resolved.config if optimizer == "recipe" else {**resolved.config, "optim": SGD}
    return [
        resolved.resolve(
            case.apply(config, global_batch=global_batch, steps=steps, resumes=resumes)
        )
        for case in found
    ]


def _names(text: str) -> list[str]:
    names = _split("--plugins", text, example="zero2,gemini")
    problems = [
        Problem(key="--plugins", value=name, expected="a plugin", fix=suggest(name, ROWS))
        for name in names
        if name not in ROWS
    ]
    if problems:
        raise ConfigError(problems)
    return names


def _numbers(option: str, text: str) -> list[int]:
    parts = _split(option, text, example="1,2")
    fix = f"for example {option} 1,2"
    problems = [
        Problem(key=option, value=part, expected="positive numbers", fix=fix)
        for part in parts
        if not part.isdecimal() or int(part) < 1
    ]
    if problems:
        raise ConfigError(problems)
    return [int(part) for part in parts]


def _split(option: str, text: str, *, example: str) -> list[str]:
    """Split at commas; raise `ConfigError` for no words, which would verify nothing."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        fix = f"for example {option} {example}"
        raise ConfigError([Problem(key=option, value=text, expected="at least one", fix=fix)])
    return words


def _check_choice(option: str, value: str, choices: Sequence[str], fix: str) -> None:
    if value not in choices:
        expected = ", or ".join(choices)
        raise ConfigError([Problem(key=option, value=value, expected=expected, fix=fix)])


def _table(results: Sequence[CaseResult]) -> Table:
    table = Table(box=None, pad_edge=False)
    axes = [axis for axis in AXES if any(getattr(r, axis) > 1 for r in results)]
    names = ["plugin", "ranks", *axes, "accumulation", "frozen by"]
    for name in (*names, "loss", "gradient", "parameter", "steps"):
        table.add_column(name, justify="left" if name in ("plugin", "frozen by") else "right")
    table.add_column("")
    for result in results:
        table.add_row(*_cells(result, axes=axes))
    return table


def _cells(result: CaseResult, *, axes: Sequence[str]) -> tuple[Any, ...]:
    patterns = len(result.freeze)
    verdict = Text("same", style="green") if result.passed else Text("DIFFERS", style="bold red")
    if result.draws and not result.passed:
        verdict = Text("random", style="yellow")
    return (
        result.plugin,
        str(result.world_size),
        *(str(getattr(result, axis)) for axis in axes),
        str(result.accumulation_steps),
        f"{patterns} pattern{'s' * (patterns != 1)}" if patterns else "nothing",
        f"{result.max_abs_loss:.1e}",
        f"{result.max_abs_gradient:.1e}",
        f"{result.max_abs_parameter:.1e}",
        f"{result.optimizer_steps}/{result.expected_optimizer_steps}",
        verdict,
    )


def _notes(results: Sequence[CaseResult]) -> Iterator[str]:
    """Say what makes a comparison weaker than it seems."""
    if why := next((result.not_exact for result in results if result.not_exact), ""):
        yield f"the reference is less exact: in float64 the model fails ({why})"
    if zeros := max((result.zero_gradients for result in results), default=0):
        yield (
            f"{zeros} parameters had gradients of zeros alone, as those before a layer that begins "
            "with zeros, which prove little: compare more --steps"
        )


def _describe(result: CaseResult) -> str:
    sizes = [(axis, getattr(result, axis)) for axis in AXES]
    axes = "".join(f", mesh.{axis}={size}" for axis, size in sizes if size > 1)
    return (
        f"{result.plugin} on {result.world_size} ranks"
        f"{axes}, accumulation "
        f"{result.accumulation_steps}: {result.difference}"
    )
