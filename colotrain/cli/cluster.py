"""Commands for clusters, one small function each; `main` registers them."""

from __future__ import annotations

from typing import Annotated

import typer

from colotrain.cli.arguments import (
    Force,
    Json,
    Overrides,
    Overwrite,
    Run,
    Smoke,
    Sweep,
    TrustCode,
    refuse,
)
from colotrain.errors import UsageError


def register(app: typer.Typer) -> None:
    for verb in (submit, logs, doctor):
        app.command()(verb)
    app.command(hidden=True)(node)


def submit(
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job's script.")] = False,
    test_only: Annotated[
        bool, typer.Option("--test-only", help="Ask whether the job would be taken.")
    ] = False,
    sweep: Sweep = False,
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="Runs of a sweep at once.", show_default=False)
    ] = None,
    smoke: Smoke = False,
    overwrite: Overwrite = False,
    force: Force = False,
    as_json: Json = False,
) -> int:
    """Submit a run, or a sweep of runs, to a scheduler."""
    from colotrain.runs import submit as module

    what = {"as_json": as_json, "dry_run": dry_run, "test_only": test_only, "force": force}
    what["overwrite"] = overwrite
    if sweep:
        refuse("--sweep", smoke=smoke)
        return module.submit_sweep(overrides or [], max_parallel=max_parallel, **what)
    if max_parallel is not None:
        raise UsageError("--max-parallel: expected --sweep beside it", "add --sweep")
    return module.submit(overrides or [], smoke=smoke, **what)


def node(
    path: Annotated[str, typer.Argument(metavar="RUN_DIR")],
    head: Annotated[str, typer.Option(metavar="HOST:PORT")] = "localhost:0",
    node_rank: Annotated[str | None, typer.Option(metavar="RANK")] = None,
    plan: Annotated[str | None, typer.Option(metavar="FOLDER")] = None,
    trust_code: TrustCode = False,
) -> int:
    """Run one node's part of a run; the script of a job starts this command."""
    from colotrain.runs.node import node as take_part

    return take_part(path, head, trust_code=trust_code, rank=node_rank, carried=plan)


def logs(
    name: Run = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Continue until the run ends.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Show this rank only.", show_default=False)
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Last lines per log.")] = 40,
    as_json: Json = False,
) -> int:
    """Show the output of workers, detached launcher and job."""
    if as_json:
        refuse("--json", follow=follow)
    from colotrain.cli.logs import logs as show

    return show(name, follows=follow, rank=rank, lines=lines, as_json=as_json)


def doctor(
    overrides: Overrides = None,
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="On every node of an allocation, and between them.")
    ] = False,
    only: Annotated[str, typer.Option(metavar="NAMES", help="Only these checks: name,runs.")] = "",
    as_json: Json = False,
) -> int:
    """Find what keeps runs from starting, or slows them down."""
    from colotrain.cli.doctor import doctor as examine

    return examine(overrides or [], as_json=as_json, all_nodes=all_nodes, only=only)
