"""Evaluation: the loss on the validation split, between two steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain import module_tree
from colotrain.data.read.loader import BatchLoader
from colotrain.dotted import import_target
from colotrain.engine.comms import exchange
from colotrain.engine.gradients.accumulation import Batch, to_device, weighted_output
from colotrain.engine.model.unchanged import unchanged, uncompiled
from colotrain.engine.pipeline.forward_only import answer, ask, stop_asking
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state.checkpoint import copy_to_memory, finish_copy
from colotrain.engine.state.pieces import persistent_buffers
from colotrain.engine.state.run_state import Run
from colotrain.engine.step.averages import averaged_parameters
from colotrain.engine.step.clock import StepClock
from colotrain.engine.step.global_rows import micro_batches
from colotrain.engine.step.loss_trial import sums_tokens
from colotrain.engine.step.monitor import interruptible
from colotrain.engine.step.participant import Participant, StepResult
from colotrain.engine.step.text_samples import write_samples
from colotrain.errors import UsageError
from colotrain.events.kinds import Evaluation, Note
from colotrain.models.context_parallel import whole_output
from colotrain.models.objective import inputs_of, is_of_whole, outputs_alone
from colotrain.models.outputs import TargetRule, means_in, metrics_in
from colotrain.spec.batch import is_due
from colotrain.spec.phases import Phase

Evaluated = tuple[Tensor, Tensor, Any, Any]
"""Summed loss of a micro-batch, its targets, the output, and what `train.metrics` returned."""


class Evaluator(Participant):
    """Evaluates between two steps, and has the model continue prompts."""

    def __init__(self, run: Run, clock: StepClock) -> None:
        super().__init__(run, clock)
        self.metrics: Callable[[Batch, Any], Any] | None = None
        """The function `train.metrics`."""
        if dotted := run.plan.train.metrics:
            self.metrics = import_target("train.metrics", dotted)
        self.weights: dict[str, str] | None = None
        """What metrics without a count are means over; None where that is not known."""
        self.has_begun = False

    def after_step(self, result: StepResult | None) -> None:
        run = self.run
        if not self._evaluates_after(result):
            return
        finish_copy(run)
        with averaged_parameters(run):
            self.evaluate()
            write_samples(run)
        if result is not None:
            copy_to_memory(run, again=True)

    def _evaluates_after(self, result: StepResult | None) -> bool:
        run, every = self.run, self.run.plan.train.eval_every
        first, self.has_begun = not self.has_begun, True
        if result is not None:
            at_end = run.step == run.plan.train.max_steps
            return not result.stops and (is_due(run.step, every) or at_end)
        last = run.history.evaluations.last_step
        # the run was stopped after a step, before the evaluation that follows the step
        was_left = run.step > 0 and is_due(run.step, every) and last not in (None, run.step)
        return first and (was_left or (run.step == 0 and run.plan.train.eval_first))

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compute the mean loss over the validation samples that `train.eval_steps` selects.

        Sets `run.history.best` if this evaluation is the best so far. All ranks must call.
        """
        run = self.run
        run.at(Phase.EVALUATION)
        plan, model, data = run.plan, run.sharded.module, run.validation_data
        if plan.train.eval_steps == 0 or data is None:
            return
        training = {module: module.training for module in module_tree.modules(model)}
        model.eval()
        with interruptible(run, "evaluation"), exported_buffers(run):
            sums, metrics = self._sum_losses(data)
            if not run.counts(whole=self._is_of_whole()):  # another rank has the same
                sums, metrics = torch.zeros_like(sums), {}
            reshard(run.sharded)
            run.progress.begin_agreement()
            dist.all_reduce(sums)
            means = _over_all_ranks(metrics)
        for module, mode in training.items():  # what the user set to evaluation mode stays in it
            module.training = mode
        loss_sum, count = sums.tolist()
        loss = loss_sum / (count or 1.0)
        note_evaluation(run, {RESERVED: loss, **means} | {RESERVED: loss})
        best = _is_best(run, loss, means) or None
        if run.rank == 0:
            found = Evaluation(
                step=run.step, loss=loss, tokens=count, metrics=means or None, best=best
            )
            run.events.write(found)

    def _sum_losses(self, data: BatchLoader) -> tuple[Tensor, Metrics]:
        """Return summed loss and number of targets of this rank's samples, and their metrics."""
        run, num = self.run, self.run.plan.batch.accumulation_steps
        sums = torch.zeros(2, dtype=torch.float64, device=run.device)
        metrics: Metrics = {}
        weights = self._weights_of_metrics() if self.weights is None else self.weights
        total = data.num_micro_batches
        assert total is not None
        source: Iterator[Batch] = iter(())
        for index in range(total):
            run.at(Phase.EVALUATION)
            run.sharded.calls.clear()
            run.progress.at_micro_batch(index, of=total, calls=0)
            at = divmod(index, num)
            if at[1] == 0:
                source = micro_batches(run, data, at[0], min(num, total - index))
            batch = next(source)
            num_samples = len(data.positions(*at))
            with uncompiled(run.plan, num_samples < run.plan.batch.micro_batch):
                found = self._with_metrics(batch)
            if not num_samples or found is None:  # the forward ran because other ranks wait for it
                continue
            loss, count, output, own = found
            sums += torch.stack([loss.double(), count.double()])
            over = {name: _weight(kind, batch, count) for name, kind in weights.items()}
            further = (*metrics_in(output, count, over), *metrics_in(own, count, over))
            for name, value, weight in further:
                if not weight.item():  # a rank's part of a sample may have no target
                    continue
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = before[0] + value.item(), before[1] + weight.item()
        return sums, metrics

    def _with_metrics(self, batch: Batch) -> Evaluated | None:
        """Return `weighted_output`, and what `train.metrics` returns. All ranks must call.

        None on a pipeline stage that is not the last.
        """
        model, stage, found = self.run.sharded.module, self.run.sharded.stage, None

        def begin(batch: Batch) -> None:
            if stage.count > 1:
                stage.forward_until_loss(model, inputs_of(model, batch))

        if stage.is_last:
            found = self._evaluated(batch, begin)
        else:
            for _ in range(1 + self._needs_outputs):
                begin(batch)
        stage.end_step()
        return found

    @property
    def _needs_outputs(self) -> bool:
        """Whether forward returns the loss, and once more, without labels, its outputs."""
        model = self.run.plan.model
        return self.metrics is not None and model.hf is not None and model.loss is None

    def _evaluated(self, batch: Batch, begin: Callable[[Batch], None]) -> Evaluated:
        """Return `_with_metrics` where forward gives the loss; `begin` lets other stages run."""
        model, seen = self.run.sharded.module, list[Any]()
        begin(batch)
        loss, count, output = weighted_output(model, batch, seen=seen)
        if self.metrics is None:
            return loss, count, output, None
        outputs = seen[0]
        if not is_of_whole(model):
            (loss, count), output = whole_output(model, ((loss, count), output))
        if self._needs_outputs:
            begin(batch)
            outputs = outputs_alone(model, batch)
        if self.run.plan.model.loss is None:
            outputs = whole_output(model, outputs)
        if output is None:
            return loss, count, None, None
        found = _checked(self.metrics(batch, outputs), self.run.plan.train.metrics)
        return loss, count, output, found

    def _is_of_whole(self) -> bool:
        """Whether what a rank evaluates is of whole samples, although ranks may divide them."""
        return self.metrics is not None or is_of_whole(self.run.sharded.module)

    def _weights_of_metrics(self) -> dict[str, str]:
        """Name of each metric without a count of its own → what it is a mean over (`WEIGHTS`).

        Found by samples together and apart; a metric that is none of these means depends on how
        samples are divided, which is said. All ranks must call.
        """
        run = self.run
        weights, unknown, is_sure = run.sharded.stage.from_last(self._own_weights())
        self.weights = weights if is_sure else None  # else the next evaluation may tell
        for name in unknown if run.rank == 0 else ():
            text = (
                f"warning: {name} of train.metrics or of the model is no mean over samples or "
                "targets: its value depends on train.micro_batch; return (sum, count) for it"
            )
            run.events.write(Note(step=run.step, text=text))
        return cast(dict[str, str], weights)

    def _own_weights(self) -> tuple[dict[str, str], list[str], bool]:
        """Return `_weights_of_metrics`, the metrics that are no mean, and whether it is sure.

        All ranks must call; the last stage alone knows.
        """
        counts = {kind: list[float]() for kind in WEIGHTS}
        means: list[dict[str, float]] = []
        evaluated = self._together_and_apart()
        if evaluated is None:
            return {}, [], False
        for batch, (_, count, output, own) in evaluated:
            means.append({**means_in(output), **means_in(own)})
            for kind in WEIGHTS:
                counts[kind].append(_weight(kind, batch, count).item())
        is_usual = counts["targets"] in (counts["labels"], counts["samples"])
        own_weights = ("labels", "samples", "targets")  # of the loss
        order = WEIGHTS if is_usual else own_weights
        weights, unknown, is_sure = dict[str, str](), list[str](), True
        for name, whole in means[0].items() if means else ():
            values = [each.get(name, 0.0) for each in means[1:]]
            fits = [kind for kind in order if _is_mean(whole, values, counts[kind][1:])]
            is_sure &= len({tuple(counts[kind]) for kind in fits}) < 2
            weights[name] = fits[0] if fits else order[0]
            unknown += [] if fits else [name]
        return weights, unknown, is_sure

    def _together_and_apart(self) -> list[tuple[Batch, Evaluated]] | None:
        """Evaluate a few samples at once, and each alone; None where that tells nothing."""
        run, samples = self.run, self.run.targets.samples
        size = len(next(iter(samples.values())))
        model, stage, found = run.sharded.module, run.sharded.stage, None
        has_none = self.metrics is None and sums_tokens(model)
        is_of_part = run.plan.mesh.cp > 1 and not self._is_of_whole()
        if has_none or is_of_part or size < 2:
            return None
        begin = functools.partial(ask, stage, model)
        trial = to_device(samples, run.device)
        apart = [{name: tensor[i : i + 1] for name, tensor in trial.items()} for i in range(size)]
        with uncompiled(run.plan, True), unchanged(model, run.device):
            if not stage.is_last:
                answer(stage, model, run.device)
                return None
            with suppress(Exception):  # a batch of one sample may be none that the model takes
                alone = [(batch, self._evaluated(batch, begin)) for batch in apart]
                rows = [i for i, (_, one) in enumerate(alone) if one[2] is not None]
                together = {name: tensor[rows] for name, tensor in trial.items()}
                whole = [(together, self._evaluated(together, begin))] if rows else []
                found = [*whole, *(alone[i] for i in rows)]
            stop_asking(stage)
        return found


