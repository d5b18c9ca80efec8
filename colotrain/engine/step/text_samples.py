"""Samples of text: the model continues the plan's prompts, between two steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.prepared import Prepared
from colotrain.data.prepare.tokens import decode, prepare_all
from colotrain.engine.model.unchanged import unchanged, uncompiled
from colotrain.engine.pipeline.forward_only import through_stages
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state.run_state import Run
from colotrain.events.kinds import Note
from colotrain.models.objectives.base import Forward
from colotrain.spec.phases import Phase

SHOWN = 200
"""Characters of a prompt and of its continuation in a message; the file has all."""


def write_samples(run: Run) -> None:
    """Continue each prompt with the most probable tokens, if samples are due. All ranks must call.

    Ranks compute the same tokens in as many forwards, for a sharded model's parameters are gathered
    in each. Nothing that training depends on changes: modes, buffers and random numbers are put
    back. Rank 0 appends one line per prompt to `samples.jsonl`.
    """
    plan = run.plan.observe.samples
    if plan is None or not _writes_after(run, plan.every):
        return
    source = prepare_all(run.plan.data)[0]
    encoder = _encoder(run, source)
    lines = []
    with torch.no_grad(), unchanged(run.sharded.module, run.device), uncompiled(run.plan, True):
        for prompt, tokens in zip(plan.prompts, encoder.encode([*plan.prompts]), strict=True):
            begun = [*encoder.frame.before, *map(int, tokens)]  # as a document begins
            ids = _continued(run, begun, encoder, plan.max_tokens)
            lines.append({"step": run.step, "prompt": prompt, "text": decode(source, ids)})
    reshard(run.sharded)
    if run.rank == 0:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with run.rundir.append(run.rundir.samples_file) as file:
            file.write(text.encode())
        for line in lines:
            text = f"step {run.step}: {_short(line['prompt'])} continues {_short(line['text'])}"
            run.events.write(Note(step=run.step, text=text))


def _writes_after(run: Run, every: int) -> bool:
    """Whether this evaluation, counted by its step, is one after which samples are written."""
    between, last = run.plan.train.eval_every, run.plan.train.max_steps
    return not between or run.step == last or round(run.step / between) % every == 0


def _encoder(run: Run, source: Prepared) -> vocabulary.Encoder:
    spec = run.plan.data.tokenizer if source.tokenizer is not None else "bytes"
    return vocabulary.open_encoder(spec, source.tokenizer or run.rundir.path)


def _continued(run: Run, ids: list[int], encoder: vocabulary.Encoder, most: int) -> list[int]:
    """At most `most` tokens after `ids`; the separator of documents ends them and is left out.

    Where ranks divide tokens, others follow to a number that they can divide: no token sees those
    behind it.
    """
    model, stage, found = run.sharded.module, run.sharded.stage, list[int]()
    source, unit = run.plan.ranks.of_stage(stage.count - 1)[0], run.plan.mesh.token_unit
    while len(found) < most:
        run.at(Phase.TEXT_SAMPLES)
        run.sharded.calls.clear()
        context = [*ids, *found][-run.plan.data.seq_len :]
        last = len(context) - 1
        context += context[-1:] * (-len(context) % unit)
        inputs = {"input_ids": torch.tensor([context], device=run.device)}
        logits = through_stages(stage, model, _logits, inputs)
        token = torch.zeros((), dtype=torch.int64, device=run.device)
        if logits is not None:
            token = logits[0, last, : encoder.vocab_size].argmax()
        dist.broadcast(token, src=source)  # rounding must not part the ranks
        if token.item() == encoder.separator:
            break
        found.append(int(token.item()))
    return found


def _logits(forward: Forward, inputs: Mapping[str, Tensor]) -> Tensor:
    output = forward(**inputs)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def _short(text: Any) -> str:
    shown = f"{text!r}"
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
