"""Finds out what a loss is the mean of, by a few forwards with samples of the data.

The labels that it leaves out (-100 in torch, -1, 0 or 255 elsewhere) and whether the model shifts
them are read from the calls of torch's cross-entropy, or from what changes when labels do. The
samples' losses together and apart then show whether that is true: a sum, weights that are divided
out, or losses that compare samples make training depend on `train.micro_batch`. Labels hold no
value here that the data or the loss itself do not know: a GPU would not survive another one.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colotrain import module_tree
from colotrain.engine.model.unchanged import unchanged
from colotrain.engine.pipeline.forward_only import answer, ask, stop_asking
from colotrain.engine.pipeline.stage import Stage
from colotrain.errors import Problem
from colotrain.models.huggingface import predicts_next, task_in
from colotrain.models.huggingface_task import MASKED
from colotrain.models.llm import LLM
from colotrain.models.objective import objective_of, output_of
from colotrain.models.outputs import TargetRule, count_in, loss_in, pair_in
from colotrain.records import from_plain, to_plain
from colotrain.spec.objectives import IGNORE_INDEX
from colotrain.spec.plan import DataPlan, ModelPlan

Batch = Mapping[str, Tensor]
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Relative difference that rounding may make, by `train.precision`."""
MIN_LABELS = 3
"""Least labels of a row that are taken for a sequence."""
USUAL_IGNORED = (255, 0)
"""Labels beside negative ones that losses of people's own leave out."""
MOST_OTHER_LABELS = 16
"""Labels that are tried in another's place: half precision may round away what one changes."""
MOST_SAMPLES = 4
"""Samples of a trial."""
MOST_AT_ONCE = 2
"""Samples of a forward: more would need more memory than a step of micro-batch 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a trial found of a loss."""

    rule: TargetRule = field(default_factory=TargetRule)
    against: str = ""
    """Why the loss is no mean over targets; empty where it is one, or where nothing is known."""
    copies: bool = False
    """Whether each label is the input of its own position."""
    is_weighed: bool = False
    """Whether the loss comes with what it is to be divided by."""


@dataclass(frozen=True, slots=True)
class Result:
    """The loss of one forward: a mean, or a sum with its own weight."""

    value: Tensor
    weight: Tensor | None
    calls: tuple[LossCall, ...]


COPIES = Problem(
    key="data.target",
    expected="labels that are the next tokens (each is the input token of its own position, and "
    "the model does not shift them: it would learn to copy its input)",
    fix="shift them, as in labels[i] = input_ids[i + 1], with -100 for the last; where a model is "
    "to reproduce its input, call the entry of the samples `targets`",
)
"""Labels in the convention of transformers, whose own losses shift them."""


def problem_of(found: Findings, model: ModelPlan, data: DataPlan) -> Problem | None:
    """Labels that teach something else than the next token."""
    if found.copies and data.source == "target":
        return COPIES
    if found.rule.shifted and data.source != "target":
        return Problem(
            key=model.key,
            value=model.value,
            expected="a loss of the labels as they are (the model shifts labels, which in "
            "colotrain's data are shifted already: it would learn the token after the next)",
            fix="leave them where they are, or use model.hf",
        )
    return None


def notes_of(found: Findings) -> Iterator[str]:
    """Yield what people should know of a loss."""
    if found.rule != TargetRule() and not found.against and not found.is_weighed:
        yield f"the loss is a mean over {found.rule.named}"
    if found.against:
        yield found.against


def copies_input(model: nn.Module, samples: Batch, rule: TargetRule) -> bool:
    """Whether each target is the input of its own position, in a model of next or hidden tokens."""
    inputs, labels = samples.get("input_ids"), samples.get(rule.entry)
    known = predicts_next(model) or task_in(model) in (None, MASKED)
    if not known or rule.shifted or inputs is None or labels is None:
        return False
    if labels.is_floating_point() or inputs.shape != labels.shape or labels.ndim != 2:
        return False
    counted = labels != (IGNORE_INDEX if rule.ignored is None else rule.ignored)
    targets = labels[counted]
    return len(targets.unique()) >= MIN_LABELS and torch.equal(inputs[counted], targets)


