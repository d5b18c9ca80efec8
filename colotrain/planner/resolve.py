"""Resolving a configuration to a run plan, or to all of its problems at once."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from colotrain.config.adapter import check_brought, plan_adapter
from colotrain.config.checks import CODE, check, find_resume, values_of
from colotrain.config.hints import hinted
from colotrain.config.observing import check_traced_ranks, notify_plan, profile_plan
from colotrain.config.schema import Config, Elastic, Observe, Optim, Train
from colotrain.errors import ConfigError, Problem
from colotrain.planner.budget import check_room
from colotrain.planner.context import Examined, Option, PlanningContext
from colotrain.planner.distillation import pass_before
from colotrain.planner.durations import evaluates_first, warn_of_durations
from colotrain.planner.epochs import Steps, check_epochs, in_steps
from colotrain.planner.fix_hints import changed_plans, memory_warnings, with_changes
from colotrain.planner.heads import check_brought_head, check_head, trained_heads
from colotrain.planner.machine import Machine
from colotrain.planner.memory_copy import plan_memory_copy
from colotrain.planner.micro_batch import choose
from colotrain.planner.model import UNBUILT, at_peak, count, survey_model, warn_of_data
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.planner.objectives import check_global_batch, objective_plan, plan_data
from colotrain.planner.plugin import (
    check_override_names,
    check_plugin,
    decide,
)
from colotrain.planner.resizing import (
    check_kept,
    check_meshes,
    check_replace_slow,
    check_sizes,
    warn_of_first_node,
)
from colotrain.planner.scale import Scale, ranks_here, scale_out, timed_hardware
from colotrain.planner.stages import Stage, bubble_warning, divide, plan_stages
from colotrain.planner.vocabulary import warn_of_new_rows, with_new_tokens
from colotrain.records import read, same_fields, sections
from colotrain.rundir import run_name
from colotrain.spec.batch import endless_evaluation, no_best
from colotrain.spec.elastic import ElasticPlan, MemoryCopyPlan, Recovery
from colotrain.spec.hub import hub_name
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.observing import ObservePlan
from colotrain.spec.optimizers import optimizer_of
from colotrain.spec.plan import (
    BatchPlan,
    CheckpointPlan,
    ClusterPlan,
    DataPlan,
    Freeze,
    FreezePlan,
    ModelPlan,
    OptimPlan,
    PluginPlan,
    RunPlan,
    TrainPlan,
)
from colotrain.spec.settings import CommonCheckpoint
from colotrain.spec.survey import LossStudy, Survey


def resolve(
    config: dict[str, Any],
    *,
    surveys: ModelSurveys,
    machine: Machine,
    name: str | None = None,
    found: Sequence[Problem] = (),
    hints: bool = True,
    smoke: bool = False,
) -> tuple[RunPlan, PlanningContext]:
    """The plan that `config` describes on `machine`; raises `ConfigError` with all problems.

    `surveys` examines the user's model, data and schedule in another process, as soon as settings
    that it depends on are read. `found` are problems of composing `config`, which are reported with
    the new ones. The returned `PlanningContext` can evaluate alternatives to the plan. Without
    `hints` there are no warnings about memory, and for a `smoke` run none about its length.
    """
    problems = list(found)
    settings = read(Config, config, key="", problems=problems)
    if settings is None:
        raise ConfigError(hinted(problems))
    again = functools.partial(resolve, surveys=surveys, machine=machine, hints=False)
    choice = choose(settings, machine, changed_plans(config, again))
    if choice.changes:
        config = with_changes(config, choice.changes)
        settings = read(Config, config, key="", problems=[])
        assert settings is not None
    with all_names(settings, surveys):
        examined = examine(settings, choice.reason, surveys, machine, problems)
        settings, data = examined.settings, examined.data
        steps = in_steps(settings, data, global_batch=examined.batch.global_batch, surveys=surveys)
        check_own_functions(settings, data, steps, surveys)
        held = num_validation(settings, data, surveys=surveys)
        study = study_loss(settings, examined.model, data, examined.survey, surveys)
    context = planning_context(
        examined,
        _train(settings.train, steps, held, study),
        _optim(settings.optim, steps),
        surveys,
        machine,
        changed_plans(config, again),
    )
    plugin, option = decide(context)
    context = context.of_fullest_stage(plugin)
    plan = dataclasses.replace(
        assemble(context, steps, plugin, option),
        name=run_name(name or settings.name or _default_name(settings, plugin.name)),
        smoke=smoke,
    )
    warnings = [*_warnings(context, plan, steps, study.notes)]
    if hints:
        warnings += memory_warnings(context, plan)
    return dataclasses.replace(plan, warnings=tuple(warnings)), context


def refuse_mistakes(config: dict[str, Any], found: Sequence[Problem]) -> None:
    """Raise `ConfigError` with `found`, and with what is wrong whatever model and data are."""
    problems = list(found)
    settings = read(Config, config, key="", problems=problems)
    if settings is not None:
        problems += check(settings, is_whole=not _may_hide_the_model(problems))
    if problems:
        raise ConfigError(hinted(problems))


def examine(
    settings: Config,
    reason: str,
    surveys: ModelSurveys,
    machine: Machine,
    problems: list[Problem],
) -> Examined:
    """Check all settings; raises `ConfigError` with what is wrong, and `problems`.

    `reason` is that of the micro-batch.
    """
    settings = with_new_tokens(_with_tokenizer(settings), problems)
    problems += check(settings, is_whole=not _may_hide_the_model(problems))
    problems += check_epochs(settings)
    problems += check_head(settings)
    scale, batch = scale_out(settings, machine, problems)
    if batch is not None:
        problems += check_sizes(settings.elastic, scale, batch)
        problems += check_global_batch(settings, batch)
    problems += check_meshes(settings, scale)
    problems += check_replace_slow(settings.elastic, scale)
    problems += check_traced_ranks(settings.train.profile, scale.world)
    plugin_problems = list(check_plugin(settings.plugin, scale, machine))
    problems += plugin_problems
    data = plan_data(settings, problems)
    schedule = dict(sorted(settings.freeze.unfreeze.items()))
    kept = (*settings.freeze.except_, *trained_heads(settings))
    made = {"unfreeze": schedule, "except_": kept}
    freeze = FreezePlan(**same_fields(settings.freeze, Freeze) | made)
    model = _model(settings, problems)
    survey = survey_model(model, freeze, settings, scale.mesh, surveys, problems)
    if survey is not None and not plugin_problems:
        problems += check_override_names(settings.plugin, survey)
    if data is not None and survey is not None and survey.balances_experts:
        data = dataclasses.replace(data, marks_padding=data.source != "target" and not data.isolate)
    find = functools.partial(surveys.sequence, model, data) if data is not None else None
    scale = plan_stages(settings, scale, survey, find, problems)
    if problems or survey is None or batch is None or data is None:
        raise ConfigError(hinted(problems))
    # of a user's own dataset, and of samples that are no run of tokens, the unit is the sample
    per_sample = 1 if data.source == "target" or data.counts_samples else data.seq_len
    return Examined(
        settings=settings,
        scale=scale,
        batch=dataclasses.replace(
            batch, tokens_per_step=batch.global_batch * per_sample, reason=reason
        ),
        model=model,
        data=data,
        freeze=freeze,
        survey=survey,
    )


def planning_context(
    examined: Examined,
    train: TrainPlan,
    optim: OptimPlan,
    surveys: ModelSurveys,
    machine: Machine,
    changed_plan: Callable[[dict[str, Any]], RunPlan | None],
) -> PlanningContext:
    """What the choice of a plugin depends on."""
    scale, batch, model, data = examined.scale, examined.batch, examined.model, examined.data
    survey = at_peak(examined.survey.divided(scale.mesh), examined.freeze)
    traces = surveys.traces(model, examined.freeze, data, train, scale)
    stages = divide(Stage(survey=survey, traces=traces), scale)
    return PlanningContext(
        **same_fields(examined, Examined),
        stages=stages,
        stage=stages[0],
        train=train,
        optim=optim,
        observe=_observe(examined.settings.observe),
        machine=machine,
        hardware=timed_hardware(examined.settings, scale, machine),
        before=pass_before(model, survey, data, train, scale, batch, surveys),
        changed_plan=changed_plan,
    )


def _of_stages(context: PlanningContext, plugin: PluginPlan) -> tuple[MemoryBreakdown, ...]:
    """Memory of a rank of each pipeline stage; nothing where there is one."""
    stages = context.of_stages() if context.scale.mesh.pp > 1 else []
    return tuple(own.own_option(plugin).memory for own in stages)


def assemble(context: PlanningContext, steps: Steps, plugin: PluginPlan, option: Option) -> RunPlan:
    """The plan, without a name; raises `ConfigError` where its memory has no room.

    `context` is that of the fullest stage, and `option` what `plugin` needs there.
    """
    settings, scale, batch, train = context.settings, context.scale, context.batch, context.train
    checkpoint = _checkpoint(settings, steps)
    problems = list(check_room(context, plugin))
    copies, unfit = plan_memory_copy(context, plugin, option.peak)
    problems += [*unfit, *check_kept(settings, has_copies=copies.enabled)]
    if problems:
        raise ConfigError(problems)
    return RunPlan(
        name="",
        recipe=settings.recipe,
        runs_dir=settings.runs_dir,
        world_size=scale.world,
        plugin=plugin,
        mesh=scale.mesh,
        model=context.model,
        data=context.data,
        batch=batch,
        train=dataclasses.replace(train, eval_first=evaluates_first(train, batch, option.time)),
        optim=context.optim,
        freeze=dataclasses.replace(context.freeze, matched=context.survey.matched),
        cluster=ClusterPlan(**same_fields(scale, ClusterPlan)),
        elastic=_elastic(settings.elastic, scale.nodes, copies),
        checkpoint=checkpoint,
        observe=context.observe,
        parameters=count(context.survey),
        memory=option.memory,
        stage_memory=_of_stages(context, plugin),
        peak=option.peak,
        memory_shape=context.shape(plugin),
        time=option.time,
        flops_per_token=context.survey.flops_per_token,
    )


def _may_hide_the_model(problems: Sequence[Problem]) -> bool:
    """Whether model or data may be missing only because of known problems."""
    others = set(sections(Config)) - {"model", "data"}
    return any(problem.key.partition(".")[0] not in others for problem in problems)


def _model(settings: Config, problems: list[Problem]) -> ModelPlan:
    model, hf = settings.model, settings.model.hf
    adapter = plan_adapter(settings.adapter, problems)
    if adapter is not None and adapter.path is not None:
        problems += check_brought(values_of(settings), adapter)
        problems += check_brought_head(settings, adapter.modules)
    return ModelPlan(
        target=model.target or "",
        args=model.args,
        hf=str(Path(hf).expanduser().absolute()) if hf else None,
        deferred_init=model.deferred_init,
        quantize=model.quantize,
        adapter=adapter,
        loss=settings.train.loss,
        objective=objective_plan(settings, problems),
        tp_plan=settings.mesh.tp_plan,
        ep_plan=settings.mesh.ep_plan,
    )


def _with_tokenizer(settings: Config) -> Config:
    """Resolve `data.tokenizer=auto`: the tokenizer in the model directory, or bytes."""
    data = settings.data
    if data.tokenizer != "auto":
        return settings
    folder = Path(settings.model.hf or "").expanduser()
    beside = settings.model.hf and (folder / "tokenizer.json").is_file()
    chosen = str(folder) if beside else "bytes"
    return dataclasses.replace(settings, data=dataclasses.replace(data, tokenizer=chosen))


def _train(train: Train, steps: Steps, num_validation: int | None, study: LossStudy) -> TrainPlan:
    computed = {
        "max_steps": steps.max_steps,
        "eval_every": steps.eval_every,
        "epoch_steps": steps.per_epoch,
        "num_validation": num_validation,
        "stop_early": train.stop_early if train.stop_early.metric else None,
        "profile": profile_plan(train.profile),
        "ignore_index": study.ignore_index,
    }
    return TrainPlan(**same_fields(train, TrainPlan) | computed)


def _optim(optim: Optim, steps: Steps) -> OptimPlan:
    betas, place = list(optim.betas), optimizer_of(optim.name).momentum_beta
    if optim.momentum is not None and place is not None and place < len(betas):
        betas[place] = optim.momentum
    computed = {
        "betas": tuple(betas),
        "schedule": optim.schedule.name,
        "warmup_steps": steps.warmup_steps,
        "final_ratio": optim.schedule.min_lr_ratio,
        "decay_steps": optim.schedule.decay_steps,
    }
    return OptimPlan(**same_fields(optim, OptimPlan) | computed)


def _checkpoint(settings: Config, steps: Steps) -> CheckpointPlan:
    """`every: auto` saves by time, `every: null` at the end only, `every: 0` never."""
    checkpoint = settings.checkpoint
    if checkpoint.resume not in ("auto", "none"):
        folder = str(find_resume(checkpoint.resume))
        checkpoint = dataclasses.replace(checkpoint, resume=folder)
    by_time = checkpoint.every == "auto"
    return CheckpointPlan(
        **same_fields(checkpoint, CommonCheckpoint),
        enabled=checkpoint.every != 0,
        every=steps.save_every,
        every_s=60 * checkpoint.minutes if by_time else 0.0,
        best_metric=checkpoint.best.metric,
        best_mode=checkpoint.best.mode,
    )


def _elastic(elastic: Elastic, nodes: int, copies: MemoryCopyPlan) -> ElasticPlan:
    return ElasticPlan(
        **same_fields(elastic, Recovery),
        check_every=elastic.check_every or 0,
        min_nodes=elastic.min_nodes or nodes,
        max_nodes=elastic.max_nodes or nodes,
        memory_copy=copies,
    )


def _observe(observe: Observe) -> ObservePlan:
    return ObservePlan(
        log_every=observe.log_every or 0,
        grads_every=observe.grads_every or 0,
        trackers=tuple(observe.trackers),
        samples=observe.samples if observe.samples.prompts else None,
        notify=notify_plan(observe.notify),
        metrics_port=observe.metrics_port,
    )


def _default_name(settings: Config, plugin: str) -> str:
    """`llm-tiny-zero2-20260131-235959`."""
    model = settings.model
    named = (model.target or "").rpartition(":")[2]
    if model.hf:
        named = Path(hub_name(model.hf) or model.hf).name
    about = Path(settings.recipe).stem if settings.recipe else named
    return f"{about}-{plugin}-{time.strftime('%Y%m%d-%H%M%S')}"


def _warnings_of_length(settings: Config, planned: Steps, optim: OptimPlan) -> Iterator[str]:
    """Warnings of settings that a run this short never reaches."""
    steps, warmup = planned.max_steps, planned.warmup_steps
    if warmup > steps:
        yield (
            f"optim.schedule.warmup_steps={warmup}: the run ends after {steps} steps, "
            "before the learning rate reaches its peak"
        )
    decay = optim.num_decay_steps(steps)
    if optim.schedule == "wsd" and warmup < steps and warmup + decay > steps:
        yield (
            f"optim.schedule: {warmup} steps of warm-up and {decay} of decay overlap in a run of "
            f"{steps}: the learning rate jumps down where the warm-up ends, from its peak to "
            f"{1 - (1 - optim.final_ratio) * max(warmup - (steps - 1 - decay), 0) / decay:.3g} of "
            "it; set decay_steps or the warm-up lower"
        )
    for step in sorted(settings.freeze.unfreeze):
        if step > steps:
            yield f"freeze.unfreeze.{step}: never happens, the run ends after {steps} steps"


def _warnings(
    context: PlanningContext, plan: RunPlan, steps: Steps, of_loss: Sequence[str]
) -> Iterator[str]:
    """Warnings of what is allowed but probably not intended; `of_loss` are those of the loss."""
    settings, survey = context.settings, context.survey
    if settings.name is not None and settings.name != plan.name:
        yield f"name={settings.name}: the run is called {plan.name}, as its folder"
    if not plan.smoke:
        yield from _warnings_of_length(settings, steps, plan.optim)
    yield from _warnings_of_ranks(settings, context.scale, context.machine)
    yield from warn_of_data(settings, survey)
    yield from warn_of_new_rows(settings, survey)
    yield from warn_of_unseen_images(plan.data, survey)
    yield from survey.remarks
    yield from of_loss
    yield from warn_of_batch_norms(survey, plan.batch)
    yield from bubble_warning(context.scale, plan.batch)
    yield from warn_of_durations(plan.train, plan.batch, plan.time)


def _warnings_of_ranks(settings: Config, scale: Scale, machine: Machine) -> Iterator[str]:
    """Warnings of memory that is not known, and of how many ranks there are."""
    if not scale.memory_bytes:
        yield (
            "cluster.memory: not known of these GPUs, so nothing tells whether the plan fits: "
            "set hardware=NAME or cluster.memory"
        )
    yield from warn_of_first_node(settings.elastic, scale)
    procs, (default, _) = scale.procs_per_node, ranks_here(scale.device, machine)
    if settings.cluster.procs_per_node == "auto" and procs < default:
        yield f"cluster.procs_per_node={procs}: {default} are there, but do not divide the batch"
    if scale.device == "cpu" and procs > machine.num_cores:
        yield f"cluster.procs_per_node={procs}: ranks share {machine.num_cores} cores"
    named = settings.hardware.name is not None
    yield from machine.warn_of_threads(procs)
    if scale.device == "cuda" and procs > machine.num_devices and not named:
        yield f"cluster.procs_per_node={procs}: this machine has {machine.num_devices} GPUs"


def num_validation(settings: Config, data: DataPlan, *, surveys: ModelSurveys) -> int | None:
    """Return the number of validation samples; None if nothing needs it or it is not known yet.

    Raises `ConfigError` for all samples of a stream, and where a best checkpoint or the end of the
    run depends on evaluations and there are none.
    The data is prepared only where these are likely, because no share of it is kept for validation.
    """
    train = settings.train
    key, metric = "checkpoint.best.metric", settings.checkpoint.best.metric
    if metric is None:
        key, metric = "train.stop_early.metric", train.stop_early.metric
    if not train.eval_steps or (train.eval_steps != "all" and metric is None):
        return None
    fraction = data.validation_fraction
    found = surveys.count_validation(data, train.seed, prepare=metric is not None and fraction == 0)
    if found == sys.maxsize and train.eval_steps == "all":
        raise ConfigError([endless_evaluation()])
    if found == 0 and metric is not None:
        raise ConfigError([no_best(key, metric, data)])
    return found


@contextmanager
def all_names(settings: Config, surveys: ModelSurveys) -> Iterator[None]:
    """Where a name of the user's code is wrong, tell the other wrong ones as well."""
    try:
        yield
    except ConfigError as error:
        keys = (*CODE, "optim.name", "optim.schedule.name")
        names = {key: attrgetter(key)(settings) for key in keys}
        named = [p for p in error.problems if p.key in names and p.value == names[p.key]]
        told = {p.key for p in named if not p.expected.startswith(UNBUILT)}
        others = {k: v for k, v in names.items() if v and ":" in v and k not in told}
        if not told or not others:
            raise
        raise ConfigError([*error.problems, *surveys.wrong_names(others)]) from error