@contextmanager
def exported_buffers(run: Run) -> Iterator[None]:
    """Context in which all ranks have rank 0's persistent buffers, which an export has.

    Ranks may have other ones where a forward changes them by what it sees. All ranks must call.
    """
    if run.plan.world_size == 1 or run.plan.mesh.together > 1:
        yield
        return
    kept = persistent_buffers(run.sharded.module)
    own = [buffer for _, buffer in kept if buffer.is_floating_point()]
    before = [buffer.clone() for buffer in own]
    for buffer in own:
        dist.broadcast(buffer, src=0)
    try:
        yield
    finally:
        for buffer, value in zip(own, before, strict=True):
            buffer.copy_(value)


def _is_best(run: Run, loss: float, means: dict[str, float]) -> bool:
    """Whether this evaluation is the best so far, by the metric that the plan names."""
    found = {RESERVED: loss, **means} | {RESERVED: loss}
    metric, lowest = run.plan.checkpoint.best_metric, run.plan.checkpoint.best_mode == "min"
    if metric is None:
        return False
    if metric not in found:
        raise UsageError(
            f"checkpoint.best.metric={metric}: the evaluation has no such value",
            f"name one of {', '.join(found)}",
        )
    value, before = found[metric], run.history.best[1] if run.history.best else None
    if not math.isfinite(value) and run.rank == 0:
        text = f"checkpoint.best.metric={metric} is {value}: this evaluation is never the best"
        run.events.write(Note(step=run.step, text=text))
    if not math.isfinite(value) or run.step == 0:
        return False
    if before is None or (value < before if lowest else value > before):
        run.history.best = run.step, value
        return True
    return False


