"""`colotrain plan`: what a run would be, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from colotrain.cli.output import print_json, stdout_console
from colotrain.cli.resolving import Setting, settle
from colotrain.config.model import at_peak
from colotrain.config.sizes import format_size
from colotrain.errors import DoesNotFit
from colotrain.estimate import offload
from colotrain.estimate.communication import Traffic, traffic
from colotrain.estimate.memory import model_state_bytes
from colotrain.plan import Ledger, RunPlan, Survey
from colotrain.plugins import ROWS
from colotrain.records import to_plain

NOT_ESTIMATED = "activations and time are not estimated yet"
NO_TIME = {"step_s": 0.0, "tokens_per_s": 0.0, "mfu": 0.0}


def plan(overrides: list[str], *, as_json: bool) -> int:
    """Resolve the overrides and print the plan; exit code 3 where it does not fit."""
    setting = settle(overrides, here=False)
    made = setting.plan
    document = describe(made, setting.survey)
    if as_json:
        print_json(document)
    else:
        _print(stdout_console(), setting, document)
    return 0 if document["memory"]["fits"] else DoesNotFit.exit_code


def describe(plan: RunPlan, survey: Survey) -> dict[str, Any]:
    """The document of `plan --json`."""
    return {
        "schema": plan.schema,
        "name": plan.name,
        "world_size": plan.world_size,
        "plugin": {"name": plan.plugin.name, "reason": plan.plugin.reason},
        "batch": {
            "global": plan.batch.global_batch,
            "micro": plan.batch.micro_batch,
            "accumulation_steps": plan.batch.accumulation_steps,
            "data_parallel": plan.batch.data_parallel,
            "owner": plan.batch.owner,
            "tokens_per_step": plan.batch.tokens_per_step,
        },
        "parameters": to_plain(plan.parameters),
        "freeze": [
            {"pattern": pattern, "matched": plan.freeze.matched.get(pattern, 0)}
            for pattern in plan.freeze.patterns
        ],
        "memory": _memory(plan.memory, plan.cluster.memory_bytes),
        "communication": {"bytes_per_step": _traffic(plan, survey).bytes_per_step},
        "time": NO_TIME,
        **_groups(plan, survey),
        "alternatives": list(_alternatives(plan, survey)),
        "warnings": [*plan.warnings, NOT_ESTIMATED],
    }


def _memory(ledger: Ledger, capacity: int) -> dict[str, Any]:
    sums = {"baseline": 0, "peak": ledger.total, "capacity": capacity}
    return to_plain(ledger) | sums | {"fits": ledger.total <= capacity}


def _groups(plan: RunPlan, survey: Survey) -> dict[str, Any]:
    """gemini: its groups, and where everything rests."""
    if plan.plugin.chunk_bytes is None:
        return {}
    peak = at_peak(survey, plan.freeze)
    return {
        "groups": offload.describe_groups(plan.plugin, peak),
        "tiers": offload.describe_tiers(
            plan.plugin, peak, plan.optim, plan.cluster.device, plan.batch.accumulation_steps
        ),
    }


def _alternatives(plan: RunPlan, survey: Survey) -> Iterator[dict[str, Any]]:
    """The other plugins on the same ranks."""
    peak = at_peak(survey, plan.freeze)
    for name, row in ROWS.items():
        if name == plan.plugin.name:
            continue
        shard = plan.cluster.procs_per_node if row.hybrid else plan.world_size
        ledger = model_state_bytes(row, peak, shard, plan.optim)
        memory = _memory(ledger, plan.cluster.memory_bytes)
        yield {"plugin": name, "memory": memory, "time": NO_TIME, "fits": memory["fits"]}


def _traffic(plan: RunPlan, survey: Survey) -> Traffic:
    return traffic(plan.plugin, survey, plan.batch, plan.train.precision)


def _print(console: Console, setting: Setting, document: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = _rows(setting.plan, _traffic(setting.plan, setting.survey))
    for title, text in (*rows, *_group_rows(document)):
        table.add_row(title, text)
    console.print(table)
    if setting.plan.freeze.patterns:
        console.print(_freeze_table(document))
    console.print(_memory_table(document))
    for warning in document["warnings"]:
        console.print(f"warning: {warning}", style="yellow")


def _rows(plan: RunPlan, sent: Traffic) -> Iterator[tuple[str, str]]:
    batch, cluster, counts = plan.batch, plan.cluster, plan.parameters
    yield "run", plan.name
    yield "plugin", f"{plan.plugin.name}: {plan.plugin.reason}"
    ranks = f"{plan.world_size} on {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    mesh = " × ".join(map(str, plan.plugin.mesh))
    yield "ranks", f"{ranks}, {cluster.device}, mesh {mesh}"
    unit = "samples" if plan.data.source == "target" else "tokens"
    yield (
        "batch",
        f"{batch.global_batch} = micro-batch {batch.micro_batch} × accumulation "
        f"{batch.accumulation_steps} × {batch.data_parallel} ranks; "
        f"{batch.tokens_per_step:,} {unit} per step",
    )
    yield (
        "parameters",
        f"{counts.total:,}: {counts.trainable:,} trained, {counts.frozen:,} frozen",
    )
    yield (
        "reduction",
        f"gradients {sent.reduced}; each rank sends {format_size(sent.bytes_per_step)} per step "
        f"in {sent.gathers} all-gathers and {sent.reductions} reductions",
    )


def _group_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """gemini: groups with their padding, and bytes per tier."""
    groups, tiers = document.get("groups"), document.get("tiers")
    if groups:
        sizes = " to ".join(format_size(n) for n in sorted({groups["smallest"], groups["largest"]}))
        chunk, rest = format_size(groups["chunk_bytes"]), format_size(groups["rest"])
        padding = f"{format_size(groups['padding'])} of padding"
        unused = f"buffers {groups['unused_share']:.0%} unused"
        text = f"{groups['count']} of {sizes} (chunk size {chunk}), and the rest, {rest}"
        yield "groups", f"{text}; {unused}, {padding}"
    for kind, sizes in (tiers["bytes"] if tiers else {}).items():
        yield kind, ", ".join(f"{format_size(n)} on {tier}" for tier, n in sizes.items())
    if tiers and tiers["moved_bytes"]:
        yield "moved", f"{format_size(tiers['moved_bytes'])} per step and rank between tiers"


def _freeze_table(document: dict[str, Any]) -> Table:
    table = Table("frozen by", "parameters", box=None, pad_edge=False, header_style="bold")
    table.columns[1].justify = "right"
    for row in document["freeze"]:
        table.add_row(row["pattern"], str(row["matched"]))
    return table


def _memory_table(document: dict[str, Any]) -> Table:
    """The plan's plugin first, then the others, each as bytes per rank."""
    columns = ("parameters", "gradients", "optimizer", "gathered", "peak", "capacity")
    table = Table("bytes per rank", *columns, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    chosen = {"plugin": document["plugin"]["name"], "memory": document["memory"]}
    for row in (chosen, *document["alternatives"]):
        memory = row["memory"]
        note = "" if memory["fits"] else " (does not fit)"
        sizes = [format_size(memory[column]) for column in columns]
        table.add_row(row["plugin"] + note, *sizes, style=None if row is chosen else "dim")
    return table