def check_own_functions(
    settings: Config, data: DataPlan, steps: Steps, surveys: ModelSurveys
) -> None:
    """Raise `ConfigError` where a function is not there, or returns what cannot be used."""
    train = settings.train
    asked = {
        "data.sampler": data.sampler,
        "data.collate": data.collate,
        "train.metrics": train.metrics,
        "train.on_gradients": train.on_gradients,
    }
    if named := {key: dotted for key, dotted in asked.items() if dotted}:
        surveys.check_functions(data, named, train.seed)
    name = settings.optim.schedule.name
    if ":" in name and (wrong := surveys.check_schedule(name, steps.max_steps)):
        expected = f"a function of (step, total) that returns factors of 0 or more ({wrong})"
        fix = "steps count from 0; correct the function"
        key = "optim.schedule.name"
        raise ConfigError([Problem(key=key, value=name, expected=expected, fix=fix)])
    if settings.mesh.pp > 1 and ":" in settings.optim.name:
        may_freeze = settings.freeze.patterns, settings.adapter.name
        with_none, optim = any(may_freeze), _optim(settings.optim, steps)
        if why := surveys.check_optimizer(optim, with_none=with_none):
            key, value, fix = "optim.name", optim.name, "take another, or set mesh.pp=1"
            expected = f"one that updates each parameter by itself with mesh.pp>1: {why}"
            raise ConfigError([Problem(key=key, value=value, expected=expected, fix=fix)])


