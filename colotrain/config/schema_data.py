"""Schema of the data section; see `config.schema`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

DataFormat = Literal[
    "auto", "text", "jsonl", "json", "csv", "parquet", "arrow", "nanogpt", "megatron"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a mixture."""

    path: str | list[str]
    """Files as in `data.path`."""
    weight: float = 1.0
    """Share of the samples, relative to the other parts."""
    validation_path: str | list[str] | None = None
    """Same as `data.validation_path`."""
    format: DataFormat = "auto"
    """Same as `data.format`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Same as `data.columns`, and added to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data: files (`path`, `mixture`), a corpus, or a dataset of your own (`target`)."""

    corpus: Literal["stdlib"] | None = None
    """Corpus that exists on every machine: `stdlib`, the Python standard library's source files."""
    path: str | list[str] | None = None
    """Folder, file or glob of text, JSON, CSV, Parquet, Arrow or token files, or a Hugging Face
    dataset's folder."""
    validation_path: str | list[str] | None = None
    """Validation data, written as `data.path`, which then is trained on whole; null: what names of
    files say, or else a share (`validation_fraction`)."""
    format: DataFormat = "auto"
    """Format of the files; auto: recognised by their names and contents."""
    mixture: list[Part] = field(default_factory=list)
    """Several sources instead of one: `[{path: a.jsonl, weight: 3}, {path: b/, weight: 1}]`."""
    target: str | None = None
    """`package.module:callable` that returns a dataset of dicts of tensors."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the callable."""
    seq_len: int = 256
    """Tokens per sample."""
    tokenizer: str = "auto"
    """`bytes`, `bpe-SIZE` (trained once on the corpus and cached), a tokenizer.json file, or a
    folder that has one (then its chat template and end-of-text token are used, too); auto: the one
    in the directory `model.hf`, otherwise bytes."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field names of the records by their meaning: text, prompt, completion, messages, chosen,
    rejected, question, answer, context; beside them system, history, tools, documents,
    chat_template_kwargs, label. For example `{messages: dialog, tools: functions}`."""
    chat_template: str | None = None
    """`chatml`, or a file with a Jinja template, which transformers renders; by default the
    tokenizer's own."""
    loss_on: Literal["answers", "last", "all"] = "answers"
    """Tokens of prompt/completion and chat records that count in the loss: those of all answers, of
    the last answer, or all tokens."""
    packing: Literal["auto", "stream", "whole", "none"] = "auto"
    """How documents become samples: `stream` concatenates them and cuts windows; `whole` puts whole
    documents side by side and pads; `none` pads each. auto: none for records with answers,
    otherwise stream."""
    isolate: bool = False
    """Documents in one sample do not attend to one another, and positions restart in each."""
    on_bad: Literal["stop", "skip"] = "stop"
    """What an unusable record does: end the preparation, or be counted and left out."""
    workers: int | Literal["auto"] = "auto"
    """Processes that tokenize records; auto: one per core, at most 16."""
    collate: str | None = None
    """`package.module:callable` that makes a batch, a dict of tensors, of a list of samples of your
    own dataset, which may differ in length; null: samples are stacked."""
    sampler: str | None = None
    """`package.module:callable` that returns a weight for each sample of your own dataset; samples
    are drawn by them, with replacement."""
    num_workers: int = 0
    """Processes of each rank that read micro-batches ahead, for a dataset of your own with slow
    samples; 0: the rank reads them itself, between forward passes."""
    shuffle: bool = True
    """Draw samples in random order from the seed; otherwise in file order."""
    validation_fraction: float = 0.05
    """Share of the files, of the records, or of the tokens of one file kept for validation, where
    neither `validation_path` nor names of files say what is."""
