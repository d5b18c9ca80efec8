"""What a user may write. Each field's meaning stands under it; the reference is made from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from colotrain.config.schema_cluster import Cluster, Hardware
from colotrain.config.sizes import Size
from colotrain.spec.plan import Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """gemini: what a rank may use of each tier. `auto` is what is free, less a tenth."""

    device: Size = "auto"
    """Device memory; on CPU it is the host's."""
    host: Size = "auto"
    """Host memory, everything of the process included."""
    disk: Size = "auto"
    """Space under `plugin.disk_path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """The sharding strategy."""

    name: str = "auto"
    """zero1, zero2, zero3, fsdp-hybrid, gemini, or auto (the fastest that fits)."""
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per module: `{"blocks.0-3": {reshard: false}}`."""
    reshard: bool | None = None
    """Free whole parameters after use (true) or keep them through the step (false)."""
    shard_size: int | None = None
    """fsdp-hybrid: ranks that share one copy of the model; by default the ranks of a node."""
    chunk_size: Size = "auto"
    """gemini: bytes that small modules are packed and large ones split to; auto: by search."""
    budget: Budget = field(default_factory=Budget)
    """gemini: what a rank may use of each tier."""
    disk_path: str | None = "auto"
    """gemini: the folder of the disk tier, on a local disk; auto: in the run's own folder, where
    memory might not suffice; none: there is no such tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model."""

    target: str | None = None
    """`package.module:callable` that returns an nn.Module."""
    hf: str | None = None
    """A Hugging Face model directory (config.json and safetensors); the extra `hf` reads it."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the callable; with `hf`, changes of its config.json, and `dtype`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Small trainable matrices beside the weights of linear layers; all else is frozen."""

    name: Literal["lora"] | None = None
    """lora: low-rank adapters; null: none."""
    rank: int | None = None
    """Rank of the matrices; 8 unless `path` has another."""
    alpha: float | None = None
    """Their product is multiplied by alpha / rank; 16 unless `path` has another."""
    targets: list[str] = field(default_factory=list)
    """Globs on the names of linear layers, or on the last part of them: `["*attn*", "q_proj"]`."""
    dropout: float = 0.0
    """Dropout of what goes into the adapters."""
    path: str | None = None
    """A directory in PEFT's format to start from; its rank, alpha and targets are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a mixture."""

    path: str | list[str]
    """Files as in `data.path`."""
    weight: float = 1.0
    """Its share of the samples, relative to the other parts'."""
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "nanogpt", "megatron"] = "auto"
    """As `data.format`."""
    columns: dict[str, str] = field(default_factory=dict)
    """As `data.columns`, and added to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data: files (`path`, `mixture`), a corpus, or a dataset of your own (`target`)."""

    corpus: Literal["stdlib"] | None = None
    """A corpus that is on every machine: `stdlib`, the Python standard library's source files."""
    path: str | list[str] | None = None
    """A folder, file or glob of text, JSONL, Parquet, Arrow or token files, or a Hugging Face
    dataset's folder."""
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "nanogpt", "megatron"] = "auto"
    """What the files are; auto: told from their names and contents."""
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
    folder that has one (then its chat template and end-of-text token are used, too); auto: the
    one in the directory `model.hf`, otherwise bytes."""
    columns: dict[str, str] = field(default_factory=dict)
    """What records call their fields, where not `text`, `prompt`, `completion`, `messages`:
    `{prompt: question, completion: answer}`."""
    chat_template: str | None = None
    """`chatml`, or a file with a Jinja template; by default the tokenizer's own."""
    loss_on: Literal["answers", "last", "all"] = "answers"
    """Which tokens of prompt/completion and chat records are trained on: those of answers, of the
    last answer, or all."""
    packing: Literal["auto", "stream", "whole", "none"] = "auto"
    """How documents become samples: `stream` runs them on and cuts windows; `whole` puts whole
    documents side by side and pads; `none` pads each. auto: none where answers are trained on,
    otherwise stream."""
    isolate: bool = False
    """Documents in one sample do not attend to one another, and positions start anew in each."""
    on_bad: Literal["stop", "skip"] = "stop"
    """What a record that cannot be used does: end the preparation, or be counted and left out."""
    workers: int | Literal["auto"] = "auto"
    """Processes that tokenize records; auto: one per core, at most 16."""
    num_workers: int = 0
    """Processes of each rank that read micro-batches ahead, for a dataset of your own whose samples
    take time; 0: the rank reads them itself, between forward passes."""
    shuffle: bool = True
    """Draw samples in an order made from the seed; otherwise in file order."""
    validation_fraction: float = 0.05
    """Share of the files, of the records, or of the tokens of one file kept for validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """The training settings."""

    max_steps: int | None = None
    """Optimizer steps of the whole run; null: what `epochs` come to, or 100."""
    epochs: float | None = None
    """Passes over the training data, instead of `max_steps`."""
    last_batch: Literal["fill", "drop"] = "fill"
    """What becomes of an epoch's last samples that do not fill a global batch: a step fills it with
    samples of the next epoch, or they are left out of this epoch."""
    global_batch: int | None = None
    """Samples per step over all ranks."""
    micro_batch: int | None = None
    """Samples one rank feeds forward at once."""
    seed: int = 0
    """Seed of initial weights, sample order and dropout."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Compute precision; weights and optimizer state stay in the model's own precision."""
    grad_clip: float | None = 1.0
    """Clip the global gradient norm to this; null turns it off."""
    activation_checkpointing: Recompute = "none"
    """Recompute activations per block in backward (always non-reentrant): all of them (full), or
    all but the outputs of matrix products, convolutions and attention (selective)."""
    compile: bool = False
    """Compile each block with torch.compile."""
    eval_every: int | str | None = None
    """Steps between evaluations, or epochs as in `0.5ep`; 0 or null turns them off but for the one
    after the last step and the one before the first, which is left out where it is predicted to
    take five minutes."""
    eval_steps: int = 8
    """Global batches per evaluation; 0: none ever."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What a loss or gradient that is not finite does: end the run, leave out the step, or go back
    to the last checkpoint and past the batches since then."""
    max_rollbacks: int = 3
    """How often `train.on_nonfinite=rollback` may go back before the run ends."""
    on_gradients: str | None = None
    """`package.module:callable`, called with the gradients of each step before clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the run."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up; wsd: constant, then linear at the end."""
    decay_steps: int | None = None
    """wsd: steps of the linear end; null: a fifth of the run."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    warmup_ratio: float | None = None
    """The warm-up as a share of the run, instead of `warmup_steps`."""
    min_lr_ratio: float = 0.1
    """Learning rate at the last step, as a share of `optim.lr`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What differs for some parameters."""

    match: str
    """A glob on parameter names."""
    lr_scale: float | None = None
    """Their learning rate, as a multiple of `optim.lr`."""
    weight_decay: float | None = None
    """Their weight decay, whatever their shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """The optimizer."""

    name: str = "adamw"
    """adamw, sgd, lion, muon (for the matrices of layers; AdamW for the rest), adafactor, or
    `package.module:Class`, which is called with parameter groups, `lr` and `args`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of an optimizer of your own."""
    rules: list[Rule] = field(default_factory=list)
    """For some parameters: `[{match: "embed*", lr_scale: 0.1, weight_decay: 0.0}]`; of several
    that match, later ones win."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """The two decay rates of AdamW and Lion."""
    momentum: float | None = None
    """Momentum of sgd and muon; null: the first of `betas` for sgd, the second for muon."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors and scalars (norms, biases) have none."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Which parameters do not train."""

    patterns: list[str] = field(default_factory=list)
    """Globs on parameter names: `["embed*", "blocks.0.*"]`."""
    except_: list[str] = field(default_factory=list)
    """Globs of parameters that train nevertheless (written `except`)."""
    unfreeze: dict[int, list[str]] = field(default_factory=dict)
    """`{STEP: [globs]}`: parameters that start to train at a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Gradient accumulation, which colotrain alone owns."""

    steps: int | Literal["auto"] = "auto"
    """Micro-batches per rank and step; auto: from the other three sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """What happens when something dies."""

    max_restarts: int = 3
    """Restarts of the workers before the run fails; 0: none."""
    min_nodes: int | None = None
    """Fewest machines the run goes on with; null: `cluster.nodes`."""
    max_nodes: int | None = None
    """Most machines the run takes; null: `cluster.nodes`."""
    hang_timeout_s: float = 600.0
    """Seconds without a sign of life from a rank after which the run is restarted; before the end
    of the first step at least 600 (1800 with `train.compile`)."""
    grace_s: float = 300.0
    """Seconds from the wish to stop until the run is ended, saved or not."""
    check_every: int | None = 100
    """Steps between searches for silent data corruption; 0 or null turns them off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The checkpoint of the best evaluation, which is kept beside the newest."""

    metric: str | None = None
    """`validation_loss`, or the name of a metric that the model returns; null: none is kept."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Saved states of the run."""

    every: int | str | None = "auto"
    """Steps between checkpoints, or epochs as in `1ep`; auto: by time (`minutes`); null: only when
    the run is asked to stop and at its end; 0: none at all."""
    minutes: float = 10.0
    """Between checkpoints by time."""
    keep: int = 2
    """How many are kept; the last good one always is."""
    best: Best = field(default_factory=Best)
    """The checkpoint of the best evaluation."""
    async_: bool = True
    """Train on while the state is written (written `async`); may take the memory of a copy."""
    resume: str = "auto"
    """auto (go on from this run's newest checkpoint), none, or a run or checkpoint folder."""
    content: Literal["all", "trained"] = "all"
    """trained: without parameters that never trained, as under adapters; to resume or export such a
    checkpoint the model that the run began with must still be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """What is recorded."""

    log_every: int | Literal["auto"] | None = "auto"
    """Steps between lines of progress where there is no terminal; auto: a line every 10 to 60
    seconds; 0 or null turns them off."""
    grads_every: int | None = 10
    """Steps between gradient records; 0 or null turns them off."""
    trackers: list[str] = field(default_factory=list)
    """Where else records go: `tensorboard`, `wandb` (offline); each is an extra to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration."""

    name: str | None = None
    """Name of the run and of its folder under ./runs; by default from recipe, plugin and time."""
    recipe: str | None = None
    """Name of a recipe: ./recipes/NAME.yaml, or one of those shipped."""
    plugin: Plugin = field(default_factory=Plugin)
    """The sharding strategy."""
    model: Model = field(default_factory=Model)
    """The model."""
    data: Data = field(default_factory=Data)
    """The data."""
    train: Train = field(default_factory=Train)
    """Training settings."""
    optim: Optim = field(default_factory=Optim)
    """The optimizer."""
    freeze: Freeze = field(default_factory=Freeze)
    """Which parameters do not train."""
    adapter: Adapter = field(default_factory=Adapter)
    """Low-rank adapters."""
    accumulate: Accumulate = field(default_factory=Accumulate)
    """Gradient accumulation."""
    cluster: Cluster = field(default_factory=Cluster)
    """Where the run happens."""
    hardware: Hardware = field(default_factory=Hardware)
    """What is planned for, where it is not this machine."""
    elastic: Elastic = field(default_factory=Elastic)
    """What happens when something dies."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Saved states."""
    observe: Observe = field(default_factory=Observe)
    """What is recorded."""