RESERVED = "validation_loss"
"""Name of the loss itself among the values of an evaluation."""
Metrics = dict[str, tuple[float, float]]
"""Name → sum and count."""


WEIGHTS = ("targets", "labels", "samples")
"""What a metric may be a mean over: what the loss is, samples, or labels that are not -100."""


def _weight(kind: str, batch: Batch, count: Tensor) -> Tensor:
    if kind == "targets":
        return count
    labels = TargetRule().count(batch) if kind == "labels" else None
    return torch.tensor(float(len(next(iter(batch.values()))) if labels is None else labels))


def _is_mean(together: float, values: list[float], weights: list[float]) -> bool:
    total = sum(map(float.__mul__, values, weights))
    return math.isclose(together * sum(weights), total, rel_tol=1e-3, abs_tol=1e-6)


def _checked(found: Any, dotted: str | None) -> dict[str, Any]:
    """Return what `train.metrics` returned, but the loss's name; `UsageError` for no dict."""
    numbers = metrics_in(found, torch.ones(()))
    if not isinstance(found, Mapping) or {n for n, *_ in numbers} != {*found} or RESERVED in found:
        shown = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise UsageError(
            f"train.metrics={dotted} returned {shown}",
            "return a dict of names and numbers, each (sum, count) or a mean over the targets, "
            f"none of them called loss or {RESERVED}",
        )
    return dict(found)


