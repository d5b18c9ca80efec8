"""Checks of configuration against the model: freezing, optimizer rules, mesh, length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from colotrain.config.data import holds_tokens
from colotrain.config.schema import Config, Data, Optim
from colotrain.errors import ColotrainError, ConfigError, Problem, suggest
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.planner.objectives import check_objective
from colotrain.planner.scale import touches
from colotrain.planner.vocabulary import check_vocabulary
from colotrain.spec.axes import MeshPlan
from colotrain.spec.plan import Freeze, FreezePlan, ModelPlan, ParameterCounts, matches
from colotrain.spec.survey import COMPILER, AxisChecks, Survey

FIRST = ("model", "adapter", "data.seq_len", "train.embed")
"""Settings that a model is built with: without them, or with wrong ones, none is built."""


def survey_model(
    model: ModelPlan,
    freeze: FreezePlan,
    settings: Config,
    mesh: MeshPlan,
    surveys: ModelSurveys,
    problems: list[Problem],
) -> Survey | None:
    """Survey the model, and append problems of the settings with it; None if it cannot be built."""
    if not model.value or touches(problems, FIRST):
        return None
    try:
        found = surveys.survey(model, freeze, settings.data.seq_len)
    except ConfigError as error:
        problems += error.problems
        return None
    except ColotrainError as error:
        problems.append(_wrong_model(model, f"can be built ({error.problem})", error.fix))
        return None
    if not found.parameters:
        problems.append(_wrong_model(model, "has parameters", "register them on the module"))
    if not touches(problems, ("freeze",)):
        problems += _check_freeze(settings.freeze, found)
    problems += _check_optimizer_rules(settings.optim, found)
    problems += _check_rounding(settings.optim, freeze, found)
    if not touches(problems, ("data",)):
        problems += check_objective(settings, model, found, surveys)
        problems += _check_text_samples(settings, model, found)
        problems += check_vocabulary(settings, found)
        problems += _check_isolation(settings, found)
        problems += _check_length(settings.data, found)
    axes = [*_check_context_parallel(settings, model, found)]
    axes += _check_tensor_parallel(settings, model, found)
    axes += _check_expert_parallel(settings, model, found)
    axes += _check_compiled(settings)
    axes += _check_images_on_stages(settings, found)
    axes += _check_tokens(settings, model, found)
    if not axes and model.hf is not None:
        axes += _check_equality(settings, model, surveys)
    problems += axes
    problems += _check_divided_length(mesh, settings.data)
    if settings.train.compile:
        found = dataclasses.replace(found, libraries=(*found.libraries, COMPILER))
    return found


UNBUILT = "a model that"
"""How the problems of models begin whose names can be imported."""


def _wrong_model(model: ModelPlan, which: str, fix: str) -> Problem:
    expected = f"{UNBUILT} {which}"
    return Problem(key=model.key, value=model.value, expected=expected, fix=fix)


def _check_freeze(freeze: Freeze, survey: Survey) -> Iterator[Problem]:
    """Problems of patterns that match nothing, unfreeze nothing, or freeze everything."""
    written = {"freeze.patterns": freeze.patterns, "freeze.except": freeze.except_}
    written |= {f"freeze.unfreeze.{step}": globs for step, globs in freeze.unfreeze.items()}
    names = [name for p in survey.parameters for name in (p.name, *p.aliases)]
    for key, glob in ((key, glob) for key, globs in written.items() for glob in globs):
        if not survey.matched.get(glob):
            expected, fix = "a glob that matches a parameter's name", _nearest(glob, names)
            yield Problem(key=key, value=glob, expected=expected, fix=fix)
    frozen = [n for p in survey.parameters if p.frozen_by is not None for n in (p.name, *p.aliases)]
    for step, globs in freeze.unfreeze.items():
        for glob in globs:
            if survey.matched.get(glob) and not matches(frozen, [glob]):
                expected = "a glob that matches a parameter which is frozen before"
                fix = _nearest("", frozen) if frozen else "remove it"
                yield Problem(key=f"freeze.unfreeze.{step}", value=glob, expected=expected, fix=fix)
    if names and all(p.frozen_by is not None for p in survey.parameters):
        expected = "at least one parameter that trains from the first step (all are frozen)"
        value, fix = ", ".join(freeze.patterns) or None, "name some in freeze.except"
        yield Problem(key="freeze.patterns", value=value, expected=expected, fix=fix)


def _check_optimizer_rules(optim: Optim, survey: Survey) -> Iterator[Problem]:
    names = [name for p in survey.parameters for name in (p.name, *p.aliases)]
    for index, rule in enumerate(optim.rules):
        if not matches(names, [rule.match]):
            key, expected = f"optim.rules[{index}].match", "a glob that matches a parameter's name"
            yield Problem(
                key=key, value=rule.match, expected=expected, fix=_nearest(rule.match, names)
            )


def _check_rounding(optim: Optim, freeze: FreezePlan, survey: Survey) -> Iterator[Problem]:
    if optim.rounding == "nearest":
        return
    trained = [
        p
        for p in survey.parameters
        if p.frozen_by is None or freeze.unfreezes((p.name, *p.aliases))
    ]
    others = [p for p in trained if p.dtype not in ("bfloat16", "float32", "float64")]
    if others:
        expected = f"nearest ({others[0].name} is {others[0].dtype})"
        fix = "train parameters in bfloat16, or remove it"
    elif any(p.dtype == "bfloat16" for p in trained):
        return
    else:
        expected = "nearest (no parameter that trains is in bfloat16)"
        fix = "remove it, or give the model its parameters in bfloat16 (model.args.dtype)"
    yield Problem(key="optim.rounding", value=optim.rounding, expected=expected, fix=fix)


def _nearest(glob: str, names: list[str]) -> str:
    """Suggest the nearest names or `module.*`; if none is near, the model's outermost ones."""
    split = [name.split(".") for name in names]
    outermost = [f"{parts[0]}.*" if len(parts) > 1 else parts[0] for parts in split]
    modules = [".".join(p[:depth]) + ".*" for p in split for depth in range(1, len(p))]
    hint = suggest(glob.strip("*.?"), {*names, *modules})
    return hint if hint.startswith("did you mean") else suggest("", set(outermost))


