"""Commands on inputs and results of runs, and on other programs: data, plot, audit, …"""

from __future__ import annotations

from typing import Annotated

import typer

from colotrain.cli.arguments import Json, Out, Overrides, Run, written_to

data_app = typer.Typer(
    rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
)


@data_app.callback()
def data() -> None:
    """Inspect data before training."""


@data_app.command("inspect")
def inspect_data(
    overrides: Overrides = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Sample to show: its position in the order of the run.")
    ] = 0,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    as_json: Json = False,
) -> int:
    """Show counts, lengths, and a sample with its loss mask."""
    from colotrain.cli.data import inspect

    return inspect(overrides or [], sample=sample, split=split, as_json=as_json)


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    settings: Overrides = None,
    as_json: Json = False,
) -> int:
    """Write a recipe with comments, for a model and data.

    Both are looked at: `colotrain new chat model.hf=DIRECTORY data.path=FILE`.
    """
    from colotrain.cli.new import new as write

    return write(name, settings or [], as_json=as_json)


def import_config(
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False)],
    kind: Annotated[
        str,
        typer.Option(
            help="deepspeed, accelerate, lightning, axolotl, llamafactory or torchtune; by default "
            "judged by its keys."
        ),
    ] = "",
    to: Annotated[
        str,
        typer.Option(
            metavar="RECIPE", help="Recipe to write; by default recipes/NAME.yaml, named as FILE."
        ),
    ] = "",
    as_json: Json = False,
    out: Out = "",
) -> int:
    """Write another tool's configuration as a recipe."""
    from colotrain.cli.import_config import import_config as write

    return write(file, kind=kind, to=written_to(to, out), as_json=as_json)


def plot(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN…", help="Runs to draw; by default the newest."),
    ] = None,
    to: Annotated[
        str, typer.Option(metavar="FILE", help="A .png or .svg file; by default plot.png.")
    ] = "",
    out: Out = "",
) -> int:
    """Plot one run, or several in the same axes."""
    from colotrain.cli.plot import plot as draw

    return draw(names or [], to=written_to(to, out) or "plot.png")


def profile(
    name: Run = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a running job to trace.")] = 3,
    ranks: Annotated[str, typer.Option(help="Ranks to trace, as in 0,3.")] = "0",
    last: Annotated[
        bool, typer.Option("--last", help="The newest trace, also of a running job.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Trace a few steps, and show where their time goes."""
    from colotrain.cli.profile import profile as show

    return show(name, num_steps=steps, ranks=ranks, last=last, as_json=as_json)


def audit(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND…",
            help="Any command that trains with torch: python train.py, torchrun … train.py.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="End it after so many optimizer steps; 0: let it run.")
    ] = 0,
    name: Annotated[str, typer.Option(help="Name of its folder under runs/.")] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 4, not 5, where a check could not be made.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Check the steps of any training script, run unchanged."""
    from colotrain.cli.audit import audit as observe

    return observe(command or [], steps=steps, name=name, strict=strict, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(data_app, name="data", no_args_is_help=True)
    app.command()(new)
    app.command()(import_config)
    app.command()(plot)
    app.command()(profile)
    app.command(context_settings={"allow_interspersed_args": False})(audit)