def _over_all_ranks(metrics: Metrics) -> dict[str, float]:
    """Return name → mean over the ranks that have the metric. All ranks must call."""
    everyone = exchange.all_gather(metrics)
    found = {}
    for name in dict.fromkeys(name for one in everyone for name in one):
        own = [one.get(name, (0.0, 0.0)) for one in everyone]
        count = sum(part[1] for part in own)
        found[name] = sum(part[0] for part in own) / count if count else float("nan")
    return found


def note_evaluation(run: Run, found: Mapping[str, float]) -> None:
    """Count the evaluations since the last one that improved, from values that all ranks have.

    Neither the evaluation before the first step counts nor one that only the end of the run asked
    for: a run that goes on longer would otherwise end at another step than one that was not ended.
    """
    rule, before = run.plan.train.stop_early, run.history.evaluations
    run.history.evaluations = replace(before, last_step=run.step)
    if rule is None or rule.metric is None:
        return
    if rule.metric not in found:
        raise UsageError(
            f"train.stop_early.metric={rule.metric}: the evaluation has no such value",
            f"name one of {', '.join(found)}",
        )
    if run.step == 0 or not is_due(run.step, run.plan.train.eval_every):
        return
    value, sign = found[rule.metric], 1.0 if rule.mode == "max" else -1.0
    gain = math.inf if before.best is None else sign * (value - before.best)
    if math.isfinite(value) and gain > rule.min_delta:
        step = run.step
        run.history.evaluations = replace(
            run.history.evaluations, improved_step=step, best=value, waited=0
        )
    else:
        run.history.evaluations = replace(run.history.evaluations, waited=before.waited + 1)


def is_over(run: Run) -> bool:
    """Whether the run has made its last step."""
    return run.step >= run.plan.train.max_steps or why_over(run) is not None


def why_over(run: Run) -> str | None:
    """Return why the run ends before its last step, the same on every rank; None: it goes on."""
    rule, so_far = run.plan.train.stop_early, run.history.evaluations
    if rule is None or so_far.waited < rule.patience:
        return None
    best = ""
    if so_far.best is not None:
        best = f"; the best was {so_far.best:.6g} at step {so_far.improved_step}"
    number = f"{so_far.waited} evaluation{'s' * (so_far.waited > 1)}"
    return f"stopped early: {rule.metric} did not improve in {number}{best}"
