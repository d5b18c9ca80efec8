"""The command line: one small function per verb. Everything heavy is imported inside them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from colotrain.errors import ColotrainError, UsageError

app = typer.Typer(
    name="colotrain",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ClickUsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's own class, wherever this version of typer keeps it."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings in Hydra's grammar: recipe=llm-tiny plugin=zero2 train.seed=1.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Force = Annotated[
    bool, typer.Option("--force", help="Run a plan that does not fit in memory all the same.")
]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="A run's name or folder; by default the newest.", show_default=False
    ),
]


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


Sweep = Annotated[
    bool,
    typer.Option("--sweep", help="A run for every combination of values: optim.lr=1e-3,3e-4."),
]


@app.command()
def run(
    overrides: Overrides = None,
    as_json: Json = False,
    force: Force = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Train in the background; print the run's folder.")
    ] = False,
    sweep: Sweep = False,
) -> int:
    """Train, and follow the run until it ends."""
    if sweep:
        from colotrain.cli.sweeps import run_sweep

        return run_sweep(overrides or [], as_json=as_json, force=force)
    from colotrain.cli.run import run as start

    return start(overrides or [], as_json=as_json, force=force, detach=detach)


@app.command()
def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE | RUN",
            help="Settings as for `run`; or a run, to set what it took beside what was predicted.",
            show_default=False,
        ),
    ] = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="Weigh all plugins, micro-batches and recomputation.")
    ] = False,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Two sets of settings, each quoted, side by side."),
    ] = None,
    cross_check: Annotated[
        bool, typer.Option("--trace", help="Check the memory with torch's own tracker (seconds).")
    ] = False,
    svg: Annotated[str, typer.Option(metavar="FILE", help="Write it as a picture.")] = "",
    as_json: Json = False,
) -> int:
    """Show what a run would be, without running it: memory, time, and what fits."""
    from colotrain.cli.plan import plan as show

    return show(
        words or [],
        as_json=as_json,
        advise=advise,
        compare=compare,
        cross_check=cross_check,
        svg=svg,
    )


@app.command()
def verify(
    overrides: Overrides = None,
    plugins: Annotated[str, typer.Option(help="Plugins to check; by default all.")] = "",
    world_sizes: Annotated[
        str, typer.Option(help="Numbers of ranks, as in 1,2,4; by default the plan's.")
    ] = "",
    accumulation: Annotated[str, typer.Option(help="Accumulation steps to check.")] = "1,4",
    optimizer: Annotated[
        str, typer.Option(help="sgd, or recipe: the plan's own (AdamW hides wrong scales).")
    ] = "sgd",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest difference, relative to the largest value; 1e-6 in fp32."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Prove it: compare plugins with one process of plain torch."""
    from colotrain.cli.verify import verify as check

    return check(
        overrides or [],
        plugins=plugins,
        world_sizes=world_sizes,
        accumulation=accumulation,
        optimizer=optimizer,
        steps=steps,
        tolerance=tolerance,
        as_json=as_json,
    )


@app.command()
def resume(name: Run = None, overrides: Overrides = None, as_json: Json = False) -> int:
    """Go on with a run from its newest checkpoint."""
    from colotrain.cli.run import resume as go_on

    if name is not None and ("=" in name or name.startswith(("~", "+"))):
        overrides = [name, *(overrides or [])]
        name = None
    return go_on(name, overrides or [], as_json=as_json)


@app.command()
def submit(
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job's script.")] = False,
    test_only: Annotated[
        bool, typer.Option("--test-only", help="Ask SLURM whether it would take the job.")
    ] = False,
    sweep: Sweep = False,
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="Runs of a sweep at once.", show_default=False)
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> int:
    """Hand a run, or a sweep of runs, to SLURM."""
    from colotrain.cli import submit as module

    what = {"as_json": as_json, "dry_run": dry_run, "test_only": test_only, "force": force}
    if sweep:
        return module.submit_sweep(overrides or [], max_parallel=max_parallel, **what)
    if max_parallel is not None:
        raise UsageError("--max-parallel: expected --sweep beside it", "add --sweep")
    return module.submit(overrides or [], **what)


@app.command(hidden=True)
def node(
    path: Annotated[str, typer.Argument(metavar="RUN_DIR")],
    head: Annotated[str, typer.Option(metavar="HOST:PORT")] = "127.0.0.1:0",
) -> int:
    """A node's part of a run: what the script of a job starts."""
    from colotrain.cli.node import node as take_part

    return take_part(path, head)


@app.command()
def logs(
    name: Run = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the run ends.")] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Of this rank only.", show_default=False)
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Last lines per log.")] = 40,
    as_json: Json = False,
) -> int:
    """Show what the job and the workers of a run print."""
    from colotrain.cli.logs import logs as show

    return show(name, follows=follow, rank=rank, lines=lines, as_json=as_json)


@app.command()
def stop(name: Run = None) -> int:
    """Ask a run to save and stop after the step it is in."""
    from colotrain.cli.runs import stop as ask

    return ask(name)


@app.command()
def runs(
    sweep: Annotated[str, typer.Option(metavar="NAME", help="The results of a sweep.")] = "",
    as_json: Json = False,
) -> int:
    """List the runs under ./runs."""
    if sweep:
        from colotrain.cli.sweeps import print_sweep

        return print_sweep(sweep, as_json=as_json)
    from colotrain.cli.runs import list_runs

    return list_runs(as_json=as_json)


