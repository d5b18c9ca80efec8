"""What the objective of a run wants of its settings, its data and its model."""

from __future__ import annotations

from collections.abc import Iterator

from colotrain.config.data import data_plan
from colotrain.config.schema import Config
from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.conversations import RELATED_TEXTS
from colotrain.errors import Problem
from colotrain.planner.distillation import check_distillation, distill_plan
from colotrain.planner.embedding import embed_plan
from colotrain.planner.heads import classes_of, padding_id, states_order
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.planner.scale import touches
from colotrain.records import same_fields
from colotrain.spec.objectives import (
    Classify,
    ClassifyPlan,
    Distill,
    Embed,
    MaskedPlan,
    ObjectivePlan,
    RelatedPlan,
    Reward,
    RewardPlan,
    objective_of,
)
from colotrain.spec.plan import BatchPlan, DataPlan, ModelPlan
from colotrain.spec.survey import Survey

SHORTEST = 3  # tokens of a sample: one between those that begin and end it


def plan_data(settings: Config, problems: list[Problem]) -> DataPlan | None:
    """The plan of the data section; None without a source of data, or where problems forbid it."""
    objective = objective_of(settings.train.objective)
    if objective.labels_words:
        problems += _check_words(settings)
    section = f"train.{settings.train.objective}"
    has_classes = objective.has_classes and not touches(problems, ("data", section))
    classes = classes_of(settings, problems) if has_classes else ()
    return data_plan(
        settings.data,
        problems,
        pairs=objective.has_pairs,
        margins=settings.train.reward.margins if objective is Reward else None,
        rated=objective.has_rated_answers,
        related=_related(settings, problems) if objective.relates_texts else None,
        masked=_masked(settings, problems) if objective.hides_tokens else None,
        tokens=settings.model.tokens,
        classes=classes,
        classes_of_words=objective.labels_words,
        classes_numbered=bool(classes) and states_order(settings, classes),
        marks_padding=objective.has_head,
    )


def objective_plan(settings: Config, problems: list[Problem]) -> ObjectivePlan | None:
    """What the loss of `train.objective` depends on; None where the model has its own."""
    if settings.train.objective is None:
        return None
    section = getattr(settings.train, objective_of(settings.train.objective).section)
    if isinstance(section, Distill):
        return distill_plan(section, problems)
    if isinstance(section, Embed):
        return embed_plan(section, settings.model.hf, problems)
    if isinstance(section, Reward):
        return RewardPlan(**same_fields(section, Reward), pad_id=padding_id(settings, problems))
    if isinstance(section, Classify):
        wrong = touches(problems, ("data", f"train.{section.section}"))
        return ClassifyPlan(
            class_names=() if wrong else classes_of(settings, []),
            pad_id=padding_id(settings, problems),
            classes_of_words=section.labels_words,
        )
    return section if isinstance(section, ObjectivePlan) else None


def _check_words(settings: Config) -> Iterator[Problem]:
    """Problem of words for which there is no tokenizer that transformers would have."""
    tokenizer = settings.data.tokenizer
    is_wrong = vocabulary.check_tokenizer(tokenizer) is not None
    if not is_wrong and vocabulary.tokenizer_file(tokenizer) is None:
        expected = f"the tokenizer of a directory, for train.objective={settings.train.objective}"
        fix = "name a directory with a tokenizer.json"
        yield Problem(key="data.tokenizer", value=tokenizer, expected=expected, fix=fix)


def _masked(settings: Config, problems: list[Problem]) -> MaskedPlan | None:
    """The special tokens, from the tokenizer of the data; None where a problem is reported."""
    data = settings.data
    if touches(problems, ("data",)) or vocabulary.check_tokenizer(data.tokenizer) is not None:
        return None
    if data.seq_len < SHORTEST:
        expected = f"at least {SHORTEST} under train.objective=masked"
        problems.append(Problem(key="data.seq_len", value=data.seq_len, expected=expected))
        return None
    found = vocabulary.special_tokens(data.tokenizer, settings.model.tokens)
    if found is None or found.mask is None:
        expected = "a tokenizer with a mask token, for train.objective=masked"
        fix = "name the directory or the tokenizer.json of a masked language model"
        wrong = Problem(key="data.tokenizer", value=data.tokenizer, expected=expected, fix=fix)
        problems.append(wrong)
        return None
    return MaskedPlan(
        probability=settings.train.masking.probability,
        mask_id=found.mask,
        pad_id=found.pad or 0,
        begin_id=found.begin,
        end_id=found.end,
        special_ids=found.special,
        vocab_size=vocabulary.vocab_size_of(data.tokenizer, settings.model.tokens) or 0,
    )


