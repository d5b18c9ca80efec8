"""Printed form of a plan: bars by category, a line at the capacity, fitting options in green."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from colotrain.cli.arguments import write_file
from colotrain.data.prepare.vocabulary import DocumentForm
from colotrain.planner.durations import evaluation_s
from colotrain.runs.resolving import ResolvedConfig
from colotrain.show.charts import GREEN, ORANGE, SERIES, VERMILLION, scale_of
from colotrain.show.console import picture_console
from colotrain.spec.elastic import ElasticPlan
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.plan import CheckpointPlan, RunPlan, TrainPlan
from colotrain.spec.quantities import format_seconds, format_size

CATEGORIES = [field.name for field in fields(MemoryBreakdown)]
VERDICTS = {
    "yes": (GREEN, "fits"),
    "tight": (ORANGE, "may not fit"),
    "no": (VERMILLION, "does not fit"),
}
"""Verdict → (style, text)."""
BAR_WIDTH = 36
PICTURE_WIDTH = 110
AXES = {"context_parallel": "cp", "expert_parallel": "ep", "tensor_parallel": "tp"}
"""Axes of a plan's document → titles of their columns."""
MOST_ROWS = 16


def print_plan(console: Console, resolved: ResolvedConfig, document: dict[str, Any]) -> None:
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    for title, text in (*_rows(resolved.plan, document), *_group_rows(document)):
        head.add_row(title, text)
    console.print(head)
    if document["freeze"]:
        console.print(_freeze_table(document))
    console.print()
    console.print(_breakdown_table(document["memory"]))
    console.print()
    console.print(_options_table(document))
    if "trace" in document:
        console.print()
        console.print(_check_table(document["trace"]))
    for sentence in document.get("advice", ()):
        console.print(sentence, style="bold")
    if "fix" in document:
        console.print(f"does not fit: {document['fix']}", style=f"bold {VERMILLION}")
    for warning in document["warnings"]:
        console.print(f"warning: {warning}", style="yellow")


def _rows(plan: RunPlan, document: dict[str, Any]) -> Iterator[tuple[str, Text | str]]:
    batch, cluster, counts = plan.batch, plan.cluster, plan.parameters
    sent, unit = document["communication"], document["batch"]["unit"]
    yield "run", plan.name
    yield "plugin", f"{plan.plugin.name}: {plan.plugin.reason}"
    ranks = f"{plan.world_size} on {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    mesh = " × ".join(map(str, plan.plugin.mesh))
    divided = {"sample": plan.mesh.cp, "layer's experts": plan.mesh.ep, "matrix": plan.mesh.tp}
    together = "".join(f", {size} to a {what}" for what, size in divided.items() if size > 1)
    yield "ranks", f"{ranks}, {cluster.device}{cluster.chosen_threads}, mesh {mesh}{together}"
    if stages := document.get("pipeline"):
        each = stages.get("chunks") or [[count] for count in stages["blocks"]]
        blocks = " | ".join(" + ".join(map(str, chunk)) for chunk in zip(*each, strict=True))
        peaks = ", ".join(map(format_size, stages["peaks"]))
        yield "stages", f"{blocks} blocks, {peaks} per rank"
        shares = ", ".join(f"{share:.0%}" for share in stages["waits"])
        waits = f"each waits for {stages['bubble']:.0%} of a step"
        passed = ", ".join(map(format_size, stages["sent_bytes"]))
        waits = f"they wait for {shares} of a step" if shares else waits
        yield "", f"{waits}, and each rank passes on {passed}"
    groups = f"group{'s' * (batch.data_parallel > 1)} of {plan.mesh.together} ranks"
    workers = groups if plan.mesh.together > 1 else "ranks"
    yield (
        "batch",
        f"{batch.global_batch} = micro-batch {batch.micro_batch} × accumulation "
        f"{batch.accumulation_steps} × {batch.data_parallel} {workers}; "
        f"{batch.tokens_per_step:,} {unit} per step{batch.reason and '; '}{batch.reason}",
    )
    if "texts" in document:
        yield "texts", str(DocumentForm(**document["texts"]))
    warmup = plan.optim.warmup_steps
    yield "steps", _steps(plan.train) + (f"; the first {warmup:,} are warm-up" if warmup else "")
    yield (
        "parameters",
        f"{counts.total:,}: {counts.trainable:,} trained, {counts.frozen:,} frozen",
    )
    collectives = f"{sent['reductions']} reductions"
    if sent["gathers"]:
        collectives = f"{sent['gathers']} all-gathers and {collectives}"
    elif sent["reductions"]:
        collectives += "; ranks of a host share their parameters"
    yield (
        "reduction",
        f"gradients {sent['reduced']}; each rank sends {format_size(sent['bytes_per_step'])} per "
        f"step in {collectives}",
    )
    yield from (("" if n else "data", part["text"]) for n, part in enumerate(document["data"]))
    if plan.time.step_s:
        speed = f"{format_seconds(plan.time.step_s)} a step, {plan.time.tokens_per_s:,.0f} {unit}/s"
        yield "time", speed + (f", MFU {plan.time.mfu:.1%}" if plan.time.mfu else "")
    yield "evaluations", _evaluations(plan, document)
    yield "checkpoints", _checkpoints(plan.checkpoint, plan.train)
    yield "copies", _memory_copies(plan)
    if changes := _changes_of_nodes(plan.elastic):
        yield "nodes", changes


