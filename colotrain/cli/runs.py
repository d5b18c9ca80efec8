"""`colotrain runs`: the runs under ./runs, those of a sweep, or those of an object store."""

from __future__ import annotations

from colotrain.cli.arguments import refuse
from colotrain.runs.fetching import outlines
from colotrain.runs.listing import list_runs as print_runs
from colotrain.runs.sweep import print_sweep


def list_runs(store: str | None, *, sweep: str, as_json: bool) -> int:
    if store is None:
        return print_sweep(sweep, as_json=as_json) if sweep else print_runs(as_json=as_json)
    refuse(store, sweep=sweep)
    with outlines(store) as root:
        return print_runs(as_json=as_json, root=root, place=store.rstrip("/"))
