"""Preparation of a run's data before its ranks start: tokenization, checks and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from colotrain.errors import ConfigError, Problem
from colotrain.planner.vocabulary import stored_vocab_size
from colotrain.spec.batch import refuse_rules_of_metrics
from colotrain.spec.plan import RunPlan

if TYPE_CHECKING:
    from rich.console import Console

    from colotrain.data.prepare.prepared import Prepared


def prepare_data(plan: RunPlan, console: Console) -> None:
    """Tokenize the plan's data, unless the user's own code provides the samples."""
    from colotrain.data.prepare.tokens import described_parts, notes_of, parts_of, prepare_shards
    from colotrain.show.progress import preparation

    if plan.data.source == "target":
        return
    with preparation(console) as progress:
        parts = [(part, prepare_shards(part, progress=progress)) for part in parts_of(plan.data)]
    shards = [shard for _, part_shards in parts for shard in part_shards]
    described = described_parts(plan.data)
    for part in described:
        console.print(f"data: {part['text']}", soft_wrap=True, highlight=False)
    for shard in shards:
        check_vocabulary(plan, shard)
    for one, part_shards in parts:
        for note in (note for note in notes_of(one, part_shards) if not note.is_unread):
            console.print(f"warning: {note}", style="yellow", soft_wrap=True)
    held = [any(shard.num_validation for shard in part_shards) for _, part_shards in parts]
    for why in _why_no_validation(plan, described, held):
        console.print(f"warning: there is no validation: {why}", style="yellow", soft_wrap=True)
    report_unused_data(plan, shards, console)
    if plan.train.eval_steps and not any(held):
        refuse_rules_of_metrics(plan)


def report_unused_data(plan: RunPlan, shards: Sequence[Prepared], console: Console) -> None:
    """Print which data is not trained on: bad records, and the ends of long documents."""
    from colotrain.data.read.packing import packing_of

    num_bad = sum(shard.num_bad for shard in shards)
    if num_bad:
        first = next(line for shard in shards for line in shard.bad)
        line = f"warning: {num_bad} bad records are left out (data.on_bad=skip), first {first}"
        console.print(line, style="yellow", soft_wrap=True)
    if packing_of(shards, plan.data) != "stream":
        seq_len = plan.data.seq_len
        # a text's class stands behind its tokens
        stored = seq_len + bool(plan.data.classes and not plan.data.classes_of_words)
        num_cut = sum(shard.count_longer("train", stored) for shard in shards)
        if num_cut:
            line = f"warning: {num_cut} documents are cut at data.seq_len={seq_len}"
            if num_empty := _count_empty(plan, shards):
                line += f"; {num_empty} of them end before their first token that is trained on"
            console.print(line, style="yellow", soft_wrap=True)


def _why_no_validation(
    plan: RunPlan, parts: Sequence[Mapping[str, Any]], held: Sequence[bool]
) -> Iterator[str]:
    """Yield why parts of the data that were to have validation samples have none.

    `held`: whether each part has some.
    """
    named = [part["validation"]["first"] for part in parts]
    for names, has_some in zip(named, held, strict=True):
        if names and not has_some:
            yield f"nothing to read in {', '.join(names)}"
    fraction = plan.data.validation_fraction
    if fraction and not any(held) and not any(named):
        few = f"data.validation_fraction={fraction:g} keeps none of so few data"
        yield f"{few} (raise it, or name files with data.validation_path)"


def _count_empty(plan: RunPlan, shards: Sequence[Prepared]) -> int:
    """Number of training documents without a target; raises `ConfigError` where none has one."""
    seq_len = plan.data.seq_len
    empty = [shard.count_cut_off("train", seq_len)[0] for shard in shards]
    ends = [shard.document_ends("train") for shard in shards]
    if all(found is not None and len(found) == n for found, n in zip(ends, empty, strict=True)):
        expected = "samples with a token to train on (every answer begins behind their end)"
        problem = Problem(key="data.seq_len", value=seq_len, expected=expected, fix="raise it")
        raise ConfigError([problem])
    return sum(empty)


def check_vocabulary(plan: RunPlan, prepared: Prepared) -> None:
    """Refuse token ids without a row in the embedding: token files show them only when read."""
    key, rows = "model.args.vocab_size", plan.model.args.get("vocab_size")
    fix = f"set model.args.vocab_size={prepared.vocab_size}"
    if plan.model.hf is not None and rows is None:
        key, rows = f"vocab_size of {plan.model.hf}", stored_vocab_size(plan.model.hf)
        fix = "use the tokens that the model was trained on"
    if isinstance(rows, int) and prepared.vocab_size > rows:
        expected = f"at least {prepared.vocab_size}, the largest token of the data plus one"
        raise ConfigError([Problem(key=key, value=rows, expected=expected, fix=fix)])