def _changes_of_nodes(elastic: ElasticPlan) -> str:
    """Return who takes the place of a node, and whether slow ones are left; empty for neither."""
    spare, least, most = elastic.spare_nodes, elastic.min_nodes, elastic.max_nodes
    said = []
    if least < most:
        said.append(f"from {least} to {most}")
    if spare:
        what = "nodes take the places" if spare > 1 else "node takes the place"
        said.append(f"{spare} spare {what} of those that are lost or left")
    if elastic.replace_slow:
        times = elastic.max_restarts
        said.append(
            "one that holds the others up for "
            f"{format_seconds(elastic.replace_slow_after_s)} is left, at most {times} in all, "
            "node 0 never"
        )
    return "; ".join(said)


def _memory_copies(plan: RunPlan) -> str:
    copies, ranks = plan.elastic.memory_copy, plan.cluster.procs_per_node
    if not copies.enabled:
        return copies.reason
    size = format_size(copies.bytes * ranks)
    return f"in memory, {size} on each node, for restarts; {copies.reason}"


def _steps(train: TrainPlan) -> str:
    if not train.epoch_steps:
        return f"{train.max_steps:,}"
    rest = "" if train.epoch_steps == int(train.epoch_steps) else ", the last filled from the next"
    epochs = f"{train.max_steps / train.epoch_steps:.3g} epochs of {train.epoch_steps:.6g} steps"
    return f"{train.max_steps:,}: {epochs}{rest}"


def _evaluations(plan: RunPlan, document: dict[str, Any]) -> str:
    train, data, steps = plan.train, plan.data, plan.train.eval_steps
    if steps == 0:
        return "none (train.eval_steps=0)"
    has_some = [p["validation"]["files"] or p["validation_share"] for p in document["data"]]
    held = train.num_validation if any(has_some) or not has_some else 0
    if held == 0:
        return "none: the data has no validation samples"
    first = "before the first step and " if train.eval_first else ""
    often = f"{_interval(train.eval_every, train)}{first}after the last"
    num = "all" if steps == "all" else f"at most {steps} global batch{'es' * (steps > 1)} of"
    only = ""
    if data.source == "target" and held is None:
        share = f"the last {100 * data.validation_fraction:.3g} % of the dataset"
        only = f" ({share}, unless its function takes `split`; data.validation_fraction=0: none)"
        if not data.validation_fraction:
            only = " (none, unless its function takes `split`: data.validation_fraction=0)"
    return f"{often}; {num} validation samples{only}{_of_all(plan)}"


def _of_all(plan: RunPlan) -> str:
    """Return number and predicted time of `train.eval_steps=all`, or why they are not known."""
    if plan.train.eval_steps != "all":
        return ""
    if plan.train.num_validation is None:
        return ": how many, and so how long, is known once the data is prepared"
    seconds = evaluation_s(plan.train, plan.batch, plan.time)
    time = f", predicted to take {format_seconds(seconds)}" if seconds else ""
    return f": {plan.train.num_validation:,}{time}"


