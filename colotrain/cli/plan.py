"""`colotrain plan`: predict a run without running it, or compare a run with its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from colotrain.cli.arguments import refuse
from colotrain.cli.plan_table import export, print_comparison, print_plan, print_run
from colotrain.config.schema import Plugin
from colotrain.data.prepare.tokens import described_parts
from colotrain.data.prepare.vocabulary import document_form, tokenizer_file
from colotrain.errors import DoesNotFit, UsageError
from colotrain.events.fold import follow
from colotrain.events.view import summary, unit_of
from colotrain.planner import offload
from colotrain.planner.advise import (
    best,
    every,
    largest_micro_batch,
    other_meshes,
    rank,
    sizes_of_axes,
)
from colotrain.planner.communication import traffic
from colotrain.planner.context import Option, PlanningContext
from colotrain.planner.fix_hints import fix_hints
from colotrain.planner.layout import Layout
from colotrain.planner.memory import non_model_bytes
from colotrain.planner.plugin import plan_plugin
from colotrain.records import as_argument, to_plain
from colotrain.rundir import RunDir
from colotrain.runs.resolving import ResolvedConfig, print_notes, resolve_config
from colotrain.show.console import print_json, stdout_console
from colotrain.spec.memory import MemoryBreakdown, PeakRange
from colotrain.spec.pipeline_schedule import bubble
from colotrain.spec.plan import RECOMPUTE, ClusterPlan, RunPlan
from colotrain.spec.plugins import ROWS

NOT_TRACED = (
    "activations and time are not estimated: a micro-batch could not be followed through the model "
    "without values"
)
NOT_MEASURED = (
    "times are those of typical CPU cores: add --measure to measure this machine once (20 seconds)"
)


def plan(
    words: list[str],
    *,
    as_json: bool = False,
    advise: bool = False,
    compare: tuple[str, str] | None = None,
    cross_check: bool = False,
    measure: bool = False,
    svg: str = "",
) -> int:
    """Resolve the overrides and print the plan; return exit code 3 if it does not fit.

    A single word that is not an override names a run: its prediction and measurement are printed.
    """
    if len(words) == 1 and _names_a_run(words[0]):
        others = {"advise": advise, "trace": cross_check, "measure": measure, "svg": svg}
        refuse("a run", compare=compare, **others)
        return show_run(words[0], as_json=as_json)
    if run := next((word for word in words if _names_a_run(word)), None):
        recipe = as_argument("recipe", str(RunDir.find(run).config_file))
        fix = f"`colotrain plan {recipe} KEY=VALUE` plans what it was with changes"
        raise UsageError(f"{run}: a run is shown as it was, without settings beside it", fix)
    if compare is not None:
        refuse("--compare", advise=advise, trace=cross_check, svg=svg)
    if measure:
        from colotrain.cli.measure import measure as measure_machine

        measure_machine(resolve_config(words, here=False))
    if compare is not None:
        return show_comparison(words, compare, as_json=as_json)
    resolved = resolve_config(words, here=False, job=None)
    print_notes(resolved)
    document = describe(resolved, advise=advise)
    if cross_check:
        from colotrain.planner.traced.tracker import cross_check as check

        document["trace"] = check(resolved.plan)
    if svg:
        export(svg, resolved, document)
    if as_json:
        print_json(document)
    else:
        print_plan(stdout_console(), resolved, document)
    return 0 if document["memory"]["fits"] else DoesNotFit.exit_code


def _texts(plan: RunPlan) -> dict[str, Any]:
    """The tokens around each document of text, where a tokenizer's file says them."""
    if plan.data.source == "target" or tokenizer_file(plan.data.tokenizer) is None:
        return {}
    return {"texts": to_plain(document_form(plan.data.tokenizer))}


def _names_a_run(word: str) -> bool:
    try:
        return "=" not in word and bool(RunDir.find(word))
    except UsageError:
        return False