MOST_STUDIED_BYTES = 256 << 20
"""Bytes of parameters up to which a plan runs forwards of the model itself."""


def study_loss(
    settings: Config, model: ModelPlan, data: DataPlan, survey: Survey, surveys: ModelSurveys
) -> LossStudy:
    """What forwards of the model find of its loss; nothing where colotrain's own code sums it.

    Raises `ConfigError` for labels that teach something else than they are meant to. A larger model
    is looked at when its run begins.
    """
    ours = survey.scores_tokens or (model.hf and not survey.other_task)
    is_known = ours or data.masked or data.counts_samples or data.classes
    of_text = data.source != "target" and is_known
    num_bytes = sum(p.numel * p.itemsize for p in survey.parameters)
    if (of_text and model.loss is None) or (num_bytes > MOST_STUDIED_BYTES and not ours):
        return LossStudy()
    found = surveys.study_loss(model, data, settings.train.seed)
    if found.problem:
        raise ConfigError([Problem(**found.problem)])
    return found


def warn_of_unseen_images(data: DataPlan, survey: Survey) -> Iterator[str]:
    """Warning of modules that text without images does not reach: they stay, or are not planned."""
    if data.images:
        yield (
            f"images: the plan counts no pixels and no activations of {', '.join(survey.of_images)}"
        )
    if data.source == "target" or data.images:
        return
    begins = tuple(f"{name}." for name in survey.of_images)
    trained = [p for p in survey.parameters if p.frozen_by is None and p.name.startswith(begins)]
    if trained:
        globs = ",".join(f"{name}.*" for name in survey.of_images)
        numbers = sum(p.numel for p in trained)
        yield (
            f"text without images reaches none of {', '.join(survey.of_images)}: {numbers:,} "
            f"numbers stay as they are; freeze.patterns=[{globs}] saves their gradients and "
            "optimizer states"
        )


def warn_of_batch_norms(survey: Survey, batch: BatchPlan) -> Iterator[str]:
    """Warning of modules by which the samples of a micro-batch depend on one another."""
    names, size = survey.batch_norms, batch.micro_batch
    if names and batch.global_batch > size:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"batch normalization ({names[0]}{more}) sees the samples of one micro-batch on one "
            f"rank, {size}, of the {batch.global_batch} of a step: results depend on "
            "train.micro_batch; GroupNorm and LayerNorm see each sample by itself"
        )
