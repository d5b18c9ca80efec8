"""Survey of the model before a run: its parameters, matches of freezing, FLOPs per token."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.data.read.loader import (
    Split,
    open_samples,
    planned_collate,
    read_sample,
    refuse_empty,
    stack,
)
from colotrain.data.read.weighted import sample_weights
from colotrain.dotted import described, import_target, users_line
from colotrain.engine.build.sequence import find_sequence
from colotrain.engine.model.block_reasons import reasons_without_values
from colotrain.engine.model.freezing import count_matches, freeze_
from colotrain.engine.model.model_blocks import find_blocks
from colotrain.engine.model.model_checks import check_dtypes, check_parameters
from colotrain.engine.step import loss_trial
from colotrain.errors import ColotrainError, ConfigError, Problem, message_of
from colotrain.generators import seeded
from colotrain.models.context_parallel import ATTRIBUTE, SequenceShard, divide_sequences_
from colotrain.models.documents import DOCUMENT_IDS
from colotrain.models.expert_parallel import ExpertShard, expert_divisions, share_tokens_
from colotrain.models.facts import facts_of
from colotrain.models.huggingface import (
    is_from_directory,
    let_divide_matrices_,
    let_divide_samples_,
    let_predict_next_,
    predicts_next,
    task_in,
)
from colotrain.models.huggingface_check import why_matrices_differ, why_sequences_differ
from colotrain.models.huggingface_images import modules_of_images
from colotrain.models.huggingface_loss import balances_experts, holds_all_logits
from colotrain.models.huggingface_match import missing_in, remarks_on_files
from colotrain.models.huggingface_task import MASKED
from colotrain.models.llm import LLM
from colotrain.models.loading import (
    begin_training_,
    build,
    build_on_meta,
    build_whole,
    leaves_init_uncalled,
)
from colotrain.models.objective import attach_, kept_of
from colotrain.models.quantized.layers import num_weights
from colotrain.models.tensor_parallel import TensorShard, divide_parameters_
from colotrain.models.tensor_parallel_styles import apply_styles_, own_divisions
from colotrain.planner.traced.optimizer_trial import why_not_on_stages
from colotrain.planner.traced.tracing import NotTraceable, trace
from colotrain.spec.axes import MeshPlan
from colotrain.spec.divisions import Divisions
from colotrain.spec.objectives import GOOD, MARGIN, PADDING_MASK
from colotrain.spec.plan import DataPlan, FreezePlan, ModelPlan, OptimPlan, Recompute
from colotrain.spec.sequence import BlockSequence
from colotrain.spec.survey import (
    TRANSFORMERS,
    AxisChecks,
    Exchange,
    LossStudy,
    ParameterInfo,
    Survey,
    Trace,
    Ungrouped,
)
from colotrain.torch_internals import BatchNorms


def survey(model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
    """Build the model, without storage if possible, freeze it, and describe it."""
    module = build_on_meta(model)
    if module is None:
        module = build(model, seed=0)
    attach_(module, model)
    frozen = freeze_(module, freeze)
    check_parameters(module, model)
    check_dtypes(module, [(name, [block]) for name, block in find_blocks(module)], model, freeze)
    aliases = tied_names(module)
    groups = {
        id(p): name for name, block in find_blocks(module) for p in module_tree.parameters(block)
    }
    weights = num_weights(module)
    parameters = tuple(
        ParameterInfo(
            name=name,
            shape=tuple(parameter.shape),
            numel=parameter.numel(),
            itemsize=parameter.element_size(),
            frozen_by=frozen.get(name),
            aliases=aliases[name],
            group=groups.get(id(parameter), ""),
            dtype=str(parameter.dtype).removeprefix("torch."),
            is_cast=parameter.is_floating_point(),
            num_weights=weights.get(id(parameter)),
        )
        for name, parameter in module_tree.named_parameters(module)
    )
    return Survey(
        parameters=parameters,
        matched=count_matches(module, freeze),
        flops_per_token=flops_per_token(module, seq_len),
        vocab_size=vocab_size(module),
        **positions(module),
        built_whole=not model.is_deferred,
        libraries=(TRANSFORMERS,) if uses_transformers(module, model) else (),
        balances_experts=predicts_next(module) and balances_experts(module),
        batch_norms=tuple(batch_norms(module)),
        **huggingface_task(module, model),
        remarks=tuple(remarks(module, model)),
        chunks_loss=isinstance(module, LLM)
        or (predicts_next(module) and not (balances_experts(module) or holds_all_logits(module))),
        scores_tokens=isinstance(module, LLM)
        or (predicts_next(module) and not balances_experts(module)),
        isolates=DOCUMENT_IDS in inspect.signature(module.forward).parameters,
        divides_sequences=hasattr(module, ATTRIBUTE),
        whole_sequences=facts_of(module).whole_sequences,
        divisions=own_divisions(module, model),
        experts=expert_divisions(module, model),
    )


def check_axes(model: ModelPlan) -> AxisChecks:
    """Compare small copies of a model of transformers, divided over axes, with the whole one.

    Other models, and matrices that `mesh.tp_plan` divides, are the user's to compare (`verify`).
    """
    module = build_on_meta(model)
    if module is None or not is_from_directory(module):
        return AxisChecks()
    predicts = predicts_next(module)
    equip = let_predict_next_ if predicts else let_divide_
    matrices = tokens = sequences = ""
    how = own_divisions(module, model)
    if how is not None and not model.tp_plan:
        differ = functools.partial(why_matrices_differ, module, equip, predicts_next=predicts)
        matrices = differ()
        tokens = differ(by_tokens=True) if how.divides_tokens and not matrices else matrices
    if hasattr(module, ATTRIBUTE):
        sequences = why_sequences_differ(module, equip, predicts_next=predicts)
    return AxisChecks(matrices=matrices, tokens=tokens, sequences=sequences)


def let_divide_(model: nn.Module) -> None:
    """Let ranks divide the matrices and samples of a model that is no causal one, if they can."""
    let_divide_matrices_(model)
    let_divide_samples_(model)


def uses_transformers(module: nn.Module, model: ModelPlan) -> bool:
    """Whether the model or its teacher is one of transformers, which every rank then imports."""
    if model.objective and model.objective.teacher:
        return True
    return any(TRANSFORMERS in type(inner).__module__ for inner in module.modules())


def batch_norms(module: nn.Module) -> Iterator[str]:
    """Names of the modules that normalize what one rank has of a micro-batch, in training."""
    begin_training_(module)
    for name, inner in module_tree.named_modules(module):
        of_rank = isinstance(inner, BatchNorms) and not isinstance(inner, nn.SyncBatchNorm)
        if of_rank and (inner.training or not inner.track_running_stats):
            yield name or type(inner).__name__


def study_loss(model: ModelPlan, data: DataPlan, seed: int) -> LossStudy:
    """What a few forwards of the real model in this process find of its loss.

    The samples are the first of a user's dataset, or random tokens.
    """
    module = build_on_meta(model) if model.is_deferred else None
    if module is not None:
        attach_(module, model)
    if module is None or not loss_trial.sums_tokens(module):
        module = build_whole(model, seed=seed)
        attach_(module, model)
    begin_training_(module)
    samples = _first_samples(data, seed, vocab_size(module))
    rows = (tensor[:2] for tensor in samples.values() if not tensor.is_floating_point())
    tokens = max((tensor.numel() for tensor in rows if tensor.ndim == 2), default=2)
    flops = 2.0 * sum(p.numel() for p in module_tree.parameters(module)) * tokens
    if flops > MOST_FLOPS and not loss_trial.sums_tokens(module):
        return LossStudy()
    found = loss_trial.examine(module, samples, budget_s=MOST_SECONDS)
    problem = loss_trial.problem_of(found, model, data)
    return LossStudy(
        ignore_index=found.rule.ignored,
        notes=tuple(loss_trial.notes_of(found)),
        problem={} if problem is None else dataclasses.asdict(problem),
    )


MOST_FLOPS = 2e12
"""Floating-point operations of a forward of two samples, above which a plan runs none."""
MOST_SECONDS = 10.0
"""Seconds after which no further forward with a loss begins."""


def _first_samples(data: DataPlan, seed: int, vocab: int | None) -> dict[str, Tensor]:
    """A few samples; one where they have several shapes, since then a micro-batch has one, too."""
    if data.source == "target":
        with seeded(seed):
            samples = open_samples(data, "train")
            refuse_empty(samples)
            num, collate = min(loss_trial.MOST_SAMPLES, len(samples)), planned_collate(data)
            found = [(i, read_sample(samples, i)) for i in range(num)]
            try:
                return stack(found, collate)
            except ColotrainError:
                return stack(found[:1], collate)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab or 2, (2, data.seq_len + 1), generator=generator)
    sample = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    return {**sample, DOCUMENT_IDS: tokens[:, :-1] * 0} if data.isolate else sample


def huggingface_task(module: nn.Module, model: ModelPlan) -> dict[str, Any]:
    """The task of a Hugging Face model, and what its files lack."""
    if model.hf is None:
        return {}
    task = task_in(module)
    found: dict[str, Any] = {"missing": tuple(missing_in(module))}
    found["of_images"] = modules_of_images(module)
    if predicts_next(module):
        return found
    unknown = f"another task ({type(module).__name__})"
    if task is None:
        return found | {"other_task": unknown}
    other = {"other_task": task.name, "samples": task.sample, "finds_hidden": task is MASKED}
    return found | other


UNCALLED = (
    "the model has an init_weights() that model.target does not call: training begins with the "
    "values that the target returns; call it there, or set model.deferred_init=true"
)


def remarks(module: nn.Module, model: ModelPlan) -> Iterator[str]:
    """What people should know of a model's first values and of how its loss is computed."""
    if model.hf is not None:
        yield from remarks_on_files(module, model.adapter.modules if model.adapter else ())
    elif not model.is_deferred and leaves_init_uncalled(module):
        yield UNCALLED
    if not predicts_next(module):
        return
    if holds_all_logits(module):
        yield (
            "the loss needs the logits of a whole micro-batch in memory: what this model does with "
            "them, or an adapter on its head, keeps colotrain from computing them chunk by chunk"
        )
    if balances_experts(module):
        yield (
            "the routers' auxiliary loss is computed for each sample (or document, with "
            "data.isolate) without its padding, so that it does not depend on the size of "
            "micro-batches; transformers computes it for each micro-batch"
        )