def _related(settings: Config, problems: list[Problem]) -> RelatedPlan | None:
    """The texts of a sample, and the tokens around them; None where a problem is reported."""
    data = settings.data
    if touches(problems, ("data",)) or vocabulary.check_tokenizer(data.tokenizer) is not None:
        return None
    columns = RELATED_TEXTS if settings.train.embed.negatives else RELATED_TEXTS[:-1]
    file = vocabulary.tokenizer_file(data.tokenizer)
    if file is None:
        expected = "the tokenizer of a directory, for train.objective=embed"
        fix = "name a directory with a tokenizer.json"
        wrong = Problem(key="data.tokenizer", value=data.tokenizer, expected=expected, fix=fix)
        problems.append(wrong)
        return None
    found = vocabulary.special_tokens(data.tokenizer, settings.model.tokens)
    end = vocabulary.frame_of(vocabulary.load(file)).after
    pad = 0 if found is None else found.pad or 0
    least = len(end) + 1
    if data.seq_len <= least:
        expected = f"more than {least} under train.objective=embed"
        problems.append(Problem(key="data.seq_len", value=data.seq_len, expected=expected))
        return None
    return RelatedPlan(columns=columns, pad_id=pad, end_ids=end)


def check_global_batch(settings: Config, batch: BatchPlan) -> Iterator[Problem]:
    """Problem of a global batch in which a query has its own positive as its only candidate."""
    compares = objective_of(settings.train.objective).relates_texts
    if compares and batch.global_batch < 2 and not settings.train.embed.negatives:
        expected = (
            "at least 2 under train.objective=embed: with one sample there is nothing to tell"
        )
        fix = "raise it, or set train.embed.negatives=true"
        size = batch.global_batch
        yield Problem(key="train.global_batch", value=size, expected=expected, fix=fix)


def check_objective(
    settings: Config, model: ModelPlan, survey: Survey, surveys: ModelSurveys
) -> Iterator[Problem]:
    """Problems of a model that cannot have the objective's loss, or its labels."""
    if not objective_of(settings.train.objective).has_head:
        yield from _check_task(settings, model, survey)
    yield from _check_scores(settings, model, survey)
    yield from check_distillation(settings, model, survey, surveys)


def _check_task(settings: Config, model: ModelPlan, survey: Survey) -> Iterator[Problem]:
    """Problem of text, whose labels are the next tokens, for a model of another task.

    Where tokens are hidden, it is that of a model that is not made to find them.
    """
    if objective_of(settings.train.objective).relates_texts:
        return
    if settings.data.images and survey.balances_experts:
        expected = "false under data.images: the routers' loss is computed for texts alone"
        key = "model.args.output_router_logits"
        yield Problem(key=key, value=True, expected=expected, fix=f"set {key}=false")
    if settings.data.images and not survey.of_images:
        expected = "a directory of an image-text model (…ForConditionalGeneration)"
        fix = "set data.images=false, or name such a directory in model.hf"
        yield Problem(key=model.key, value=model.value, expected=expected, fix=fix)
    if objective_of(settings.train.objective).hides_tokens:
        if not survey.finds_hidden and (model.hf or survey.scores_tokens):
            expected = "a masked language model, such as a BertForMaskedLM, for its objective"
            fix = "set train.objective=null"
            yield Problem(key=model.key, value=model.value, expected=expected, fix=fix)
    elif survey.other_task and settings.data.target is None and settings.train.loss is None:
        expected = "a causal language model, for the labels of text are the next tokens; this one "
        hides = "set train.objective=masked, which hides tokens of the text, or "
        fix = f"{hides if survey.finds_hidden else ''}set data.target to a dataset of yours"
        yield Problem(
            key=model.key,
            value=model.value,
            expected=f"{expected}is for {survey.other_task}",
            fix=f"{fix} whose samples have {survey.samples or 'what its forward takes'}",
        )


def _check_scores(settings: Config, model: ModelPlan, survey: Survey) -> Iterator[Problem]:
    """Problem of a model whose loss is known of all tokens together only."""
    objective = settings.train.objective
    needs_scores = objective_of(objective).scores_tokens
    if needs_scores and not (survey.scores_tokens or survey.other_task):
        expected = "a causal model of transformers without the routers' auxiliary loss, or "
        expected += f"colotrain.models.llm:LLM, under train.objective={objective}"
        fix = "set train.objective=null, and name a loss of yours in train.loss"
        yield Problem(key=model.key, value=model.value, expected=expected, fix=fix)
