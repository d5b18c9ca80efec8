"""Losses of the objectives, in plain torch: a class and a row each.

They share no code with `models.objectives`, which is verified.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.spec.objectives import (
    DPO,
    KTO,
    ORPO,
    ClassifyPlan,
    DistillPlan,
    EmbedPlan,
    RewardPlan,
    SimPO,
)
from colotrain.spec.plan import ModelPlan, RunPlan
from colotrain.verify.plain_models import build_plain


class PlainObjective(Protocol):
    """An objective in plain torch."""

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean loss of a whole global batch."""


def objective_of(plan: RunPlan, dtype: torch.dtype | None) -> PlainObjective | None:
    """The objective in plain torch; None: the model's own loss is the objective."""
    match plan.model.objective:
        case KTO():
            return RatedAnswers(plan, dtype, plan.model.objective)
        case EmbedPlan():
            return RelatedTexts(plan.model.objective)
        case DPO(beta=beta):
            return TwoModels(plan, dtype, beta)
        case ORPO():
            return OddsRatio(plan.model.objective)
        case SimPO():
            return LengthNormalized(plan.model.objective)
        case RewardPlan():
            return Rewards(plan.model.objective)
        case ClassifyPlan():
            return Classes()
        case DistillPlan():
            return WithTeacher(plan.model.objective, dtype)
    return None


class TwoModels:
    """The model that trains, and the model as it began."""

    def __init__(self, plan: RunPlan, dtype: torch.dtype | None, beta: float) -> None:
        self.first = build_plain(plan.model, seed=plan.train.seed).to(dtype).eval()
        self.beta = beta

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the pairs of which both answers have a target; 0 where there are none."""
        labels = batch["labels"]
        with torch.no_grad():
            before = _log_probs(self.first, batch)
        gained = _log_probs(model, batch) - before
        losses = -F.logsigmoid(self.beta * (gained[:, 0] - gained[:, 1]))
        counted = (labels >= 0).any(2).all(1)
        return torch.where(counted, losses, 0.0).sum() / counted.sum().clamp(min=1)


def _log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids, labels = batch["input_ids"], batch["labels"]
    output: Any = model(input_ids=ids.reshape(-1, ids.shape[-1]))
    logits = output if isinstance(output, Tensor) else output.logits
    each = logits.log_softmax(-1).view(*labels.shape, -1)
    picked = each.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, picked, 0.0).sum(-1)


class RatedAnswers:
    """The model that trains on good and bad answers, and the model as it began."""

    def __init__(self, plan: RunPlan, dtype: torch.dtype | None, settings: KTO) -> None:
        self.first = build_plain(plan.model, seed=plan.train.seed).to(dtype).eval()
        self.settings = settings

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the samples whose own answer has a target; 0 where there are none.

        The KL is that of the second rows: prompts with the answer of another record.
        """
        beta, good = self.settings.beta, batch["is_good"] == 1
        counted = (batch["labels"] >= 0).any(2)
        with torch.no_grad():
            before = _log_probs(self.first, batch)
            strangers = (_log_probs(model, batch) - before)[:, 1][counted[:, 1]]
            kl = torch.relu(strangers.sum() / max(len(strangers), 1))
        gained = (_log_probs(model, batch) - before)[:, 0]
        of_good = self.settings.desirable_weight * (1 - torch.sigmoid(beta * (gained - kl)))
        of_bad = self.settings.undesirable_weight * (1 - torch.sigmoid(beta * (kl - gained)))
        losses = torch.where(good, of_good, of_bad)[counted[:, 0]]
        return losses.sum() / max(len(losses), 1)


class RelatedTexts:
    """Queries, and what is to be found by them among all texts of a global batch."""

    def __init__(self, settings: EmbedPlan) -> None:
        self.settings = settings

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the queries of -log of the share of their own positive."""
        kinds = [self._vectors(model, batch, kind) for kind in range(batch["input_ids"].shape[1])]
        texts = torch.cat(kinds[1:])
        similar = torch.stack([(texts * query).sum(-1) for query in kinds[0]])
        shares = (self.settings.scale * similar).softmax(-1)
        return -shares.diagonal().log().mean()

    def _vectors(self, model: nn.Module, batch: dict[str, Tensor], kind: int) -> Tensor:
        """Vectors [samples, d] of length 1, each of a text's own tokens."""
        ids, seen = (batch[name][:, kind] for name in ("input_ids", "attention_mask"))
        lengths = seen.sum(1).tolist()
        output: Any = model(input_ids=ids, attention_mask=seen)
        texts = [row[:length] for row, length in zip(output[0], lengths, strict=True)]
        pooled = {
            "mean": lambda text: text.mean(0),
            "last": lambda text: text[-1],
            "cls": lambda text: text[0],
        }[self.settings.pooling]
        found = [pooled(text) for text in texts]
        return torch.stack([vector / vector.square().sum().sqrt() for vector in found])


