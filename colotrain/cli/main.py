"""The command line: one small function per command, with all heavy imports inside."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from colotrain.cli import cluster, inputs
from colotrain.cli.arguments import (
    Check,
    Force,
    Json,
    Out,
    Overrides,
    Overwrite,
    Run,
    RunsDir,
    Smoke,
    Sweep,
    TrustCode,
    TrustPlan,
    refuse,
    written_to,
)
from colotrain.errors import ColotrainError, UsageError, of_system, one_line
from colotrain.show.symbols import TO_ASCII
from colotrain.spec.exit_codes import INTERRUPTED

app = typer.Typer(
    name="colotrain",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ClickUsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's own class, found without its module, which differs between versions of typer."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        sys.stdout.write(f"colotrain {metadata.version('colotrain')}\n")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Distributed PyTorch training: change the plugin, and nothing else changes."""


@app.command()
def run(
    overrides: Overrides = None,
    as_json: Json = False,
    force: Force = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Train in the background; print the run's folder.")
    ] = False,
    sweep: Sweep = False,
    smoke: Smoke = False,
    overwrite: Overwrite = False,
) -> int:
    """Train, and follow the run until it ends."""
    if sweep:
        refuse("--sweep", detach=detach, smoke=smoke)
        from colotrain.runs.sweep import run_sweep

        return run_sweep(overrides or [], as_json=as_json, force=force, overwrite=overwrite)
    if not detach:
        from colotrain.launch.server.forkserver import warm_up

        warm_up()  # before any other import here
    from colotrain.runs import start

    return start.run(
        overrides or [],
        as_json=as_json,
        force=force,
        detach=detach,
        smoke_run=smoke,
        overwrite=overwrite,
        began_at=start.command_began_at(),
    )


@app.command()
def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE | RUN",
            help="Settings as for `run`; or a run, to compare its prediction with its measurement.",
            show_default=False,
        ),
    ] = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="Compare all plugins, micro-batches and recomputation.")
    ] = False,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Two sets of settings, each quoted, side by side."),
    ] = None,
    cross_check: Annotated[
        bool, typer.Option("--trace", help="Check the memory with torch's own tracker (seconds).")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure this machine's CPUs (20 seconds); kept for later plans."
        ),
    ] = False,
    svg: Annotated[str, typer.Option(metavar="FILE", help="Write the plan as a picture.")] = "",
    as_json: Json = False,
) -> int:
    """Show a run before it runs: memory, time, what fits."""
    if any(word.startswith("model.target=") for word in words or []):
        from colotrain.launch.server.forkserver import warm_up

        warm_up(to_plan=True)
    from colotrain.cli.plan import plan as show

    return show(
        words or [],
        as_json=as_json,
        advise=advise,
        compare=compare,
        cross_check=cross_check,
        measure=measure,
        svg=svg,
    )