def _check_text_samples(settings: Config, model: ModelPlan, survey: Survey) -> Iterator[Problem]:
    """Problem of prompts for a model that does not continue texts."""
    prompts = settings.observe.samples.prompts
    if prompts and holds_tokens(settings.data):
        expected = "none with files of tokens, whose tokenizer is not known"
        fix = "set observe.samples.prompts=[]"
        yield Problem(key="observe.samples.prompts", value=prompts, expected=expected, fix=fix)
    continues = survey.scores_tokens or (settings.model.hf and not survey.other_task)
    if prompts and not continues:
        expected = "a causal model of transformers, or colotrain.models.llm:LLM"
        fix = "set observe.samples.prompts=[]"
        yield Problem(key=model.key, value=model.value, expected=expected, fix=fix)


def _check_isolation(settings: Config, survey: Survey) -> Iterator[Problem]:
    if settings.data.isolate and settings.data.target is None and not survey.isolates:
        model = settings.model.hf or settings.model.target
        expected = f"a model that takes document_ids ({model} does not)"
        fix = "let its forward take document_ids, or set data.isolate=false"
        yield Problem(key="data.isolate", value=True, expected=expected, fix=fix)


def _check_compiled(settings: Config) -> Iterator[Problem]:
    """Problems of blocks that are compiled in pieces: no piece sees what `selective` keeps."""
    key, value = "train.activation_checkpointing", settings.train.activation_checkpointing
    sizes = {f"mesh.{axis}": getattr(settings.mesh, axis) for axis in ("tp", "cp", "ep")}
    breaks = ["data.isolate"] * settings.data.isolate + [k for k, n in sizes.items() if n > 1]
    if settings.train.compile and value == "selective" and breaks:
        what = f"train.compile and {' and '.join(breaks)}"
        expected = f"none or full with {what} (blocks are compiled in pieces)"
        yield Problem(key=key, value=value, expected=expected, fix=f"set {key}=full")


