"""Inspection of data before training: counts, lengths, and samples as the model sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from colotrain import generators
from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.corpora import Progress
from colotrain.data.prepare.prepared import Prepared, Split
from colotrain.data.prepare.sources import describe_sources
from colotrain.data.prepare.tokens import notes_of, parts_of, prepare_shards
from colotrain.data.read.images import open_images
from colotrain.data.read.loader import Samples, open_samples, order_of
from colotrain.data.read.packing import packing_of
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.spec.objectives import IGNORE_INDEX
from colotrain.spec.plan import DataPlan

SPLITS: tuple[Split, ...] = ("train", "validation")
MOST_BINS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of a sample, as text, with its role in training."""

    text: str
    in_loss: bool
    """Whether the token is a target that counts in the loss."""
    document: int | None
    """Number of its document in an isolated sample, or of its answer in a preference pair (0: the
    chosen one); -1 for padding; None in other samples."""


def describe(plan: DataPlan, progress: Progress | None = None) -> dict[str, Any]:
    """Facts about each part, and the number of samples per split. Prepares the data."""
    if plan.source == "target":
        return {"parts": [], "samples": _count_samples(plan), "seq_len": plan.seq_len}
    parts = []
    for index, part in enumerate(parts_of(plan)):
        shards = prepare_shards(part, progress=progress)
        weight = plan.mixture[index].weight if plan.mixture else None
        parts.append(_describe_part(part, shards, weight))
    return {"parts": parts, "samples": _count_samples(plan), "seq_len": plan.seq_len}


def _count_samples(plan: DataPlan) -> dict[str, int]:
    return {split: len(open_samples(plan, split)) for split in SPLITS}


def _describe_part(plan: DataPlan, shards: list[Prepared], weight: float | None) -> dict[str, Any]:
    train = [shard for shard in shards if shard.num_train]
    share = 1.0 if plan.masked is None else plan.masked.probability
    packing = packing_of(shards, plan)
    cut_off = [s.count_cut_off("train", plan.seq_len) for s in train if packing != "stream"]
    in_loss = sum(_count_in_loss(shard) for shard in train) - sum(lost for _, lost in cut_off)
    documents = {split: _count_documents(shards, split) for split in SPLITS}
    has_label_behind = bool(plan.classes) and not plan.classes_of_words
    if has_label_behind:  # one label for each text
        in_loss = documents["train"] or 0
    return {
        **describe_sources(plan),
        "weight": weight,
        "shards": len(shards),
        "tokenizer": plan.tokenizer,
        "vocab_size": max(shard.vocab_size for shard in shards),
        "texts": _form(plan, shards),
        "packing": packing,
        "isolate": plan.isolate,
        "tokens": {split: sum(shard.count(split) for shard in shards) for split in SPLITS},
        "bytes": {split: _sum_bytes(shards, split) for split in SPLITS},
        "documents": documents,
        "in_loss": round(share * in_loss),
        "without_targets": sum(empty for empty, _ in cut_off),
        "bad": {
            "count": sum(s.num_bad for s in shards),
            "first": [b for s in shards for b in s.bad],
        },
        "notes": [asdict(note) for note in notes_of(plan, shards)],
        "images": open_images(shards, plan, "train").described() if plan.images else None,
        "lengths": _histogram(train, plan.seq_len, behind=int(has_label_behind)),
    }


def _form(plan: DataPlan, shards: list[Prepared]) -> dict[str, Any] | None:
    """The tokens around each document of text; None for files of tokens."""
    if any(shard.num_bytes_train is None for shard in shards):
        return None
    form = vocabulary.document_form(plan.tokenizer, shards[0].tokenizer, separates=not plan.classes)
    return asdict(form)


def _sum_bytes(shards: list[Prepared], split: Split) -> int | None:
    known = [s.num_bytes_train if split == "train" else s.num_bytes_validation for s in shards]
    return None if None in known else sum(number or 0 for number in known)


def _count_documents(shards: list[Prepared], split: Split) -> int | None:
    ends = [shard.document_ends(split) for shard in shards]
    return None if any(e is None for e in ends) else sum(len(e) for e in ends if e is not None)


def _count_in_loss(shard: Prepared) -> int:
    """Number of tokens of the train split that count in the loss, where nothing is cut."""
    targets = shard.targets("train")
    return shard.num_train if targets is None else int(np.count_nonzero(targets))


def _histogram(shards: list[Prepared], seq_len: int, *, behind: int) -> dict[str, Any] | None:
    """Histogram of the train documents' lengths in tokens, with bins up to powers of two.

    `behind`: numbers behind each document that are no tokens of its text.
    """
    ends = [shard.document_ends("train") for shard in shards]
    if not ends or any(e is None for e in ends):
        return None
    lengths = np.concatenate([np.diff(e, prepend=0) for e in ends if e is not None]) - behind
    if not len(lengths):
        return None
    top = max(1, int(lengths.max()))
    powers = [1 << k for k in range(top.bit_length() + 1)]
    first = max(0, len(powers) - MOST_BINS)
    edges = [0, *powers[first:]]
    counts, _ = np.histogram(lengths, bins=[e + 1 for e in edges])
    bins = [{"up_to": edge, "count": int(n)} for edge, n in zip(edges[1:], counts, strict=True)]
    filled = [index for index, row in enumerate(bins) if row["count"]]
    bins = bins[filled[0] : filled[-1] + 1]
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "max": top,
        "longer_than_seq_len": int((lengths > seq_len).sum()),
        "bins": bins,
    }