@app.command()
def verify(
    overrides: Overrides = None,
    plugins: Annotated[str, typer.Option(help="Plugins to check; by default all.")] = "",
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks; by default the plan's.")] = "",
    pp: Annotated[str, typer.Option(help="Values of mesh.pp; by default the plan's.")] = "",
    cp: Annotated[str, typer.Option(help="Values of mesh.cp; by default the plan's.")] = "",
    tp: Annotated[str, typer.Option(help="Values of mesh.tp; by default the plan's.")] = "",
    ep: Annotated[str, typer.Option(help="Values of mesh.ep; by default the plan's.")] = "",
    accumulation: Annotated[str, typer.Option(help="Accumulation steps to check.")] = "1,4",
    freeze: Annotated[
        str, typer.Option(help="auto: nothing, and further sets; none: what the plan freezes.")
    ] = "auto",
    optimizer: Annotated[str, typer.Option(help="sgd, or recipe: the plan's own.")] = "sgd",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    resume: Annotated[
        bool, typer.Option("--resume", help="Stop each case in the middle, and resume it.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest difference, relative to the largest value; 1e-6 in fp32."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare plugins with one process of plain torch."""
    from colotrain.cli.verify import verify as check

    return check(
        overrides or [],
        plugins=plugins,
        world_sizes=world_sizes,
        axes={"pp": pp, "cp": cp, "tp": tp, "ep": ep},
        accumulation=accumulation,
        freeze=freeze,
        optimizer=optimizer,
        steps=steps,
        resume=resume,
        tolerance=tolerance,
        as_json=as_json,
    )


@app.command()
def resume(
    name: Run = None,
    overrides: Overrides = None,
    as_json: Json = False,
    force: Force = False,
    trust_code: TrustCode = False,
    trust_plan: TrustPlan = None,
) -> int:
    """Continue a run from its newest checkpoint."""
    from colotrain.runs.start import resume as go_on

    words = overrides or []
    if name is not None and ("=" in name or name.startswith(("~", "+"))):
        words, name = [name, *words], None
    return go_on(
        name, words, as_json=as_json, force=force, trust_code=trust_code, digest=trust_plan
    )


@app.command()
def stop(name: Run = None, as_json: Json = False) -> int:
    """Ask a run to save and stop after the step it is in."""
    from colotrain.runs.listing import stop as ask

    return ask(name, as_json=as_json)


@app.command()
def runs(
    store: RunsDir = None,
    sweep: Annotated[str, typer.Option(metavar="NAME", help="The results of a sweep.")] = "",
    as_json: Json = False,
) -> int:
    """List the runs under ./runs."""
    from colotrain.cli.runs import list_runs

    return list_runs(store, sweep=sweep, as_json=as_json)


@app.command()
def export(
    name: Run = None,
    to: Annotated[
        str, typer.Option(metavar="DIR", help="New directory to write.", show_default=False)
    ] = "",
    step: Annotated[int | None, typer.Option(help="Its step; by default the newest.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge/--adapter", help="Merge adapters, or write them alone.")
    ] = True,
    form: Annotated[
        str, typer.Option("--format", help="auto, hf (a Hugging Face directory) or safetensors.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16; else model.hf's, or trained.")] = "",
    shard_size: Annotated[str, typer.Option(help="Size limit of a weights file.")] = "5GB",
    check: Check = False,
    as_json: Json = False,
    trust_code: TrustCode = False,
    out: Out = "",
) -> int:
    """Write a checkpoint for transformers, or as safetensors."""
    from colotrain.cli.export import export as write

    return write(
        name,
        to=written_to(to, out),
        step=step,
        form=form,
        adapter_only=not merge,
        dtype=dtype,
        shard_size=shard_size,
        check=check,
        as_json=as_json,
        trust_code=trust_code,
    )


@app.command()
def checkpoints(
    name: Run = None,
    as_json: Json = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare it with its checksum.")
    ] = False,
) -> int:
    """List a run's checkpoints, and which are intact."""
    from colotrain.runs.checkpoints import list_checkpoints

    return list_checkpoints(name, as_json=as_json, verify=verify)


@app.command()
def dashboard(
    name: Run = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame.")] = False,
    as_json: Json = False,
    svg: Annotated[str, typer.Option(metavar="FILE", help="Write a frame as a picture.")] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="Write a frame as a page.")] = "",
    focus: Annotated[
        str, typer.Option("--view", help="overview, gradients, ranks or output.")
    ] = "overview",
    again: Annotated[bool, typer.Option("--replay", help="Replay it from the start.")] = False,
) -> int:
    """Watch a run; quitting never stops it."""
    from colotrain.cli.dashboard import dashboard as show

    return show(name, once=once, as_json=as_json, svg=svg, html=html, again=again, focus=focus)


@app.command()
def inspect_grads(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] | KEY=VALUE",
            help="A run (by default the newest); or settings, whose first step is run and shown.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="By default the last recorded.")] = None,
    param: Annotated[str, typer.Option(metavar="GLOB", help="Only parameters of such names.")] = "",
    sort: Annotated[str, typer.Option(help="norm, update, zero or name.")] = "",
    top: Annotated[int | None, typer.Option(min=1, help="Only the first N.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask a running job for a record.")] = False,
    noise: Annotated[
        bool, typer.Option("--noise", help="Noise scale, and cosine between micro-batches.")
    ] = False,
    against: Annotated[
        str, typer.Option(metavar="RUN", help="Where two runs differ first; exit code 4 if so.")
    ] = "",
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest relative difference for --against: 1e-5.")
    ] = None,
    csv: Annotated[str, typer.Option(metavar="FILE", help="Write the rows there.")] = "",
    as_json: Json = False,
) -> int:
    """Show every parameter's gradient, or why it has none."""
    from colotrain.cli import inspect_grads as module

    if against:
        rows = {"param": param, "sort": sort, "top": top, "csv": csv}
        refuse("--against", step=step, live=live, noise=noise, **rows)
        limit = module.TOLERANCE if tolerance is None else tolerance
        return module.against(words or [], against, tolerance=limit, as_json=as_json)
    if tolerance is not None:
        raise UsageError("--tolerance: expected --against RUN beside it", "name the other run")
    choice = module.Choice(param=param, sort=sort, top=top, noise=noise, as_json=as_json, csv=csv)
    return module.inspect_grads(words or [], step=step, live=live, choice=choice)


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", show_default=False)],
) -> int:
    """Print a script for tab completion in a shell.

    For bash: `source <(colotrain completion bash)`.
    """
    from colotrain.cli.completion import SHELLS, script

    if shell not in SHELLS:
        raise UsageError(f"completion {shell}: expected one of {', '.join(SHELLS)}")
    sys.stdout.write(script(shell, verbs()))
    return 0


@app.command("__complete", hidden=True)
def complete_word(word: Annotated[str, typer.Argument()] = "") -> int:
    """Print the completions of a word, for the completion scripts."""
    from colotrain.cli.completion import complete
    from colotrain.config.shipped import Search

    for candidate in complete(word, Search.at(Path.cwd())):
        sys.stdout.write(f"{candidate}\n")
    return 0


inputs.register(app)
cluster.register(app)


def verbs() -> list[str]:
    """Return the visible commands, in the order of the help."""
    callbacks = [command.callback for command in app.registered_commands if not command.hidden]
    names = [callback.__name__.replace("_", "-") for callback in callbacks if callback is not None]
    return [*names, *(str(group.name) for group in app.registered_groups)]


def main() -> int:
    """Return the exit code: user errors are printed as one line each, bugs as tracebacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=TO_ASCII)
    code = guarded(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # its reader (`| head`) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or 1  # as click does when it notices this earlier
    return code


def guarded(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        code = app(arguments or ["--help"], standalone_mode=False) or 0
        if not arguments:
            from colotrain.cli.next_steps import next_steps

            sys.stdout.write("Here:\n" + "".join(f"  {line}\n" for line in next_steps()))
        return code
    except ColotrainError as error:
        for line in error.lines():
            sys.stderr.write(f"{line}\n")
        return error.exit_code
    except ClickUsageError as error:
        from colotrain.cli.options import explain

        sys.stderr.write(one_line(f"error: {explain(error, arguments)}") + "\n")
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (OSError, RuntimeError) as error:
        if (known := of_system(error)) is None:
            raise
        sys.stderr.write(f"{known.lines()[0]}\n")
        return known.exit_code