def _interval(every: float, train: TrainPlan) -> str:
    """Return text like `every 20 steps, `; empty if there is no interval."""
    if every != int(every):  # only an interval in epochs is no whole number of steps
        return f"every {every / train.epoch_steps:.4g} epochs ({every:.4g} steps), "
    return f"every {every:.6g} step{'s' * (every > 1)}, " if every else ""


def _checkpoints(checkpoint: CheckpointPlan, train: TrainPlan) -> str:
    if not checkpoint.enabled:
        return "none (checkpoint.every=0)"
    often = _interval(checkpoint.every, train)
    if checkpoint.every_s:
        often = f"every {format_seconds(checkpoint.every_s)}, "
    best = f" and that of the best {checkpoint.best_metric}" if checkpoint.best_metric else ""
    return f"{often}when asked to stop, and at the end; the newest {checkpoint.keep}{best} are kept"


def _group_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield gemini's rows: groups with their padding, and bytes per tier."""
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


def _breakdown_table(memory: dict[str, Any]) -> Table:
    """Draw one bar per category, scaled to the peak, with a line at the bytes a rank may use."""
    capacity, peak = memory["capacity"], memory["peak"]
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    scale, before = scale_of(peak, capacity), 0
    for index, name in enumerate(CATEGORIES):
        size = memory[name]
        style = SERIES[index % len(SERIES)]
        table.add_row(name, format_size(size), _piece(before, size, scale, style))
        before += size
    style, word = VERDICTS[memory["verdict"]]
    if not capacity:
        word = "not known"
    total = _piece(0, peak, scale, style)
    at = min(BAR_WIDTH, round(capacity / scale * BAR_WIDTH))
    total.append(" " * max(0, at - len(total)))
    total.append("│" if capacity <= scale else "→", f"bold {ORANGE}")
    table.add_row("peak", format_size(peak), total)
    low, high = format_size(memory["peak_low"]), format_size(memory["peak_high"])
    limit = Text(f"{low} to {high}", "dim").append(f", of {format_size(capacity)} per rank: ")
    table.add_row("", "", limit.append(word, f"bold {style}"))
    return table


def _piece(before: int, size: int, scale: float, style: str) -> Text:
    """Draw a bar that begins where the previous one ended."""
    start = round(before / scale * BAR_WIDTH)
    width = round((before + size) / scale * BAR_WIDTH) - start
    bar = "█" * width if width else "▏" if size else ""
    return Text(" " * start).append(bar, style)


def _options_table(document: dict[str, Any]) -> Table:
    """Return a table of the plan and its alternatives."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("plugin", overflow="fold")
    speed = f"{document['batch']['unit']}/s"
    others, batch = document["alternatives"], document["batch"]
    shown = others[:MOST_ROWS]
    axes = [axis for axis in AXES if any(row[axis] != batch[axis] for row in shown)]
    titles = ("micro", "recompute", "peak", "step", speed, "MFU")
    for title in (*(AXES[axis] for axis in axes), *titles):
        table.add_column(title, justify="right", no_wrap=True)
    own = {
        "plugin": document["plugin"]["name"],
        "micro_batch": document["batch"]["micro"],
        "memory": document["memory"],
        "time": document["time"],
        "activation_checkpointing": document["activation_checkpointing"],
        **{axis: batch[axis] for axis in AXES},
    }
    for row in (own, *shown):
        table.add_row(*_option_cells(row, axes), style=_option_style(row, own))
    if len(others) > MOST_ROWS:
        table.add_row(f"and {len(others) - MOST_ROWS} more", style="dim")
    return table


def _option_cells(row: dict[str, Any], axes: list[str]) -> list[str]:
    time, verdict = row["time"], row["memory"]["verdict"]
    known = time["step_s"] > 0
    return [
        row["plugin"] + ("" if verdict == "yes" else f" ({VERDICTS[verdict][1]})"),
        *(str(row[axis]) for axis in axes),
        str(row["micro_batch"]),
        row["activation_checkpointing"],
        format_size(row["memory"]["peak"]),
        format_seconds(time["step_s"]) if known else "-",
        f"{time['tokens_per_s']:,.0f}" if known else "-",
        f"{time['mfu']:.1%}" if time["mfu"] else "-",
    ]


def _option_style(row: dict[str, Any], own: dict[str, Any]) -> str:
    style, _ = VERDICTS[row["memory"]["verdict"]]
    return f"bold {style}" if row is own else style


def _check_table(check: dict[str, Any]) -> Table:
    """Return a table that compares the plan with torch's own memory tracker."""
    table = Table("bytes per rank", "plan", "torch's tracker", box=None, pad_edge=False)
    for name, pair in check["categories"].items():
        table.add_row(name, format_size(pair["plan"]), format_size(pair["tracker"]))
    return table