def sample_tokens(
    plan: DataPlan, number: int, *, seed: int, split: Split = "train"
) -> tuple[int, list[Token]]:
    """Index and tokens of the sample at position `number` of the run's order."""
    samples = open_samples(plan, split)
    if not 0 <= number < len(samples):
        expected = f"a number from 0 to {len(samples) - 1} ({split} has {len(samples)} samples)"
        raise ConfigError([Problem(key="--sample", value=number, expected=expected)])
    index = order_of(samples, seed=seed, shuffle=plan.shuffle).sample_at(number)
    with generators.kept():
        generators.seed_draws(seed, number)
        sample = samples[index]
    return index, list(_tokens(plan, samples, index, sample))


def sample_images(plan: DataPlan, index: int, split: Split = "train") -> list[dict[str, Any]]:
    """The images of a sample, with their width and height."""
    if not plan.images:
        return []
    document = open_images(prepare_shards(plan), plan, split).document(index)
    pairs = zip(document.images, document.sizes, strict=True)
    return [{"image": str(image), "size": list(size)} for image, size in pairs]


def _tokens(plan: DataPlan, samples: Samples, index: int, sample: Any) -> Iterator[Token]:
    if plan.related is not None:
        for row, (ids, seen) in enumerate(zip(*map(Tensor.tolist, sample.values()), strict=True)):
            places: list[int | None] = [row if is_seen else -1 for is_seen in seen]
            read = [
                token if is_seen else IGNORE_INDEX for token, is_seen in zip(ids, seen, strict=True)
            ]
            yield from _as_text(plan, ids, read, places, shift=0)
        return
    if "input_ids" not in sample or "labels" not in sample:
        names = ", ".join(map(str, sample))
        problem = f"sample {index} has no input_ids and labels to show (it has {names})"
        raise ColotrainError(problem, "name them so in your dataset")
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    if plan.classes_of_words:
        num = int(sample["padding_mask"].sum())
        for text, label in zip(token_texts(plan, ids[:num]), labels, strict=False):
            is_label = label != IGNORE_INDEX
            name = f"→{plan.classes[label]} " if is_label else ""
            yield Token(text=f"{text}{name}", in_loss=is_label, document=None)
    elif plan.classes:
        text = ids[: int(sample["padding_mask"].sum())]
        yield from (Token(text=t, in_loss=False, document=None) for t in token_texts(plan, text))
        yield Token(text=f" → {plan.classes[labels]}", in_loss=True, document=None)
    elif plan.rows:
        for answer in range(len(plan.rows)):
            documents = _padding_apart(ids[answer], labels[answer], answer)
            yield from _as_text(plan, ids[answer], labels[answer], documents)
    elif sample["input_ids"].dim() != 1:
        problem = f"sample {index} has input_ids of {sample['input_ids'].dim()} dimensions to show"
        raise ColotrainError(problem, "a sample of text has one")
    elif plan.images:
        seen = sample["attention_mask"].tolist()
        yield from _as_text(plan, ids, labels, [None if one else -1 for one in seen])
    elif plan.masked is not None:
        padding = [None if seen else -1 for seen in sample["attention_mask"].tolist()]
        yield from _as_text(plan, ids, labels, padding, shift=0)
    elif "document_ids" in sample:
        yield from _as_text(plan, ids, labels, sample["document_ids"].tolist())
    else:
        yield from _as_text(plan, ids, labels, _padding_apart(ids, labels, None))


def _padding_apart(ids: list[int], labels: list[int], document: int | None) -> list[int | None]:
    """The document of each token: -1 for padding, which is at the end."""
    at = len(ids)
    while at and ids[at - 1] == 0 and labels[max(0, at - 2)] == labels[at - 1] == IGNORE_INDEX:
        at -= 1
    return [document] * at + [-1] * (len(ids) - at)


def _as_text(
    plan: DataPlan,
    ids: list[int],
    labels: list[int],
    documents: list[int | None],
    *,
    shift: int = 1,
) -> Iterator[Token]:
    """The tokens of a row; the label of token i is at place i - shift."""
    counts = [False] * shift + [label != IGNORE_INDEX for label in labels[: len(labels) - shift]]
    for text, in_loss, document in zip(token_texts(plan, ids), counts, documents, strict=True):
        yield Token(text=text, in_loss=in_loss, document=document)


def token_texts(plan: DataPlan, ids: list[int]) -> list[str]:
    """Text of each token; a character of several tokens is part of the last one's."""
    if plan.source == "target":
        file = vocabulary.tokenizer_file(plan.tokenizer)
        if file is None and plan.tokenizer != "bytes":
            return [f"{number} " for number in ids]
    else:
        file = prepare_shards(parts_of(plan)[0])[0].tokenizer
    if file is None:
        if max(ids, default=0) > 255:
            return [f"{number} " for number in ids]
        return _incremental(ids, lambda part: bytes(part).decode("utf-8", errors="replace"))
    tokenizer = vocabulary.load(file)
    return _incremental(ids, lambda part: tokenizer.decode(part, skip_special_tokens=False))


def _incremental(ids: list[int], decode: Any) -> list[str]:
    texts, begin, done = [], 0, ""
    for stop in range(1, len(ids) + 1):
        whole = decode(ids[begin:stop])
        if whole.endswith("\ufffd") and stop - begin < 16:
            texts.append("")
            continue
        texts.append(whole[len(done) :])
        begin = max(begin, stop - 4)
        done = decode(ids[begin:stop])
    return texts
