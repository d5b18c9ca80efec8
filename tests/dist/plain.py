"""Families of models under every plugin, against plain transformers and torch, and their exports.

The reference is one process in float64 that computes transformers' own loss sample by sample:
nothing of colotrain but its order of samples and its masks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from colotrain.data.read.loader import open_samples, order_of, read_batch
from colotrain.export.job import Choice
from colotrain.export.write import export
from colotrain.models.loading import build_whole
from colotrain.rundir import RunDir
from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.verify import runner
from colotrain.verify.compare import CaseResult, Tolerance
from colotrain.verify.masks import MaskedSamples
from colotrain.verify.trajectory import Trajectory
from tests import families
from tests.checkpoints import read_whole
from tests.dist.hf import decays
from tests.families import Family

STEPS = 2


def plan_of(family: Family, folder: Path, plugin: str, *overrides: str) -> RunPlan:
    return plan_from(
        [
            *(f"model.hf={folder}", f"data.target=tests.families:{family.data}"),
            *(f"+model.args.{name}={json.dumps(value)}" for name, value in family.args.items()),
            *("data.shuffle=false", f"plugin={plugin}", "train.global_batch=8"),
            *("train.micro_batch=2", f"train.max_steps={STEPS}", "train.grad_clip=null"),
            *("optim.name=sgd", "optim.lr=0.2", "optim.schedule.name=constant"),
            *("cluster.procs_per_node=2", f"name={family.kind}-{plugin}", *overrides),
        ]
    )


def compare(
    family: Family, folder: Path, cases: Path, plans: Sequence[RunPlan] = ()
) -> list[CaseResult]:
    """Train the directory in the folder `cases`, by default under every plugin.

    Returns the differences from plain transformers.
    """
    plans = plans or [plan_of(family, folder, plugin) for plugin in ROWS]
    reference = functools.partial(train, family)
    with mock.patch.object(runner, "run_reference", reference):
        return list(runner.verify(plans, cases, tolerance=Tolerance()))


def train(family: Family, plan: RunPlan, *, steps: int) -> Trajectory:
    """Plain torch; its rounding is how far the same in float32 is from float64."""
    exact, plain = (_train(family, plan, steps, t) for t in (torch.float64, torch.float32))
    pairs = zip(exact.gradients, plain.gradients, strict=True)
    noise = [{n: (a[n] - b[n]).abs().max().item() for n in a} for a, b in pairs]
    return replace(exact, rounding={"gradients": noise})


def _train(family: Family, plan: RunPlan, steps: int, dtype: torch.dtype) -> Trajectory:
    model = family.load(Path(str(plan.model.hf)), **plan.model.args).to(dtype).train()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if decays(n, p)], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=plan.optim.lr, momentum=plan.optim.betas[0])
    data = samples_of(family, plan)
    losses, gradients, parameters = [], [], [_values(named)]
    size = plan.batch.global_batch
    for step in range(steps):
        samples = [data[index] for index in range(step * size, (step + 1) * size)]
        counts = [int((sample["labels"] != -100).sum()) for sample in samples]
        optimizer.zero_grad()
        total = 0.0
        for sample, count in zip(samples, counts, strict=True):
            if count:  # a mean over nothing is not a number
                loss = own_loss(model, family, sample) * count / sum(counts)
                loss.backward()
                total += loss.item()
        losses.append(total)
        gradients.append(_values({n: p.grad for n, p in named.items() if p.grad is not None}))
        if plan.train.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.train.grad_clip)
        optimizer.step()
        parameters.append(_values(named))
    return Trajectory(
        losses=losses,
        gradients=gradients,
        parameters=parameters,
        optimizer_steps=steps,
        frozen=frozenset(),
    )


def samples_of(family: Family, plan: RunPlan) -> Any:
    """Position → sample, of a plan that does not shuffle."""
    if plan.data.masked is None:
        return MaskedSamples(getattr(families, family.data)())
    samples = MaskedSamples(open_samples(plan.data, "train"))
    order = order_of(samples, seed=plan.train.seed, shuffle=False)

    def at(position: int) -> dict[str, Tensor]:
        places = range(position, position + 1)
        row = read_batch(samples, order, places, draw_seed=plan.train.seed)
        length = int(row.pop("attention_mask").sum())
        return {name: values[0, :length] for name, values in row.items()}  # without padding

    return [at(position) for position in range(STEPS * plan.batch.global_batch)]


def own_loss(model: Any, family: Family, sample: dict[str, Tensor]) -> Tensor:
    """transformers' mean loss of one sample."""
    dtype = next(model.parameters()).dtype
    batch = {n: t[None].to(dtype) if t.is_floating_point() else t[None] for n, t in sample.items()}
    if family.data == "causal":
        batch["shift_labels"] = batch["labels"]  # which are shifted already
    loss: Tensor = model(**batch).loss
    return loss


def _values(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {n: t.detach().float().clone() for n, t in tensors.items()}


def export_differences(
    family: Family, folder: Path, cases: Path, plans: Sequence[RunPlan] = ()
) -> Iterator[float]:
    """Largest differences of logits between trained models and their exports, after `compare`.

    The export is loaded by transformers; the trained model has the checkpoint's values. `plans` are
    of two ranks, by default one of every plugin.
    """
    for index in range(len(plans or ROWS)):
        run = runner.case_of(cases, 2, index)
        yield export_difference(family, folder, run, cases / f"exported-{index}", step=STEPS)


def export_difference(family: Family, folder: Path, run: RunDir, to: Path, *, step: int) -> float:
    """Largest difference of logits between a run's last checkpoint and its export to `to`."""
    export(run, run.plan(), to, Choice(), progress=lambda what, done, total: None)
    trained = build_whole(run.plan().model, seed=0)
    held = {n.removeprefix("model."): t for n, t in read_whole(run.checkpoint(step)).items()}
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_(held[name])
    at_first, found, wanted = (
        logits(model, family) for model in (family.load(folder), family.load(to), trained)
    )
    assert (at_first - wanted).abs().max().item() > 1e-3, "it did not train"
    return (found - wanted).abs().max().item()


@torch.no_grad()
def logits(model: Any, family: Family) -> Tensor:
    samples = getattr(families, family.data)(4)
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    labels = batch.pop("labels")
    if family.data == "pairs":
        batch["decoder_input_ids"] = labels.clamp(min=0)
    found: Tensor = model.eval()(**batch).logits
    return found