def _check_context_parallel(
    settings: Config, model: ModelPlan, survey: Survey
) -> Iterator[Problem]:
    """Problems of dividing samples' tokens among ranks."""
    cp = settings.mesh.cp
    if cp <= 1:
        return
    if not survey.divides_sequences:
        expected = f"1: {model.value} cannot divide the tokens of a sample among ranks"
        expected += f" ({survey.whole_sequences})" if survey.whole_sequences else ""
        fix = "docs/context-parallel.md lists the models that can"
        yield Problem(key="mesh.cp", value=cp, expected=expected, fix=fix)


def _check_divided_length(mesh: MeshPlan, data: Data) -> Iterator[Problem]:
    """Problem of samples whose tokens cannot be divided evenly among ranks."""
    unit, length = mesh.token_unit, data.seq_len
    if data.target is None and length % unit:
        near = max(length // unit, 1) * unit
        sizes = f"mesh.cp={mesh.cp}"
        if mesh.sequence_parallel:
            sizes = f"{mesh.named}, mesh.sequence_parallel"
        expected = f"a multiple of {unit} with {sizes}"
        fix = f"set data.seq_len={near} or {near + unit}"
        yield Problem(key="data.seq_len", value=length, expected=expected, fix=fix)


def _check_tokens(settings: Config, model: ModelPlan, survey: Survey) -> Iterator[Problem]:
    """Problems of dividing tokens between the parts of layers (`mesh.sequence_parallel`)."""
    tp, divisions = settings.mesh.tp, survey.divisions
    if not settings.mesh.sequence_parallel or tp <= 1 or divisions is None or divisions.against:
        return
    expected = ""
    if not divisions.divides_tokens:
        expected = f"false: {model.value} cannot divide tokens between the parts of its layers"
    elif (size := survey.vocab_size) is not None and size % tp:
        expected = f"false, for mesh.tp={tp} does not divide the vocabulary of {size}"
    if expected:
        fix = "docs/tensor-parallel.md lists the models that can"
        yield Problem(key="mesh.sequence_parallel", value=True, expected=expected, fix=fix)


def _check_tensor_parallel(settings: Config, model: ModelPlan, survey: Survey) -> Iterator[Problem]:
    """Problems of dividing the model's matrices among ranks."""
    tp, divisions = settings.mesh.tp, survey.divisions
    if tp <= 1:
        return
    if divisions is None:
        expected = f"1: {model.value} cannot divide its matrices among ranks"
        fix = "docs/tensor-parallel.md lists the models that can"
        yield Problem(key="mesh.tp", value=tp, expected=expected, fix=fix)
    elif divisions.against:
        expected = f"1: {model.value} cannot be divided ({divisions.against})"
        fix = "docs/tensor-parallel.md lists the models that can"
        yield Problem(key="mesh.tp", value=tp, expected=expected, fix=fix)
    elif not divisions.allows(tp):
        named = ", ".join(f"{name}={size}" for name, size in divisions.sizes.items())
        heads = divisions.num_kv_heads
        kv = f", and a divisor or multiple of num_kv_heads={heads}" if heads > 1 else ""
        expected = f"a divisor of {named}{kv}"
        fix = f"one of {', '.join(map(str, divisions.possible()))}"
        yield Problem(key="mesh.tp", value=tp, expected=expected, fix=fix)


def _check_equality(settings: Config, model: ModelPlan, surveys: ModelSurveys) -> Iterator[Problem]:
    """Problems of axes over which a small copy of the model computes something else."""
    mesh = settings.mesh
    if mesh.tp <= 1 and mesh.cp <= 1:
        return
    try:
        found = surveys.check_axes(model)
    except ColotrainError as error:
        found = AxisChecks(matrices=error.problem, tokens=error.problem, sequences=error.problem)
    by_tokens = mesh.sequence_parallel and not found.matrices and found.tokens
    matrices: tuple[str, int | bool, str, str] = "mesh.tp", mesh.tp, "1", found.matrices
    if by_tokens:
        matrices = "mesh.sequence_parallel", True, "false", found.tokens
    sequences = "mesh.cp", mesh.cp, "1", found.sequences
    for size, (key, value, other, why) in ((mesh.tp, matrices), (mesh.cp, sequences)):
        if size > 1 and why:
            expected = f"{other}: {model.value} cannot be divided ({why})"
            page = "context" if key == "mesh.cp" else "tensor"
            fix = f"docs/{page}-parallel.md says how models are compared"
            yield Problem(key=key, value=value, expected=expected, fix=fix)


def _check_images_on_stages(settings: Config, survey: Survey) -> Iterator[Problem]:
    """Problem of interleaved stages beside images of a dataset of the user's own."""
    mesh, of_images = settings.mesh, settings.data.target and survey.of_images
    if mesh.pp > 1 and mesh.pp_schedule == "interleaved" and of_images:
        expected = "1f1b with samples of your own for a model that reads images"
        value, fix = mesh.pp_schedule, "set mesh.pp_schedule=1f1b"
        yield Problem(key="mesh.pp_schedule", value=value, expected=expected, fix=fix)


def _check_expert_parallel(settings: Config, model: ModelPlan, survey: Survey) -> Iterator[Problem]:
    """Problems of dividing the model's experts among ranks."""
    ep, how = settings.mesh.ep, survey.experts
    if ep <= 1:
        return
    if how.against:
        expected = f"1: {model.value} cannot divide its experts among ranks ({how.against})"
        fix = "docs/expert-parallel.md lists the models that can"
        yield Problem(key="mesh.ep", value=ep, expected=expected, fix=fix)
    elif not how.allows(ep):
        expected = f"a divisor of {', '.join(f'{n}={size}' for n, size in how.sizes.items())}"
        fix = f"one of {', '.join(map(str, how.possible()))}"
        yield Problem(key="mesh.ep", value=ep, expected=expected, fix=fix)


def _check_length(data: Data, survey: Survey) -> Iterator[Problem]:
    """Problem of samples longer than a learned position embedding: an index out of range."""
    if survey.learned_positions and _is_too_long(data, survey):
        most = survey.num_positions
        expected = f"at most {most}, the model's max_position_embeddings"
        fix = f"set data.seq_len={most}"
        yield Problem(key="data.seq_len", value=data.seq_len, expected=expected, fix=fix)


def warn_of_length(data: Data, survey: Survey) -> Iterator[str]:
    """Warning of samples longer than the model was made for, where positions are computed."""
    if not survey.learned_positions and _is_too_long(data, survey):
        yield (
            f"data.seq_len={data.seq_len}: the model is made for {survey.num_positions} tokens "
            "(max_position_embeddings), and may not make sense of those after them"
        )


def warn_of_data(settings: Config, survey: Survey) -> Iterator[str]:
    """Warnings of samples that are too long for the model, and of samples that nothing reads."""
    data = settings.data
    yield from warn_of_length(data, survey)
    kept = data.validation_fraction and data.target is None and not holds_tokens(data)
    if kept and not data.validation_path and settings.train.eval_steps == 0:
        yield (
            f"train.eval_steps=0: nothing reads the {data.validation_fraction:.2g} of the data "
            "that is kept for validation; data.validation_fraction=0 trains on it, too"
        )


def _is_too_long(data: Data, survey: Survey) -> bool:
    most = survey.num_positions
    return most is not None and data.target is None and data.seq_len > most


def at_peak(survey: Survey, freeze: FreezePlan) -> Survey:
    """The survey after all scheduled unfreezing, when the most memory is needed."""
    parameters = [
        dataclasses.replace(p, frozen_by=None) if freeze.unfreezes((p.name, *p.aliases)) else p
        for p in survey.parameters
    ]
    return dataclasses.replace(survey, parameters=tuple(parameters))


def count(survey: Survey) -> ParameterCounts:
    total = sum(p.counted for p in survey.parameters)
    frozen = sum(p.counted for p in survey.parameters if p.frozen_by is not None)
    return ParameterCounts(total=total, trainable=total - frozen, frozen=frozen)
