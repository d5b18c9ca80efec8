"""The settings that the plan has as they are written: each is declared here, and nowhere else.

A section of the settings adds those that the planner decides on, and the plan what it decided.
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from colotrain.spec.precisions import PrecisionName

DataFormat = Literal[
    "auto",
    "text",
    "jsonl",
    "json",
    "csv",
    "conll",
    "fasttext",
    "parquet",
    "arrow",
    "nanogpt",
    "megatron",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonMesh:
    """Axes of the mesh of ranks beside the plugin's; ranks along pp, cp and tp work on the same
    samples."""

    pp: int = 1
    """Pipeline parallelism: stages that each hold some consecutive blocks of the model, for models
    that no plugin's shards make small enough, or ranks with slow links between them."""
    pp_split: tuple[int, ...] = ()
    """Number of blocks of each stage, or of each of the `mesh.pp` × `mesh.pp_chunks` chunks, which
    stages take in turn; empty: stages that take about as long."""
    cp: int = 1
    """Context parallelism: ranks that divide each sample's tokens among themselves, for samples too
    long for one rank's memory. Model states are sharded over them, too."""
    tp: int = 1
    """Tensor parallelism: ranks of a host that divide every layer's matrices among themselves, for
    layers too large for one rank."""
    ep: int = 1
    """Expert parallelism: ranks of a host that divide the experts of every layer among themselves.
    They read different samples, and send their tokens to the ranks that have the experts."""
    sequence_parallel: bool = False
    """With `mesh.tp` above 1, its ranks divide norms and the residual stream by tokens as well, so
    that each holds less of the activations. Without it, it changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonModel:
    """The model."""

    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the callable; with `hf`, changes of its config.json, and `dtype`."""
    deferred_init: bool = False
    """For a model too large for every rank's host: make it without values, shard it, and have its
    method `init_weights()` set every parameter. False: it begins as `target` returns it."""
    quantize: Literal["nf4", "int8", "mxfp4"] | None = None
    """Under adapters: frozen linear layers and experts keep a few bits of each number of their
    weights, of which they compute a weight whenever they need it: nf4 (4 bits, as in QLoRA), int8
    (a scale for each row) or mxfp4 (4-bit floats, a power of two for 32 of them); null: whole
    weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonPart:
    """One part of a mixture."""

    weight: float = 1.0
    """Share of the samples, relative to the other parts."""
    format: DataFormat = "auto"
    """Same as `data.format`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Same as `data.columns`, and added to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonData:
    """The data."""

    corpus: Literal["stdlib"] | None = None
    """Corpus that exists on every machine: `stdlib`, the Python standard library's source files."""
    format: DataFormat = "auto"
    """Format of the files; auto: recognised by their names and contents."""
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
    images: bool = False
    """Conversations have images: paths relative to the data file, or bytes. The processor in the
    folder `tokenizer` makes placeholders and pixels of them."""
    packing: Literal["auto", "stream", "whole", "none"] = "auto"
    """How documents become samples: `stream` concatenates them and cuts windows; `whole` puts whole
    documents side by side and pads; `none` pads each. auto: none for records with answers,
    otherwise stream."""
    isolate: bool = False
    """Documents in one sample do not attend to one another, and positions restart in each."""
    on_bad: Literal["stop", "skip"] = "stop"
    """What an unusable record does: end the preparation, or be counted and left out."""
    collate: str | None = None
    """`package.module:callable` that makes a batch, a dict of tensors, of a list of samples of your
    own dataset, which may differ in length; null: samples are stacked."""
    sampler: str | None = None
    """`package.module:callable` that returns a weight for each sample of your own dataset; samples
    are drawn by them, with replacement."""
    num_workers: int = 0
    """Processes of each rank that read micro-batches ahead, for images and for a dataset of your
    own with slow samples; 0: the rank reads them itself, between forward passes."""
    shuffle: bool = True
    """Draw samples in random order from the seed; otherwise in file order."""
    validation_fraction: float = 0.05
    """Share of the files, of the records, or of the tokens of one file kept for validation, where
    neither `validation_path` nor names of files say what is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonTrain:
    """The training settings."""

    epochs: float | None = None
    """Passes over the training data, instead of `max_steps`."""
    last_batch: Literal["fill", "drop"] = "fill"
    """What becomes of an epoch's last samples that do not fill a global batch: a step fills it with
    samples of the next epoch, or they are left out of this epoch."""
    seed: int = 0
    """Seed of initial weights, sample order and dropout."""
    precision: PrecisionName = "fp32"
    """Compute precision; weights and optimizer state stay in the model's own precision."""
    tf32: bool = False
    """On CUDA: let fp32 matrix products and convolutions round their inputs to TensorFloat-32 (10
    bits instead of 23), which is several times as fast."""
    grad_clip: float | None = 1.0
    """Maximum global gradient norm, by clipping; null turns it off."""
    compile: bool = False
    """Compile each block with torch.compile."""
    eval_steps: int | Literal["all"] = 8
    """Global batches per evaluation, at most one pass over the validation samples; all: exactly one
    pass; 0: no evaluations at all."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What a loss or gradient that is not finite does: end the run, skip the step, or go back to
    the last checkpoint and skip the batches since then."""
    max_rollbacks: int = 3
    """How often `train.on_nonfinite=rollback` may go back before the run ends."""
    metrics: str | None = None
    """`package.module:callable` of (batch, outputs), called in evaluations, that returns a dict of
    numbers: each a (sum, count), or a mean over the targets."""
    on_gradients: str | None = None
    """`package.module:callable` of (model, number of steps before this one), called with the
    gradients of each step before clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePlan:
    """Optimizer settings of the parameters whose names match a glob."""

    match: str
    """Glob on parameter names."""
    lr_scale: float | None = None
    """Learning rate, as a multiple of `optim.lr`."""
    weight_decay: float | None = None
    """Weight decay, for parameters of any shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptim:
    """The optimizer."""

    name: str = "adamw"
    """adamw, sgd, adamw8bit (its moments have 8 bits), schedule_free_adamw (evaluated and exported
    with a mean over all steps), lion, muon (for the matrices of layers; AdamW for the rest),
    adafactor, or `package.module:Class`, which is called with parameter groups, `lr` and `args`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of an optimizer of your own."""
    rules: tuple[RulePlan, ...] = ()
    """Settings for some parameters: `[{match: "embed*", lr_scale: 0.1, weight_decay: 0.0}]`; later
    rules win if several match. A tied parameter matches by any of its names."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """The two decay rates of AdamW, in 8 bits too, and of Lion."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    rounding: Literal["nearest", "stochastic", "kahan"] = "nearest"
    """How updates of parameters in bfloat16 are rounded: nearest (what is below half of the last
    place is lost), stochastic (right in the mean), or kahan (what rounding takes off is kept beside
    the parameter, as state of its size). The latter two are for adamw."""
    weight_decay: float = 0.1
    """Weight decay of matrices, decoupled but for sgd, which adds it to the gradient as torch does;
    norms and biases of any shape, vectors and scalars have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonCheckpoint:
    """Saved states of the run."""

    keep: int = 2
    """Number of newest checkpoints to keep; the last good one is always kept."""
    async_: bool = True
    """Train on while the state is written (written `async`); may need memory for a copy."""
    resume: str = "auto"
    """auto (continue from this run's newest checkpoint), none, or a run or checkpoint folder."""
    content: Literal["all", "trained"] = "all"
    """trained: without parameters that never trained, for example under adapters; to resume or
    export such a checkpoint, the model that the run began with must still exist."""