@app.command()
def export(
    name: Run = None,
    to: Annotated[
        str, typer.Option(metavar="DIR", help="A new directory.", show_default=False)
    ] = "",
    step: Annotated[int | None, typer.Option(help="By default the newest checkpoint.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge/--adapter", help="Adapters into the weights, or alone.")
    ] = True,
    form: Annotated[
        str, typer.Option("--format", help="auto, hf (a Hugging Face directory) or safetensors.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16; by default as trained.")] = "",
    shard_size: Annotated[str, typer.Option(help="Largest weights file.")] = "5GB",
    as_json: Json = False,
) -> int:
    """Write a checkpoint as a directory that transformers loads, or as safetensors."""
    from colotrain.cli.export import export as write

    if not to:
        raise UsageError("export: expected --to DIR", "name a new directory")
    return write(
        name,
        to=to,
        step=step,
        form=form,
        adapter_only=not merge,
        dtype=dtype,
        shard_size=shard_size,
        as_json=as_json,
    )


@app.command()
def checkpoints(
    name: Run = None,
    as_json: Json = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare it with its checksum.")
    ] = False,
) -> int:
    """List a run's checkpoints, and say which are complete and intact."""
    from colotrain.cli.checkpoints import list_checkpoints

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
    again: Annotated[bool, typer.Option("--replay", help="Play it from its beginning.")] = False,
) -> int:
    """Watch a run that is live, finished or dead; quitting never stops training."""
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
    param: Annotated[str, typer.Option(metavar="GLOB", help="Only such parameters.")] = "",
    sort: Annotated[str, typer.Option(help="norm, update, zero or name.")] = "",
    top: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask a running job for a record.")] = False,
    noise: Annotated[
        bool, typer.Option("--noise", help="Noise scale, and cosine between micro-batches.")
    ] = False,
    against: Annotated[str, typer.Option(metavar="RUN", help="Where two runs part.")] = "",
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest relative difference for --against.")
    ] = 1e-5,
    csv: Annotated[str, typer.Option(metavar="FILE", help="Write the rows there.")] = "",
    as_json: Json = False,
) -> int:
    """Show every parameter's gradient: norm, status, and why it has none."""
    from colotrain.cli import inspect_grads as module

    if against:
        return module.against(words or [], against, tolerance=tolerance, as_json=as_json)
    choice = module.Choice(param=param, sort=sort, top=top, noise=noise, as_json=as_json, csv=csv)
    return module.inspect_grads(words or [], step=step, live=live, choice=choice)


data_app = typer.Typer(
    rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
)
app.add_typer(data_app, name="data", no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """Look at data before training on them."""


@data_app.command("inspect")
def inspect_data(
    overrides: Overrides = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Which sample to show: its place in the run's order.")
    ] = 0,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    as_json: Json = False,
) -> int:
    """Show counts, lengths, and a sample with what is learned of it."""
    from colotrain.cli.data import inspect

    return inspect(overrides or [], sample=sample, split=split, as_json=as_json)


@app.command()
def doctor(
    overrides: Overrides = None,
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="On every node of an allocation, and between them.")
    ] = False,
    only: Annotated[str, typer.Option(metavar="NAMES", help="Only these checks: name,runs.")] = "",
    as_json: Json = False,
) -> int:
    """Find what could keep a run from starting or from going fast, with the fix for each."""
    from colotrain.cli.doctor import doctor as examine

    return examine(overrides or [], as_json=as_json, all_nodes=all_nodes, only=only)


@app.command()
def import_config(
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False)],
    kind: Annotated[
        str, typer.Option(help="deepspeed, accelerate or lightning; by default its keys tell.")
    ] = "",
    to: Annotated[
        str, typer.Option(metavar="RECIPE", help="By default recipes/NAME.yaml, as the file.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Write the recipe that another tool's configuration amounts to, key by key."""
    from colotrain.cli.import_config import import_config as write

    return write(file, kind=kind, to=to, as_json=as_json)


@app.command()
def plot(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN…", help="Runs to draw; by default the newest."),
    ] = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="A .png or .svg file.")] = "plot.png",
) -> int:
    """Draw loss, gradient norms, memory and throughput of one run or several."""
    from colotrain.cli.plot import plot as draw

    return draw(names or [], out=out)


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
    """What the completion scripts call."""
    from colotrain.cli.completion import complete
    from colotrain.config.shipped import Search

    for candidate in complete(word, Search.at(Path.cwd())):
        sys.stdout.write(f"{candidate}\n")
    return 0


def verbs() -> list[str]:
    """The commands that are shown, in the order of the help."""
    callbacks = [command.callback for command in app.registered_commands if not command.hidden]
    names = [callback.__name__.replace("_", "-") for callback in callbacks if callback is not None]
    return [*names, *(str(group.name) for group in app.registered_groups)]


def main() -> None:
    """The entry point: what people can act on is one line each, a bug is a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(guarded(sys.argv[1:]))


def guarded(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        return app(arguments or ["--help"], standalone_mode=False) or 0
    except ColotrainError as error:
        for line in error.lines():
            sys.stderr.write(f"{line}\n")
        return error.exit_code
    except ClickUsageError as error:
        sys.stderr.write(f"error: {_usage(error)}\n")
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _usage(error: Exception) -> str:
    """Click's message on one line, and where help is."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "colotrain"
    message = getattr(error, "format_message", lambda: str(error))()
    return f"{' '.join(message.split()).rstrip('.')}; see `{path} --help`"