def describe(resolved: ResolvedConfig, *, advise: bool = False) -> dict[str, Any]:
    """Return the document of `plan --json`."""
    plan, context = resolved.plan, resolved.context
    recompute = plan.train.activation_checkpointing
    trace = context.stage.traces(recompute, plan.batch.micro_batch)
    layout = context.layout(plan.plugin)
    sent = traffic(layout, resolved.survey, trace)
    options = list(_advice(resolved) if advise else _other_plugins(resolved))
    document = {
        "schema": plan.schema,
        "name": plan.name,
        "world_size": plan.world_size,
        "plugin": {"name": plan.plugin.name, "reason": plan.plugin.reason},
        "batch": {
            "global": plan.batch.global_batch,
            "micro": plan.batch.micro_batch,
            "accumulation_steps": plan.batch.accumulation_steps,
            "data_parallel": plan.batch.data_parallel,
            "context_parallel": plan.mesh.cp,
            "expert_parallel": plan.mesh.ep,
            "tensor_parallel": plan.mesh.tp,
            "owner": plan.batch.owner,
            "tokens_per_step": plan.batch.tokens_per_step,
            "unit": unit_of(None, plan),
        },
        **({"pipeline": stages_of(resolved)} if plan.mesh.pp > 1 else {}),
        **_texts(plan),
        "data": described_parts(plan.data),
        "parameters": to_plain(plan.parameters),
        "freeze": [
            {"pattern": pattern, "matched": plan.freeze.matched.get(pattern, 0)}
            for pattern in plan.freeze.patterns
        ],
        "memory": memory_of(plan.memory, plan.peak, plan.cluster),
        "communication": {
            "bytes_per_step": sent.bytes_per_step,
            "gathers": sent.gathers,
            "reductions": sent.reductions,
            "reduced": sent.reduced,
        },
        "time": to_plain(plan.time),
        "activation_checkpointing": recompute,
        "checkpoint": to_plain(plan.checkpoint),
        "memory_copy": to_plain(plan.elastic.memory_copy),
        **_groups(resolved),
        "alternatives": [_shown(option, plan.cluster) for option in options],
        "warnings": [*plan.warnings, *_warnings(resolved)],
    }
    if advise:
        document["advice"] = _sentences(resolved, options, layout)
    if not document["memory"]["fits"]:
        document["fix"] = fix_hints(context, plan)
    return document