def sums_tokens(model: nn.Module) -> bool:
    """Whether colotrain's own code sums the loss over labels that are not -100."""
    own = isinstance(model, LLM) or predicts_next(model)
    objective = objective_of(model)
    return own if objective is None else not objective.is_users


@torch.no_grad()
def examine(
    model: nn.Module,
    samples: Batch,
    *,
    known: TargetRule | None = None,
    stage: Stage | None = None,
    tolerance: float = TOLERANCE["fp32"],
    budget_s: float = float("inf"),
) -> Findings:
    """Find out of what the loss is the mean. All ranks must call with the same samples.

    `known` is what an earlier trial found; after `budget_s` seconds no further forward begins. The
    model's buffers and the generators do not change. With pipeline stages the last one decides.
    """
    if sums_tokens(model):
        return Findings(copies=copies_input(model, samples, TargetRule()))
    rule, stage = known or TargetRule(), stage or Stage()
    device, found = next(iter(samples.values())).device, None
    for everything in (True, False):
        with unchanged(model, device, everything=everything):
            if stage.is_last:
                trial = _Trial(model, stage, time.monotonic() + budget_s)
                found = trial.examine(samples, rule, tolerance)
                stop_asking(stage)
            else:
                answer(stage, model, device)
        told = stage.from_last(to_plain(found))
        if told is not None:
            found = from_plain(Findings, told)
            break
    found = found or Findings(rule=rule)
    return replace(found, copies=copies_input(model, samples, found.rule))


