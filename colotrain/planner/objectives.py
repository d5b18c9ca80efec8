"""The data of a run as its objective wants them: pairs, or text of which tokens are hidden."""

from __future__ import annotations

from colotrain.config.data import data_plan
from colotrain.config.schema import Config
from colotrain.data.prepare import vocabulary
from colotrain.errors import Problem
from colotrain.planner.scale import touches
from colotrain.spec.objectives import MaskedPlan
from colotrain.spec.plan import DataPlan

SHORTEST = 3  # tokens of a sample: one between those that begin and end it


def plan_data(settings: Config, problems: list[Problem]) -> DataPlan | None:
    """The plan of the data section; None without a source of data, or where problems forbid it."""
    masked = _masked(settings, problems) if settings.train.objective == "masked" else None
    pairs = settings.train.objective == "dpo"
    return data_plan(settings.data, problems, pairs=pairs, masked=masked)


def _masked(settings: Config, problems: list[Problem]) -> MaskedPlan | None:
    """The special tokens, from the tokenizer of the data; None where a problem is reported."""
    data = settings.data
    if touches(problems, ("data",)) or vocabulary.check_tokenizer(data.tokenizer) is not None:
        return None
    if data.seq_len < SHORTEST:
        expected = f"at least {SHORTEST} under train.objective=masked"
        problems.append(Problem(key="data.seq_len", value=data.seq_len, expected=expected))
        return None
    found = vocabulary.special_tokens(data.tokenizer)
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
        vocab_size=vocabulary.vocab_size_of(data.tokenizer) or 0,
    )