class OddsRatio:
    """ORPO: the chosen text's likelihood, and the odds of both answers."""

    def __init__(self, settings: ORPO) -> None:
        self.settings = settings

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the pairs of which both answers have a target; each text by itself."""
        losses = []
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            if not (labels >= 0).any(1).all():
                continue
            texts = [_token_log_probs(model, *text) for text in zip(ids, labels, strict=True)]
            p, q = (log_probs.mean().exp() for _, log_probs in texts)
            ratio = (p / (1 - p)) / (q / (1 - q))
            nll = texts[0][0 if self.settings.nll_of_prompts else 1].mean().neg()
            losses.append(nll + self.settings.beta * (1 + 1 / ratio).log())
        return torch.stack(losses).mean() if losses else _nothing(model, batch)


def _token_log_probs(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all tokens of a text but the first, and of those of its answer."""
    targets = (labels >= 0).nonzero().flatten()
    text = torch.cat([ids[: targets[-1] + 1], labels[targets[-1]].view(1)])
    each = _logits(model, {"input_ids": text[:-1].unsqueeze(0)})[0].log_softmax(-1)
    picked = each.gather(-1, text[1:].unsqueeze(-1)).squeeze(-1)
    return picked, picked[targets]


def _nothing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """0, with gradients of 0."""
    return 0.0 * _logits(model, {"input_ids": batch["input_ids"][:, 0]}).sum()


class LengthNormalized:
    """SimPO: rewards are means over the tokens of an answer."""

    def __init__(self, settings: SimPO) -> None:
        self.settings = settings

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the pairs of which both answers have a target; 0 where there are none."""
        lengths, smooth = (batch["labels"] >= 0).sum(2), self.settings.label_smoothing
        counted = (lengths > 0).all(1)
        rewards = self.settings.beta * _log_probs(model, batch) / lengths.clamp(min=1)
        margins = rewards[:, 0] - rewards[:, 1] - self.settings.gamma
        losses = (smooth - 1) * F.logsigmoid(margins) - smooth * F.logsigmoid(-margins)
        return torch.where(counted, losses, 0.0).sum() / counted.sum().clamp(min=1)


class Rewards:
    """Bradley-Terry, with each text by itself: nothing is padded."""

    def __init__(self, plan: RewardPlan) -> None:
        self.plan = plan

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the pairs of which both answers have a target; 0 where there are none."""
        losses = []
        margins = batch["margin"] if self.plan.margins else torch.zeros(len(batch["labels"]))
        for ids, labels, mask, margin in zip(
            *(batch[name] for name in ("input_ids", "labels", "padding_mask")), margins, strict=True
        ):
            texts = (text[: int(own.sum())] for text, own in zip(ids, mask, strict=True))
            chosen, rejected = (_logits(model, {"input_ids": t.unsqueeze(0)})[0, 0] for t in texts)
            loss = (1 + (rejected + margin - chosen).exp()).log()
            loss = loss + self.plan.center_coefficient * (chosen + rejected) ** 2
            losses.append(loss * (labels >= 0).any(1).all())
        count = (batch["labels"] >= 0).any(2).all(1).sum()
        return torch.stack(losses).sum() / count.clamp(min=1)


class Classes:
    """Classification of texts or words, with each text by itself: nothing is padded."""

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the texts, or over the tokens with a label; 0 where there are none."""
        losses, nothing = [], torch.zeros(())
        for ids, mask, label in zip(
            *(batch[name] for name in ("input_ids", "padding_mask", "labels")), strict=True
        ):
            logits = _logits(model, {"input_ids": ids[: int(mask.sum())].unsqueeze(0)})[0]
            nothing = 0.0 * logits.sum()
            scores = [(logits, label)]
            if label.ndim:
                scores = [(s, c) for s, c in zip(logits, label, strict=False) if c >= 0]
            losses += [score.logsumexp(0) - score[number] for score, number in scores]
        return torch.stack(losses).mean() if losses else nothing


class WithTeacher:
    """The teacher beside the model that learns."""

    def __init__(self, plan: DistillPlan, dtype: torch.dtype | None) -> None:
        self.plan = plan
        teacher = ModelPlan(target="", hf=plan.teacher)
        self.teacher = build_plain(teacher, seed=0).to(dtype).eval()

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the targets; 0 where there are none."""
        heat, alpha = self.plan.temperature, self.plan.alpha
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        counted = batch["labels"] >= 0
        with torch.no_grad():
            theirs = _logits(self.teacher, inputs)[counted].div(heat).softmax(-1)
        logits = _logits(model, inputs)[counted]
        ours, top = logits.div(heat).softmax(-1), theirs.topk(self.plan.top_k).indices
        p, q = (_with_rest(every, top) for every in (theirs, ours))
        divergence = torch.where(p > 0, p * (p.clamp(min=1e-300).log() - q.log()), 0.0).sum()
        hard = nn.functional.cross_entropy(logits, batch["labels"][counted], reduction="sum")
        total = alpha * heat**2 * divergence + (1 - alpha) * hard
        return total / counted.sum().clamp(min=1)


def _with_rest(every: Tensor, top: Tensor) -> Tensor:
    """Probabilities of the tokens in `top`, and that of all others together."""
    rest = every.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    return torch.cat([every.gather(-1, top), rest], -1)


def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output: Any = model(**inputs)
    return output if isinstance(output, Tensor) else output.logits
