"""`colotrain export`: write a checkpoint as a directory that other programs load."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colotrain.config.sizes import parse_size
from colotrain.errors import ColotrainError, ConfigError, UsageError, shortened, suggest
from colotrain.events.liveness import find
from colotrain.rundir import RunDir
from colotrain.runs import trust
from colotrain.runs.fetching import PLANS, fetch_if_address
from colotrain.show.console import print_json, stderr_console, stdout_console
from colotrain.show.progress import preparation
from colotrain.spec.exit_codes import DONE, UNVERIFIED
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import format_size

if TYPE_CHECKING:
    from colotrain.export.write import Exported

CHECKED = ("model", "data")
"""Sections of a plan that a check runs code and reads files of."""
MOST_OF_REASON = 400
"""Characters of why a run cannot be used."""
FORMATS = ("auto", "hf", "safetensors")
DTYPES = ("float32", "bfloat16", "float16", "float64")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def export(
    run: str | None,
    *,
    to: str,
    step: int | None,
    form: str,
    adapter_only: bool,
    dtype: str,
    shard_size: str,
    check: bool = False,
    as_json: bool,
    trust_code: bool = False,
) -> int:
    """Write the model of a run's checkpoint to the directory `to`, and print what was written.

    With `check` the directory is read again as its users read it, also one that is there already.
    """
    if check and not to and run is not None:
        return recheck(Path(run), as_json=as_json, trust_code=trust_code)
    if not to:
        raise UsageError("export: expected --to DIR", "name a new directory")
    rundir = find(fetch_if_address(run, wanted=PLANS, checkpoint=True, step=step))
    rundir.check_files()
    if form not in FORMATS:
        raise UsageError(f"--format {form}: expected one of {', '.join(FORMATS)}", _hint(form))
    dtype = SHORT.get(dtype, dtype)
    if dtype and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}", _hint(dtype))
    shard_bytes = _shard_bytes(shard_size)
    read = CHECKED if check else ("model", "data.tokenizer", "data.chat_template")
    plan = rundir.plan()
    trust.check(rundir, plan, trusted=trust_code, only=read)
    from colotrain.export.job import Choice
    from colotrain.export.write import export as write

    if check and Path(to).is_dir() and any(Path(to).iterdir()):
        return _check(rundir, plan, Path(to), step=step, as_json=as_json, done=None)

    choice = Choice(
        step=step,
        format=form,
        adapter_only=adapter_only,
        dtype=dtype or None,
        shard_bytes=shard_bytes,
    )
    with preparation(stderr_console()) as progress:
        done = write(rundir, plan, Path(to), choice, progress=progress)
    if not as_json:
        _show(done)
    if check:
        return _check(rundir, plan, Path(to), step=done.step, as_json=as_json, done=done)
    if as_json:
        print_json(asdict(done))
    return DONE


def recheck(folder: Path, *, as_json: bool, trust_code: bool) -> int:
    """Check a directory by its receipt: with its run where that can be used, or else alone."""
    from colotrain.export.check import read_receipt
    from colotrain.export.check import recheck as read_alone

    about = read_receipt(folder)
    try:
        rundir, plan = _run_at(Path(about["run"]["path"]), trust_code=trust_code)
        step = int(about["run"]["step"])
        return _check(rundir, plan, folder, step=step, as_json=as_json, done=None)
    except (UsageError, ConfigError) as error:
        if not about["files"]:
            problem = f"{folder}: its run cannot be used ({error.problem})"
            raise UsageError(problem, "check it with its run: no check has passed") from error
        note = f"checked without its run: {shortened(error.problem, MOST_OF_REASON)}"
    receipt = read_alone(folder, note=note, loads_base=trust_code)
    return _report(receipt, folder, as_json=as_json, done=None, alone=True)


def _run_at(path: Path, *, trust_code: bool) -> tuple[RunDir, RunPlan]:
    """The run at a path and its plan; raises `UsageError` where it cannot be used."""
    rundir = RunDir(path)
    try:
        is_run = rundir.plan_file.is_file()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if not is_run:
        raise UsageError(f"{path}: there is no run")
    rundir.check_files()
    try:
        plan = rundir.plan()
    except ColotrainError as error:
        raise UsageError(error.problem, error.fix) from error
    trust.check(rundir, plan, trusted=trust_code, only=CHECKED)
    return rundir, plan


def _check(
    rundir: RunDir,
    plan: RunPlan,
    folder: Path,
    *,
    step: int | None,
    as_json: bool,
    done: Exported | None,
) -> int:
    from colotrain.export.check import RECEIPT, check, read_receipt
    from colotrain.export.source import choose

    if step is None and (folder / RECEIPT).is_file():
        step = int(read_receipt(folder)["run"]["step"])
    checkpoint = choose(rundir, step)
    repeat = shlex.join(["colotrain", "export", str(folder), "--check"])
    receipt = check(rundir, plan, checkpoint, folder, repeat=repeat)
    return _report(receipt, folder, as_json=as_json, done=done)


def _report(
    receipt: dict[str, Any],
    folder: Path,
    *,
    as_json: bool,
    done: Exported | None,
    alone: bool = False,
) -> int:
    """Print what a check found, with the run or by the receipt `alone`; returns the exit code."""
    if as_json:
        print_json({**(asdict(done) if done is not None else {}), "receipt": receipt})
        return DONE if receipt["passed"] else UNVERIFIED
    console, loss, outputs = stdout_console(), receipt["validation_loss"], receipt["outputs"]
    if loss.get("export") is not None and loss.get("run") is not None:
        said = f"validation loss {loss['export']:.6g}, in the run {loss['run']:.6g}"
        console.print(f"checked: {said}", soft_wrap=True)
    if outputs["largest_difference"] is not None:
        said = f"{outputs['kind']} of {outputs['samples']} samples differ by at most"
        console.print(f"checked: {said} {outputs['largest_difference']:.2g}", soft_wrap=True)
    if alone:
        console.print(f"checked: SHA-256 of {len(receipt['files'])} files")
    for note in receipt["notes"]:
        console.print(f"note: {note}", soft_wrap=True)
    for problem in receipt["problems"]:
        console.print(f"differs: {problem}", soft_wrap=True)
    agrees = "the export is as its receipt says" if alone else "the export is what was trained"
    verdict = agrees if receipt["passed"] else "the export DIFFERS"
    console.print(f"{verdict}: {folder / 'receipt.json'}", soft_wrap=True)
    return DONE if receipt["passed"] else UNVERIFIED


def _hint(word: str) -> str:
    return suggest(word, (*FORMATS, *DTYPES))


def _shard_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"--shard-size {text}: expected {error}", "as in 5GB") from error


def _show(done: Exported) -> None:
    console = stdout_console()
    what = {"hf": "Hugging Face directory", "peft": "adapter in PEFT's format"}
    console.print(
        f"{what.get(done.format, 'safetensors')} of step {done.step}: {done.to}", soft_wrap=True
    )
    console.print(
        f"{done.tensors} tensors, {format_size(done.bytes)}: {', '.join(done.files)}",
        soft_wrap=True,
    )
    for note in done.notes:
        console.print(f"note: {note}", soft_wrap=True)