def vocab_size(module: nn.Module) -> int | None:
    """Size of the vocabulary, where the model or its configuration has one."""
    config = getattr(module, "config", None)
    for holder in (module, config, getattr(config, "text_config", None)):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int):
            return size
    return None


def positions(module: nn.Module) -> dict[str, Any]:
    """Limits of a sample's length, from transformers' configuration."""
    config = getattr(module, "config", None)
    most = getattr(getattr(config, "text_config", None) or config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return {}
    learned = [
        m
        for name, m in module_tree.named_modules(module)
        if isinstance(m, nn.Embedding) and m.num_embeddings >= most and re.search("pos|wpe", name)
    ]
    for embedding in learned:
        if embedding.padding_idx is not None:  # RoBERTa's: positions count from the next one
            most = min(most, embedding.num_embeddings - embedding.padding_idx - 1)
    return {"num_positions": most, "learned_positions": bool(learned)}


def tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Parameter name → the other names of the same tensor."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in module_tree.named_parameters(module, remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        others.setdefault(owner, [])
        if owner != name:
            others[owner].append(name)
    return {name: tuple(names) for name, names in others.items()}


def flops_per_token(module: nn.Module, seq_len: int) -> float:
    """The model's own `flops_per_token`, or 6 per parameter (Kaplan et al. 2020)."""
    own = getattr(module, "flops_per_token", None)
    if callable(own):
        return float(own(seq_len))
    weights = num_weights(module)
    return 6.0 * sum(weights.get(id(p), p.numel()) for p in module_tree.parameters(module))


def trace_micro_batch(
    model: ModelPlan,
    freeze: FreezePlan,
    data: DataPlan,
    precision: str,
    checkpointing: Recompute,
    device: str,
    micro_batch: int,
    mesh: MeshPlan | None = None,
) -> Trace | str:
    """Trace a micro-batch through the model, or say why that does not work without values."""
    module = build_on_meta(model)
    if module is None:
        return "it cannot be built on the meta device"
    attach_(module, model)
    freeze_(module, freeze)
    begin_training_(module)
    mesh = mesh or MeshPlan()
    sequences = SequenceShard(rank=0, size=mesh.cp, device=device)
    tensors = TensorShard(rank=0, size=mesh.tp, by_tokens=mesh.sequence_parallel)
    if mesh.cp > 1:
        divide_sequences_(module, sequences)
    experts = ExpertShard(rank=0, size=mesh.ep)
    if mesh.ep > 1:
        divisions = expert_divisions(module, model)
        divide_parameters_(module, divisions, TensorShard(rank=0, size=mesh.ep))
        share_tokens_(module, divisions, experts)
    if mesh.tp > 1:
        divisions = own_divisions(module, model) or Divisions()
        divide_parameters_(module, divisions, tensors)
        apply_styles_(module, divisions, tensors)
    try:
        sample = one_sample(data, model)
        found = trace(
            module,
            sample,
            precision=precision,
            checkpointing=checkpointing,
            device=device,
            micro_batch=micro_batch,
        )
        shards = (sequences, tensors, experts)
        exchanges = tuple(
            Exchange(ranks=shard.size, calls=shard.calls, whole_bytes=shard.exchanged_bytes)
            for shard in shards
            if shard.calls
        )
        passes = 0 if model.objective is None else model.objective.passes_before
        return dataclasses.replace(found, exchanges=exchanges, passes_before=passes)
    except NotTraceable as error:
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {message_of(cause).partition(chr(10))[0]}"
        return f"{users_line(cause) or 'it'} raised {why}"


def ungrouped(model: ModelPlan, freeze: FreezePlan, data: DataPlan) -> Ungrouped:
    """Find the blocks that cannot be groups; none where no forward runs without values."""
    module = build_on_meta(model)
    if module is None:
        return Ungrouped(blocks=())
    attach_(module, model)
    freeze_(module, freeze)
    begin_training_(module)
    batch = {n: t.new_empty((2, *t.shape)) for n, t in one_sample(data, model).items()}
    return Ungrouped(blocks=tuple(reasons_without_values(module, find_blocks(module), batch) or ()))


def sequence(model: ModelPlan, data: DataPlan) -> BlockSequence:
    """Find the blocks of a model, by a forward with one sample and without values.

    Of a model that reads images the first sample has its values.
    """
    module = build_on_meta(model)
    module = build(model, seed=0) if module is None else module
    attach_(module, model)
    begin_training_(module)
    if data.images or (data.source == "target" and modules_of_images(module)):
        samples = open_samples(data, "train")
        refuse_empty(samples)
        batch = stack([(0, read_sample(samples, 0))], planned_collate(data))
        return find_sequence(module, batch)
    sample = {name: tensor[None] for name, tensor in one_sample(data, model).items()}
    return find_sequence(module, sample)


def one_sample(data: DataPlan, model: ModelPlan) -> dict[str, Tensor]:
    """The tensors of one sample, without storage; for a user's dataset those of the first.

    Raises `ConfigError` for a dataset that is empty or whose samples are not dicts of tensors.
    """
    if data.source == "target":
        samples = open_samples(data, "train")
        refuse_empty(samples)
        stacked = stack([(0, read_sample(samples, 0))], planned_collate(data))
        if data.isolate and DOCUMENT_IDS not in stacked:
            expected = f"false, or samples with {DOCUMENT_IDS} (these have {', '.join(stacked)})"
            fix = f"give {DOCUMENT_IDS} in data.target's samples, or set data.isolate=false"
            raise ConfigError([Problem(key="data.isolate", value=True, expected=expected, fix=fix)])
        return {name: tensor[0].to("meta") for name, tensor in stacked.items()}
    shape = (len(data.rows), data.seq_len) if data.rows else (data.seq_len,)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    sample = {"input_ids": tokens, "labels": tokens.clone()}
    if data.related is not None:
        return {"input_ids": tokens, "attention_mask": tokens.clone()}
    if data.rated:
        sample[GOOD] = tokens.new_empty(())
    if data.margins:
        sample[MARGIN] = torch.empty((), device="meta")
    if data.classes and not data.classes_of_words:
        sample["labels"] = tokens.new_empty(())
    if data.isolate:
        sample[DOCUMENT_IDS] = tokens.clone()
    if data.marks_padding and data.packing != "stream":
        sample[PADDING_MASK] = tokens.clone()
    if (kept := kept_of(model)) is not None:
        sample[kept.entry] = kept.empty(tokens, device="meta")
    return sample


def check_schedule(dotted: str, total: int) -> str | None:
    """Return what is wrong with a learning-rate schedule of `total` steps, or None.

    Of a long run it is called for some of the steps, the first and the last among them.
    """
    function = import_target("optim.schedule.name", dotted)
    stride = max(1, total // CHECKED_STEPS)
    for step in (*range(0, total, stride), total - 1):
        try:
            factor = float(function(step, total))
        except Exception as error:
            return f"of step {step} it raised {described(error)}"
        if not (math.isfinite(factor) and factor >= 0):
            return f"of step {step} it returned {factor:g}"
    return None


def check_optimizer(optim: OptimPlan, with_none: bool) -> str | None:
    """Return why an optimizer of the user's is not the same on pipeline stages, or None."""
    return why_not_on_stages(optim, with_none=with_none)


def wrong_names(named: dict[str, str]) -> list[Problem]:
    """Return what cannot be imported of the user's code, which is `named` by setting."""
    problems: list[Problem] = []
    for key, dotted in named.items():
        try:
            import_target(key, dotted)
        except ConfigError as error:
            problems += error.problems
    return problems


def check_functions(data: DataPlan, named: dict[str, str], seed: int) -> None:
    """Import the user's functions `named`, by setting, and ask `data.sampler` for its weights.

    Raises `ConfigError` with all that cannot be imported.
    """
    if problems := wrong_names(named):
        raise ConfigError(problems)
    if data.sampler is not None:
        with seeded(seed):
            samples = open_samples(data, "train")
        refuse_empty(samples)
        sample_weights(samples, data.sampler)


CHECKED_STEPS = 2000
"""About how many steps of a run a schedule is called for beforehand."""


def count_samples(data: DataPlan, seed: int, split: Split) -> int:
    """Number of samples of a split, opened as the ranks do; `sys.maxsize` for a stream."""
    with seeded(seed):
        return len(open_samples(data, split))