class _Trial:
    """Forwards of a model with changed labels, and with some of the samples.

    With pipeline stages the last one makes it, and the others answer.
    """

    def __init__(self, model: nn.Module, stage: Stage, until: float) -> None:
        self.model, self.stage, self.until = model, stage, until

    def examine(self, samples: Batch, known: TargetRule, tolerance: float) -> Findings | None:
        """What the loss is the mean of; None where forward gives none."""
        first = _rows(samples, 0, MOST_AT_ONCE)
        whole = self.loss(first)
        if whole is None:
            return None
        rule, against = self.compare(whole, samples, self.rule_of(whole, first, known), tolerance)
        return Findings(rule=rule, against=against, is_weighed=whole.weight is not None)

    def loss(self, batch: Batch) -> Result | None:
        """The loss of a batch; None where there is none, forward fails, or the time is up.

        Batches of one sample may be none that the model takes.
        """
        model = self.model
        if time.monotonic() > self.until:
            return None
        ask(self.stage, model, batch)
        attributes = {module: dict(vars(module)) for module in module_tree.modules(model)}
        try:
            with LossCalls() as calls:
                output = output_of(model, batch)
        except Exception:
            return None
        finally:  # such as a state that a recurrent model keeps from one forward to the next
            for module, before in attributes.items():
                vars(module).update(before)
        pair, weight = pair_in(output), count_in(output)
        value = loss_in(output) if pair is None else pair[0]
        if not isinstance(value, Tensor) or value.numel() != 1:
            return None
        value = value.detach().double().reshape(())
        if pair is not None:
            weight = pair[1]
        if weight is not None:
            weight = torch.as_tensor(weight).detach().double().reshape(-1)[:1].sum()
            value = value if pair is not None else value * weight
        return Result(value, weight, tuple(calls.found))

    def rule_of(self, whole: Result, samples: Batch, known: TargetRule) -> TargetRule:
        """Which labels count, as the calls of cross-entropy and changed labels tell."""
        calls = whole.calls
        rule = replace(known, entry=entry_of(calls, samples, known))
        labels = samples.get(rule.entry)
        if labels is None or labels.is_floating_point():
            return rule if labels is None else replace(rule, ignored=None)
        ignored = {call.ignored for call in calls}
        if len(ignored) == 1:
            rule = replace(rule, ignored=ignored.pop())
        if labels.ndim == 2 and labels.shape[1] >= MIN_LABELS:
            shifted = next((s for c in calls if (s := shift_in(c, labels)) is not None), None)
            if shifted is None:
                shifted = self._shifts(samples, rule, told=bool(ignored))
            rule = replace(rule, shifted=shifted)
        counts = {int((call.target != call.ignored).sum()) for call in calls}
        if len(counts) == 1 and whole.weight is None:
            counted = (c for c in _candidates(labels, rule) if c.count(samples) in counts)
            return next(counted, rule)
        return rule

    def _shifts(self, samples: Batch, rule: TargetRule, *, told: bool) -> bool:
        """Whether the first label of a row does not count, by forwards with other labels."""
        labels, ignored = samples[rule.entry], rule.ignored
        counts = torch.ones_like(labels) if ignored is None else (labels != ignored).int()
        row = int(counts.sum(1).argmax())
        one = _rows(samples, row, row + 1)
        targets = one[rule.entry][one[rule.entry] != ignored]
        is_known = ignored is not None and bool(labels.eq(ignored).any())
        safe = told or is_known or labels.device.type == "cpu"
        if ignored is None or not len(targets) or not safe:
            return self._first_changes_nothing(one, rule.entry, labels)

        def loss(*chosen: int) -> Tensor | None:
            masked = torch.full_like(one[rule.entry], ignored)
            masked[:, list(chosen)] = targets[0]
            found = self.loss({**one, rule.entry: masked})
            return None if found is None or found.weight is not None else found.value

        places: tuple[tuple[int, ...], ...] = ((-1,), (0, -1), (0,), ())
        losses: Iterator[Tensor | None] = (loss(*chosen) for chosen in places)
        return _first_is_left_out(losses) or self._first_changes_nothing(one, rule.entry, labels)

    def _first_changes_nothing(self, one: Batch, entry: str, labels: Tensor) -> bool:
        """Whether the loss of a sample stays the same with other first labels, and not with
        other second ones."""
        known = labels.unique()
        if len(known) < 2:
            return False

        before = self.loss(one)
        if before is None:
            return False

        def changes(position: int) -> bool | None:
            """None if there is a label with which there is no loss."""
            for other in known[known != one[entry][0, position]][-MOST_OTHER_LABELS:]:
                changed = one[entry].clone()
                changed[0, position] = other
                found = self.loss({**one, entry: changed})
                if found is None or not _same(before.value, found.value):
                    return None if found is None else True
            return False

        return changes(0) is False and changes(1) is True

    def compare(
        self, whole: Result, samples: Batch, rule: TargetRule, tolerance: float
    ) -> tuple[TargetRule, str]:
        """The rule under which two samples together have the mean of their losses, and "".

        Where there is none, the given rule, and why the loss is no mean.
        """
        labels = samples.get(rule.entry)
        if whole.weight is None and any(c.has_weights and c.is_mean for c in whole.calls):
            return rule, WEIGHTED
        apart = [_rows(samples, at, at + 1) for at in range(len(next(iter(samples.values()))))]
        counts = [1 if (n := rule.count(each)) is None else n for each in apart]
        places = sorted((at for at, count in enumerate(counts) if count), key=counts.__getitem__)
        if len(places) < 2:
            return rule, ""
        chosen = [places[0], places[-1]]
        both = {name: tensor[chosen] for name, tensor in samples.items()}
        batches = (both, both, *(apart[at] for at in chosen))
        results = [found for each in batches if (found := self.loss(each)) is not None]
        if len(results) < len(batches):
            return rule, ""  # forward takes no such number of samples, or the time is up
        together, again, *parts = results
        if not _same(together.value, again.value):
            return rule, ""  # forward draws random numbers
        if together.weight is not None:
            weights = [part.weight.item() for part in parts if part.weight is not None]
            if len(weights) < 2 or not sum(weights) or not together.weight:
                return rule, ""
            mean, wanted = _mean([together]) / together.weight.item(), 2 * _mean(parts)
            return rule, "" if _close(mean, wanted / sum(weights), tolerance) else NO_SUM
        for candidate in _candidates(labels, rule):
            weights = [float(candidate.count(apart[at]) or 1) for at in chosen]
            if _close(_mean([together]), _mean(parts, weights), tolerance):
                return candidate, ""
        mean = _mean(parts, [float(counts[at]) for at in chosen])
        return rule, SUM if _close(_mean([together]), 2 * mean, tolerance) else NO_MEAN