def print_comparison(
    console: Console, names: tuple[str, str], documents: list[dict[str, Any]]
) -> None:
    table = Table("", *names, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    first, second = documents
    table.add_row("plugin", *(d["plugin"]["name"] for d in documents))
    for name in (*CATEGORIES, "peak", "capacity"):
        sizes = [d["memory"][name] for d in documents]
        table.add_row(name, *map(format_size, sizes), style="bold" if name == "peak" else None)
    verdicts = [d["memory"]["verdict"] for d in documents]
    table.add_row("fits", *(Text(v, VERDICTS[v][0]) for v in verdicts))
    table.add_row(
        "sent per step", *(format_size(d["communication"]["bytes_per_step"]) for d in documents)
    )
    if first["time"]["step_s"] and second["time"]["step_s"]:
        table.add_row("step", *(format_seconds(d["time"]["step_s"]) for d in documents))
        units = dict.fromkeys(f"{d['batch']['unit']}/s" for d in documents)
        table.add_row(" or ".join(units), *(f"{d['time']['tokens_per_s']:,.0f}" for d in documents))
        shares = [d["time"]["mfu"] for d in documents]
        table.add_row("MFU", *(f"{share:.1%}" if share else "-" for share in shares))
    console.print(table)


LASTING = ("parameters", "optimizer", "baseline")
"""Categories measured one by one; the others exist within a step and are measured together."""


def print_run(console: Console, document: dict[str, Any]) -> None:
    memory, time = document["memory"], document["time"]
    table = Table(document["run"], "predicted", "measured", "error", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    predicted, measured = memory["predicted"], memory["measured"]
    for name in CATEGORIES:
        if name in LASTING and measured.get(name):
            off = signed(predicted[name] / measured[name] - 1)
            table.add_row(name, format_size(predicted[name]), format_size(measured[name]), off)
        else:
            table.add_row(name, format_size(predicted[name]), "", "", style="dim")
    if "activations" in measured:
        passing = [sum(m[n] for n in CATEGORIES if n not in LASTING) for m in (predicted, measured)]
        off = signed(passing[0] / passing[1] - 1) if passing[1] else ""
        table.add_row("within a step", *map(format_size, passing), off)
    peaks = (memory["predicted"]["peak"], memory["measured"]["peak"])
    table.add_row("peak", *map(format_size, peaks), signed(memory["error"]), style="bold")
    if time["predicted"]["step_s"] and time["measured"]["step_s"]:
        steps = (time["predicted"]["step_s"], time["measured"]["step_s"])
        table.add_row("step", *map(format_seconds, steps), signed(time["error"]), style="bold")
    for stage in document.get("stages", ()):
        planned, wait = stage["planned_wait"], stage["wait"]
        off = signed(planned / wait - 1) if wait else "-"
        known = "-" if wait is None else f"{wait:.1%}"
        table.add_row(f"stage {stage['stage']} waits", f"{planned:.1%}", known, off)
    console.print(table)


def signed(error: float | None) -> str:
    """Format a relative error as `+3.2%`; positive if more was predicted than measured."""
    return "-" if error is None else f"{error:+.1%}"


def export(path: str, resolved: ResolvedConfig, document: dict[str, Any]) -> None:
    """Write the printed plan as an SVG picture."""
    console = picture_console(width=PICTURE_WIDTH)
    print_plan(console, resolved, document)
    write_file(path, console.export_svg(title="colotrain plan"))
