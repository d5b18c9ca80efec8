"""Losses of transformers' models: of causal ones chunk by chunk, of the others their own."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.errors import UsageError
from colotrain.models.adapters import is_adapted
from colotrain.models.context_parallel import ATTRIBUTE, own_tokens
from colotrain.models.documents import Documents, documents_in
from colotrain.models.facts import facts_of
from colotrain.models.huggingface_attention import check_calls, divided, num_calls
from colotrain.models.huggingface_documents import attending_within, needs_no_mask
from colotrain.models.huggingface_images import joined_images
from colotrain.models.huggingface_internals import without_packed_sequence_search
from colotrain.models.huggingface_task import (
    MASKED,
    QUESTION_ANSWERING,
    SEQUENCE_TO_SEQUENCE,
    Task,
    check_batch,
)
from colotrain.models.llm import positions_within
from colotrain.models.loss import Logits, cross_entropy, exact_dtype, reduction
from colotrain.models.tensor_parallel import ATTRIBUTE as TENSOR_SHARD
from colotrain.models.tensor_parallel import (
    TensorShard,
    vocabulary_cross_entropy,
    vocabulary_logits,
)
from colotrain.spec.objectives import IGNORE_INDEX

BALANCING = "load_balancing_loss_func"
"""Name of transformers' auxiliary loss in modules of architectures with experts."""
BALANCING_ARGS = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Its arguments."""


def shifted_loss(
    forward: Callable[..., Any],
    /,
    *inputs: Any,
    documents: Documents | None = None,
    padding_mask: Tensor | None = None,
    **batch: Any,
) -> Any:
    """(summed loss, number of targets) of a causal language model, for labels shifted already.

    `documents` are those of the micro-batch, where they are kept apart. `padding_mask` is 0 for the
    padding at the end of samples, which no token before it sees.
    Within `loss.by_token` the first is the loss of each token.
    Without labels it returns the output of `forward`.
    """
    model = _model_of(forward)
    batch, before = divided(model, joined_images(batch)), num_calls(model)
    labels = batch.pop("labels", None)
    tensors = [value for value in (*inputs, *batch.values()) if isinstance(value, Tensor)]
    head = None if holds_all_logits(model) else facts_of(model).head
    on_meta = any(tensor.is_meta for tensor in tensors)
    with ExitStack() as contexts:
        if on_meta:
            contexts.enter_context(without_packed_sequence_search())
        if head is not None:
            contexts.enter_context(head.given(labels))
        output = forward(*inputs, use_cache=False, **batch)
        loss = None if head is None else head.loss
    check_calls(model, before)
    if labels is None:
        return output
    if loss is None:
        loss = F.cross_entropy(
            output.logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction=reduction(),
        )
    if balances_experts(model):
        mask = padding_mask if padding_mask is not None else batch.get("attention_mask")
        loss = loss + _balancing_loss(model, output.router_logits, labels, mask, documents)
    return loss, (labels != IGNORE_INDEX).sum()


def balances_experts(model: Any) -> bool:
    """Whether the loss of the model has an auxiliary one for its routers."""
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def find_balancing_loss_(model: nn.Module) -> bool:
    """Let the model know its auxiliary loss; False if it is not the one that most have."""
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    found = getattr(sys.modules[type(model).__module__], BALANCING, None)
    facts_of(model).balancing_loss = found  # once it is sharded, its class has another module
    if found is None or not all(hasattr(model, name) for name in names):
        return False
    return tuple(inspect.signature(found).parameters) == BALANCING_ARGS


def _balancing_loss(
    model: Any,
    logits: tuple[Tensor, ...],
    labels: Tensor,
    mask: Tensor | None,
    documents: Documents | None,
) -> Tensor:
    """The auxiliary loss that transformers computes for each sample by itself, times its targets.

    Of the samples of a whole micro-batch together it would depend on how a step is divided. Padding
    does not count: `mask` [batch, seq] is 0 there. Of samples with several documents each is one.
    `logits` of each layer are [batch * seq, experts].
    """
    own_loss_of = facts_of(model).balancing_loss
    assert own_loss_of is not None
    batch, seq_len = labels.shape
    lengths = list(documents.lengths) if documents is not None else [seq_len] * batch
    mask = torch.ones_like(labels) if mask is None else mask
    total = torch.zeros((), device=labels.device)
    for tokens, own, *layers in zip(
        *(tensor.flatten().split(lengths) for tensor in (labels, mask)),
        *(layer.split(lengths) for layer in logits),
        strict=True,
    ):
        count = (tokens != IGNORE_INDEX).sum()
        own = torch.where(own.any(), own, torch.ones_like(own))  # a mean over no token is NaN
        experts = model.num_experts, model.num_experts_per_tok
        total = total + count * own_loss_of(tuple(layers), *experts, own)
    return total * model.router_aux_loss_coef


def isolating_loss(
    forward: Callable[..., Any],
    /,
    *inputs: Any,
    document_ids: Tensor | None = None,
    **batch: Any,
) -> Any:
    """`shifted_loss` of a model that keeps the documents of `document_ids` [batch, seq] apart."""
    model, documents, apart = _model_of(forward), None, None
    if document_ids is not None and batch.get("attention_mask") is not None:
        raise UsageError(
            "samples have document_ids and an attention_mask, of which one would be ignored",
            "leave out attention_mask, and give padding a document of its own",
        )
    if document_ids is not None:
        batch["position_ids"] = positions_within(document_ids)
        apart = documents_in(document_ids) if balances_experts(model) else None
        if getattr(model, ATTRIBUTE, None) is not None:
            batch["document_ids"] = document_ids
        elif needs_no_mask(model):
            documents = documents_in(document_ids)
    with attending_within(model, documents) as more:
        return shifted_loss(forward, *inputs, documents=apart, **batch, **more)


def own_loss(forward: Callable[..., Any], task: Task, /, *inputs: Any, **batch: Any) -> Any:
    """Output of a model of another task, with the mean loss that transformers computes.

    Raises `UsageError` for labels that are not the task's, and for a classifier that has to know
    what padding is and does not. Without targets, no loss is computed.
    """
    if inputs or not {"labels", "start_positions"} & batch.keys():
        return forward(*inputs, **batch)
    model: Any = _model_of(forward)
    name = next(iter(model.config.architectures or ()), "the model")
    check_batch(task, name, batch)
    if task is SEQUENCE_TO_SEQUENCE:
        batch["use_cache"] = False
    if task is MASKED and getattr(model, ATTRIBUTE, None) is not None:
        return _loss_of_part(model, forward, **batch)
    on_meta = any(tensor.is_meta for tensor in batch.values() if isinstance(tensor, Tensor))
    try:
        with without_packed_sequence_search() if on_meta else nullcontext():
            output = forward(**batch)
    except ValueError as error:
        if "padding token" not in str(error):
            raise
        raise UsageError(f"{name}: {error}", "set model.args.pad_token_id") from error
    return output if task is not QUESTION_ANSWERING else _loss_of_answer(output, batch)


def _loss_of_part(
    model: nn.Module, forward: Callable[..., Any], labels: Tensor, **batch: Any
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of targets) of this rank's tokens."""
    logits: Tensor = forward(**batch).logits
    own = own_tokens(model, labels).flatten()
    exact = logits.to(exact_dtype(logits)).flatten(0, 1)
    loss = F.cross_entropy(exact, own, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, (own != IGNORE_INDEX).sum()


def _loss_of_answer(output: Any, batch: dict[str, Any]) -> Any:
    """(summed loss, number of targets) of the first and the last position of each answer.

    As in transformers a position behind the sequence is no target, and one before it the first.
    Its mean of starts and that of ends count alike; where one of an answer's positions is no
    target, that depends on how a batch is divided, and here all positions count alike. The output
    itself, with transformers' mean loss, where a model has no logits of positions.
    """
    pairs = []
    for name in ("start", "end"):
        logits, positions = getattr(output, f"{name}_logits", None), batch.get(f"{name}_positions")
        if logits is None or positions is None or logits.ndim != 2:
            return output
        exact = torch.promote_types(logits.dtype, torch.float32)
        pairs.append((logits.to(exact), positions.flatten().clamp(0, logits.shape[1])))
    logits, positions = (torch.cat(each) for each in zip(*pairs, strict=True))
    ignored = logits.shape[1]
    loss = F.cross_entropy(logits, positions, ignore_index=ignored, reduction="sum")
    return loss, (positions != ignored).sum()


def _model_of(forward: Any) -> nn.Module:
    while isinstance(forward, functools.partial):
        forward = forward.func
    model: nn.Module = forward.__self__
    return model


class ChunkedHead:
    """Forward of a head that returns a number where labels are given, otherwise products.

    `loss` is then what `cross_entropy` returned.
    What the model does with the products of its head is part of the loss; so the rest of its
    forward may treat the returned number as it likes.
    """

    def __init__(self, linear: nn.Linear, logits: Logits) -> None:
        self.linear, self.logits = linear, logits
        self.labels: Tensor | None = None
        self.loss: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        shard: TensorShard | None = getattr(self.linear, TENSOR_SHARD, None)
        if self.labels is None:
            if shard is None:
                return F.linear(x, weight, bias)
            return vocabulary_logits(x, weight, shard, bias=bias)
        labels, kind = self.labels.flatten(), self.logits
        if shard is None:
            self.loss = cross_entropy(x.flatten(0, -2), weight, labels, bias=bias, logits=kind)
        else:
            self.loss = vocabulary_cross_entropy(x, weight, labels, shard, bias=bias, logits=kind)
        return self.loss.sum()

    @contextmanager
    def given(self, labels: Tensor | None) -> Iterator[None]:
        """Compute the loss of `labels` in the context; `loss` is then that of the last forward."""
        self.labels, self.loss = labels, None
        try:
            yield
        finally:
            self.labels = self.loss = None


def chunk_loss_(model: Any) -> None:
    """Let a causal model compute its loss without all logits, where its head is understood."""
    head, logits = model.get_output_embeddings(), logits_of(model)
    if logits is not None:
        chunked = ChunkedHead(head, logits)
        facts_of(model).head = head.forward = chunked


def holds_all_logits(model: nn.Module) -> bool:
    """Whether the loss of a causal model needs all logits of a micro-batch in memory."""
    head = facts_of(model).head
    return head is None or is_adapted(head.linear)


def logits_of(model: Any) -> Logits | None:
    """What the model makes of the products of its head; None if that is not understood.

    The model's forward is run without its decoder, with known numbers for the products, and what it
    returns is compared with what the settings of its configuration would make of them.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or model.base_model is model:
        return None
    numbers = torch.linspace(-50.0, 50.0, 2 * head.out_features, dtype=torch.float64, device="cpu")
    numbers = numbers.view(1, 2, -1)
    single = torch.tensor(1.25, dtype=torch.float64, device="cpu")
    try:
        found = _after_head(model, head, numbers.clone())
        _after_head(model, head, single)
    except Exception:  # whatever a forward raises that does more with its products
        return None
    if single.item() != 1.25 or found.shape != numbers.shape or found.is_meta:
        return None
    return next((c for c in _candidates(model.config) if _close(found, c, numbers)), None)


def _after_head(model: Any, head: nn.Linear, products: Tensor) -> Tensor:
    """The logits that the model's forward makes of given products of its head."""
    base = model.base_model
    hidden = torch.zeros((1, 2, head.in_features), device="cpu")
    base.forward = lambda *args, **kwargs: _OnlyHidden(hidden)
    head.forward = lambda x: products  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
            return logits
    finally:
        del base.forward, head.forward


class _OnlyHidden:
    """Output of a decoder with hidden states; everything else in it is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


def _candidates(config: Any) -> Iterator[Logits]:
    """What the settings of a configuration may make of products."""
    config = config.get_text_config()
    factors = [getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier")]
    divisor = getattr(config, "logits_scaling", None)
    factors.append(1.0 / divisor if divisor else None)
    for cap in (None, getattr(config, "final_logit_softcapping", None)):
        yield from (Logits(scale=float(factor), cap=cap) for factor in (1.0, *factors) if factor)


def _close(found: Tensor, shape: Logits, products: Tensor) -> bool:
    wanted = products * shape.scale
    if shape.cap is not None:
        wanted = shape.cap * torch.tanh(wanted / shape.cap)
    return torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