SUM = (
    "this loss is no mean over samples: that of two samples is twice the mean of theirs (a sum, as "
    "of reduction='sum'), so that steps depend on train.micro_batch; return (loss_sum, count), or "
    "a mean"
)
NO_MEAN = (
    "this loss is no mean over samples: that of two samples together is not the mean of theirs, "
    "whichever labels count, so that steps depend on train.micro_batch; where samples have "
    "weights, or targets that are not in labels, return (loss_sum, count or sum of weights)"
)
WEIGHTED = (
    "this loss is no mean over samples: cross_entropy(weight=...) divides by the weights of a "
    "micro-batch's classes, so that steps depend on train.micro_batch; return (loss_sum, sum of "
    "weights), with reduction='sum' for the first"
)
NO_SUM = (
    "the sums that two samples together return, loss and count, are not those of each by itself, "
    "so that steps depend on train.micro_batch; return sums over samples: (loss_sum, count)"
)


def _candidates(labels: Tensor | None, rule: TargetRule) -> Iterator[TargetRule]:
    """The rule, and others that a loss of somebody's own may follow with these labels."""
    yield rule
    if labels is None:
        return
    is_class = not labels.is_floating_point()
    values = labels.unique().tolist() if is_class else []
    unusual = [v for v in values if v < 0] + [v for v in USUAL_IGNORED if v in values]
    yield from (replace(rule, ignored=ignored) for ignored in unusual)
    yield replace(rule, by_sample=True)
    if is_class:
        yield replace(rule, ignored=None)


def _rows(samples: Batch, first: int, stop: int) -> dict[str, Tensor]:
    return {name: tensor[first:stop] for name, tensor in samples.items()}


def _mean(results: list[Result], weights: list[float] | None = None) -> float:
    """Weighted mean of the values; without weights each has the same."""
    weights = weights or [1.0] * len(results)
    total = sum(w * found.value.item() for w, found in zip(weights, results, strict=True))
    return total / sum(weights)


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def _first_is_left_out(losses: Iterator[Tensor | None]) -> bool:
    """Whether the loss with targets at the end, or both ends, is equal, and at the beginning none.

    `losses` are those with a target at the end, at both ends, at the beginning, and nowhere.
    """
    last, both = next(losses), next(losses)
    if last is None or both is None or not torch.equal(last, both):
        return False
    first, none = next(losses), next(losses)  # else all positions may have the same loss
    if first is None or none is None or _same(last, none):  # labels may not matter at all
        return False
    return _same(first, none)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call of torch's cross-entropy with classes as targets."""

    target: Tensor
    ignored: int
    is_mean: bool
    has_weights: bool


class LossCalls(TorchFunctionMode):
    """Collects the calls of torch's cross-entropy in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[LossCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            given = inspect.signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            call = given.arguments
            if not call["target"].is_floating_point():
                is_mean, weights = call["reduction"] == "mean", call["weight"]
                self.found.append(
                    LossCall(call["target"], call["ignore_index"], is_mean, weights is not None)
                )
        return func(*args, **(kwargs or {}))


def entry_of(calls: tuple[LossCall, ...], samples: Mapping[str, Tensor], known: TargetRule) -> str:
    """The entry of the samples that cross-entropy got as targets; without a call, the known one."""
    if known.entry in samples or not calls:
        return known.entry
    candidates = (n for n, t in samples.items() if not t.is_floating_point() and not t.is_complex())
    is_target = (n for n in candidates if any(shift_in(c, samples[n]) is not None for c in calls))
    return next(is_target, known.entry)


def shift_in(call: LossCall, labels: Tensor) -> bool | None:
    """Whether the targets of cross-entropy are the labels without each row's first.

    None where they are neither these nor all labels, or where both would be the same.
    """
    target = call.target.flatten().to(labels.dtype)
    if target.numel() == labels.numel() and torch.equal(target, labels.flatten()):
        return False
    if labels.ndim != 2:
        return None
    later = labels[:, 1:].flatten()
    if target.numel() == later.numel() and torch.equal(target, later):
        return True
    if target.numel() == labels.numel():
        rows = target.view(labels.shape)
        if torch.equal(rows[:, :-1], labels[:, 1:]) and bool((rows[:, -1] == call.ignored).all()):
            return True
    chosen = target[target != call.ignored]
    is_all = torch.equal(chosen, labels[labels != call.ignored])
    is_later = torch.equal(chosen, later[later != call.ignored])
    return None if is_all == is_later else is_later
