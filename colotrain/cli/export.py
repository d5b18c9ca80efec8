"""`colotrain export`: write a checkpoint as a directory that other programs load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from colotrain.config.sizes import parse_size
from colotrain.errors import UsageError, suggest
from colotrain.events.liveness import find
from colotrain.runs import trust
from colotrain.runs.fetching import PLANS, fetch_if_address
from colotrain.show.console import print_json, stderr_console, stdout_console
from colotrain.show.progress import preparation
from colotrain.spec.quantities import format_size

if TYPE_CHECKING:
    from colotrain.export.write import Exported

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
    as_json: bool,
    trust_code: bool = False,
) -> int:
    """Write the model of a run's checkpoint to the directory `to`, and print what was written."""
    rundir = find(fetch_if_address(run, wanted=PLANS, checkpoint=True, step=step))
    if form not in FORMATS:
        raise UsageError(f"--format {form}: expected one of {', '.join(FORMATS)}", _hint(form))
    dtype = SHORT.get(dtype, dtype)
    if dtype and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}", _hint(dtype))
    shard_bytes = _shard_bytes(shard_size)
    trust.check(rundir, rundir.plan(), trusted=trust_code, only={"model.target"})
    from colotrain.export.job import Choice
    from colotrain.export.write import export as write

    choice = Choice(
        step=step,
        format=form,
        adapter_only=adapter_only,
        dtype=dtype or None,
        shard_bytes=shard_bytes,
    )
    with preparation(stderr_console()) as progress:
        done = write(rundir, Path(to), choice, progress=progress)
    if as_json:
        print_json(asdict(done))
    else:
        _show(done)
    return 0


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
    console.print(f"{what.get(done.format, 'safetensors')} of step {done.step}: {done.to}")
    console.print(f"{done.tensors} tensors, {format_size(done.bytes)}: {', '.join(done.files)}")
    for note in done.notes:
        console.print(f"note: {note}")