def _groups(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return gemini's groups and the tiers of their bytes; empty for other plugins."""
    plan = resolved.plan
    if plan.plugin.chunk_bytes is None:
        return {}
    groups = offload.describe_groups(plan.plugin, resolved.survey)
    return {"groups": groups, "tiers": _tiers(plan, resolved.context)}


def _tiers(plan: RunPlan, own: PlanningContext) -> dict[str, Any]:
    """Return the tiers of the bytes of the stage of `own`, under gemini."""
    layout, survey = own.layout(plan.plugin), own.stage.survey
    trace = own.stage.traces(plan.train.activation_checkpointing, layout.micro_batch)
    return offload.describe_tiers(
        plan.plugin,
        survey,
        plan.optim,
        plan.cluster.device,
        transient=non_model_bytes(layout, survey, trace),
        micro_batches=plan.batch.accumulation_steps,
    )


def memory_of(breakdown: MemoryBreakdown, peak: PeakRange, cluster: ClusterPlan) -> dict[str, Any]:
    """Return bytes per rank by category, their sum with its range, and whether that fits."""
    verdict = peak.verdict(cluster.memory_bytes)
    return to_plain(breakdown) | {
        "peak": breakdown.total,
        "peak_low": peak.low,
        "peak_high": peak.high,
        "capacity": cluster.memory_bytes,
        "fits": verdict != "no",
        "verdict": verdict,
    }


def _shown(option: Option, cluster: ClusterPlan) -> dict[str, Any]:
    return {
        "plugin": option.plugin,
        "micro_batch": option.layout.micro_batch,
        "accumulation_steps": option.layout.accumulation_steps,
        "activation_checkpointing": option.checkpointing,
        "context_parallel": option.mesh.cp,
        "expert_parallel": option.mesh.ep,
        "tensor_parallel": option.mesh.tp,
        "memory": memory_of(option.memory, option.peak, cluster),
        "time": to_plain(option.time),
        "fits": option.fits,
    }


def _warnings(resolved: ResolvedConfig) -> Iterator[str]:
    context, plan = resolved.context, resolved.plan
    recompute = plan.train.activation_checkpointing
    if context.stage.traces(recompute, plan.batch.micro_batch) is None:
        yield f"{NOT_TRACED}: {resolved.not_traced}" if resolved.not_traced else NOT_TRACED
    elif context.hardware is None:
        yield "times are not estimated: describe the GPUs, as hardware=a100-80g does"
    elif not plan.time.step_s:
        yield "times are not estimated"
    elif not context.hardware(context.layout(plan.plugin)).measured:
        yield NOT_MEASURED


def _other_plugins(resolved: ResolvedConfig) -> Iterator[Option]:
    """Yield the other plugins, everything else being equal."""
    plan, context = resolved.plan, resolved.context
    for name in ROWS:
        if name != plan.plugin.name:
            yield context.option(plan_plugin(name, Plugin(), context))


def _advice(resolved: ResolvedConfig) -> Iterator[Option]:
    """Yield all plugins, micro-batches, recomputations and axes that fit, fastest first."""
    context = resolved.context
    if context.stage.traces("none", 1) is None:
        yield from _other_plugins(resolved)
        return
    options = every(context, _layouts(resolved), checkpointing=RECOMPUTE)
    yield from rank([*options, *other_meshes(context, resolved.plan)])


def _layouts(resolved: ResolvedConfig) -> Iterator[tuple[str, Layout]]:
    context = resolved.context
    for name, row in ROWS.items():
        if not row.hybrid or context.scale.nodes > 1:
            made = plan_plugin(name, Plugin(), context)
            yield name, replace(context.layout(made), micro_batch=1)


def _sentences(resolved: ResolvedConfig, options: Sequence[Option], layout: Layout) -> list[str]:
    plan, context = resolved.plan, resolved.context
    recompute = plan.train.activation_checkpointing
    if not context.scale.memory_bytes:
        return ["Nothing is known of the GPUs' memory, so nothing can be advised."]
    largest = largest_micro_batch(context, layout, checkpointing=recompute)
    found = best(options)
    sentences = [f"The largest micro-batch that fits under {plan.plugin.name} is {largest}."]
    if found is None:
        return [*sentences, f"Nothing fits as it is: {fix_hints(context, plan)}."]
    settings = (
        f"plugin={found.plugin} train.micro_batch={found.layout.micro_batch} "
        f"train.activation_checkpointing={found.checkpointing}"
    )
    axes, own_axes = found.mesh.above_one, plan.mesh.above_one
    for key in sizes_of_axes(context.stage.survey, plan):
        if (size := axes.get(key, 1)) != own_axes.get(key, 1):
            settings += f" {key}={size}"
    gain = plan.time.step_s / found.time.step_s if found.time.step_s else 0.0
    faster = f", {gain:.2f} times the speed of the plan as it is" if gain > 1.01 else ""
    return [*sentences, f"The fastest of all is {settings}{faster}."]


def show_comparison(words: list[str], both: tuple[str, str], *, as_json: bool) -> int:
    """Print two plans side by side; each has the common words and its own overrides."""
    resolved = [resolve_config([*words, *each.split()], here=False, job=None) for each in both]
    documents = [describe(each) for each in resolved]
    if as_json:
        print_json({"schema": 1, "plans": documents})
    else:
        print_comparison(stdout_console(), both, documents)
    return 0 if all(document["memory"]["fits"] for document in documents) else DoesNotFit.exit_code


def show_run(name: str, *, as_json: bool) -> int:
    """Print a run's prediction beside its measurement."""
    rundir = RunDir.find(name)
    made = rundir.plan()
    view = follow(rundir)
    if not view.peak_by_rank:
        raise UsageError(f"{rundir.name} ({view.status}): has made no step", "name another run")
    document = beside(made, summary(view, made, rundir), name=rundir.name)
    if as_json:
        print_json(document)
    else:
        print_run(stdout_console(), document)
    return 0


def beside(plan: RunPlan, measured: dict[str, Any], *, name: str) -> dict[str, Any]:
    """Return prediction and measurement, with errors relative to the measurement."""
    memory, time = measured["memory"], measured["time"]
    return {
        "schema": 1,
        "run": name,
        "plugin": plan.plugin.name,
        "memory": {
            "predicted": memory_of(plan.memory, plan.peak, plan.cluster),
            "measured": {
                **memory.get("measured", {}),
                "peak": memory["measured_peak"],
                "peak_by_rank": memory["peak_by_rank"],
            },
            "error": memory["error"],
        },
        "time": {
            "predicted": to_plain(plan.time),
            "measured": {"step_s": time["step_s"], "tokens_per_s": measured["tokens_per_s"]},
            "error": time["error"],
        },
        **({"stages": measured["stages"]} if "stages" in measured else {}),
    }


def stages_of(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the stages of the plan: blocks, memory, bytes sent, the part of a step they wait."""
    plan, context = resolved.plan, resolved.context
    mesh, is_packed = plan.mesh, plan.plugin.chunk_bytes is not None
    chunks = [[last + 1 - first for first, last in mesh.blocks_of(s)] for s in range(mesh.pp)]
    return {
        "blocks": [sum(each) for each in chunks],
        **({"chunks": chunks} if mesh.pp_chunks > 1 else {}),
        "peaks": [memory.total for memory in plan.stage_memory],
        "sent_bytes": [sum(own.layout(plan.plugin).passed_bytes) for own in context.of_stages()],
        "waits": list(plan.time.waits),
        "bubble": bubble(mesh.pp, plan.batch.accumulation_steps, mesh.pp_chunks),
        **({"tiers": [_tiers(plan, own) for own in context.of_stages()]} if is_packed else {}),
    }
