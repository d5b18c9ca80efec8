"""Schema of the settings; the strings under its fields become docs/configuration.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from colotrain.config.schema_cluster import Cluster, Hardware
from colotrain.config.schema_data import Data
from colotrain.config.schema_observe import Observe, Profile
from colotrain.config.sizes import Size
from colotrain.spec.elastic import Recovery
from colotrain.spec.plan import Freeze, Recompute, RulePlan, StopEarly
from colotrain.spec.precisions import PrecisionName


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """gemini: what a rank may use of each tier. `auto` is nine tenths of what is free."""

    device: Size = "auto"
    """Device memory; on CPU, the host's memory."""
    host: Size = "auto"
    """Host memory, including everything else in the process."""
    disk: Size = "auto"
    """Space under `plugin.disk_path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """The sharding strategy."""

    name: str = "auto"
    """zero1, zero2, zero3, fsdp-hybrid, gemini, or auto: the fastest that fits, and gemini where no
    other does."""
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of single modules: `{"blocks.0-3": {reshard: false}}`."""
    reshard: bool | None = None
    """Free whole parameters after use (true) or keep them through the step (false)."""
    shard_size: int | None = None
    """fsdp-hybrid: ranks that share one copy of the model; by default the ranks of a node."""
    chunk_size: Size = "auto"
    """gemini: bytes per group: small modules are packed and large ones split; auto: by search."""
    budget: Budget = field(default_factory=Budget)
    """gemini: what a rank may use of each tier."""
    disk_path: str | None = "auto"
    """gemini: folder of the disk tier, on a local disk; auto: in the run's own folder if memory
    might not suffice; none: no disk tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Axes of the mesh of ranks beside the plugin's."""

    pp: int = 1
    """Pipeline parallelism: stages that each hold some consecutive blocks of the model, for models
    that no plugin's shards make small enough, or ranks with slow links between them."""
    pp_schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Order in which stages run micro-batches, 1f1b or interleaved: under the latter each has
    several chunks of blocks, waits less, and passes on more."""
    pp_chunks: int | None = None
    """interleaved: chunks of consecutive blocks that each stage has; by default 2."""
    pp_split: list[int] = field(default_factory=list)
    """Number of blocks of each stage, or of each of the `mesh.pp` × `mesh.pp_chunks` chunks, which
    stages take in turn; empty: stages that take about as long."""
    cp: int = 1
    """Context parallelism: ranks that divide each sample's tokens among themselves, for samples too
    long for one rank's memory. Model states are sharded over them, too."""
    tp: int = 1
    """Tensor parallelism: ranks of a host that divide every layer's matrices among themselves, for
    layers too large for one rank."""
    tp_plan: dict[str, str] = field(default_factory=dict)
    """Glob on modules → colwise, rowwise, colwise_gather_output, rowwise_split_input or
    replicated_with_grad_allreduce: how `mesh.tp` divides a model of yours."""
    sequence_parallel: bool = False
    """With `mesh.tp` above 1, its ranks divide norms and the residual stream by tokens as well, so
    that each holds less of the activations. Without it, it changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model."""

    target: str | None = None
    """`package.module:callable` that returns an nn.Module."""
    hf: str | None = None
    """A Hugging Face model directory (config.json and safetensors); the extra `hf` reads it."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the callable; with `hf`, changes of its config.json, and `dtype`."""
    deferred_init: bool = False
    """For a model too large for every rank's host: make it without values, shard it, and have its
    method `init_weights()` set every parameter. False: it begins as `target` returns it."""
    tokens: list[str] = field(default_factory=list)
    """Special tokens to add to the tokenizer. With `hf`, embedding and head get rows for those that
    have none: the mean of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Small trainable matrices beside the weights of linear layers; all others are frozen."""

    name: Literal["lora"] | None = None
    """lora: low-rank adapters; null: none."""
    rank: int | None = None
    """Rank of the matrices; 8 unless `path` has another."""
    alpha: float | None = None
    """The matrices' product is multiplied by alpha / rank; 16 unless `path` has another."""
    targets: list[str] = field(default_factory=list)
    """Globs on the names of linear layers or the last part of the names: `["*attn*", "q_proj"]`."""
    dropout: float | None = None
    """Dropout on the adapters' inputs; 0 unless `path` has another."""
    path: str | None = None
    """Directory in PEFT's format to start from; its rank, alpha, layers and dropout are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO:
    """Direct preference optimization."""

    beta: float = 0.1
    """How much the model is held to its reference; lower values allow more change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """Masked language modelling."""

    probability: float = 0.15
    """Share of the tokens, special ones left out, that the model is to find. Of these 80 % are
    replaced by the tokenizer's mask token and 10 % by random tokens; 10 % stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill:
    """Knowledge distillation."""

    teacher: str | None = None
    """A Hugging Face directory of a causal model with the vocabulary of the one that trains."""
    top_k: int = 64
    """Most probable tokens of each target whose probabilities are kept; the others have one
    together."""
    alpha: float = 0.5
    """Weight of the teacher in the loss; that of the labels is the rest to 1."""
    temperature: float = 1.0
    """Divides the logits of both models in the teacher's part of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """The training settings."""

    max_steps: int | None = None
    """Optimizer steps of the whole run; null: the steps of `epochs`, or 100."""
    epochs: float | None = None
    """Passes over the training data, instead of `max_steps`."""
    last_batch: Literal["fill", "drop"] = "fill"
    """What becomes of an epoch's last samples that do not fill a global batch: a step fills it with
    samples of the next epoch, or they are left out of this epoch."""
    global_batch: int | None = None
    """Samples per step over all ranks."""
    micro_batch: int | Literal["auto"] | None = None
    """Samples that one rank feeds forward at once; auto: the fastest that fits by the plan, while
    accumulation keeps the global batch; null: from the other three sizes."""
    seed: int = 0
    """Seed of initial weights, sample order and dropout."""
    precision: PrecisionName = "fp32"
    """Compute precision; weights and optimizer state stay in the model's own precision."""
    tf32: bool = False
    """On CUDA: let fp32 matrix products and convolutions round their inputs to TensorFloat-32 (10
    bits instead of 23), which is several times as fast."""
    grad_clip: float | None = 1.0
    """Maximum global gradient norm, by clipping; null turns it off."""
    activation_checkpointing: Recompute | Literal["auto"] = "none"
    """Recompute activations per block in backward (always non-reentrant): all of them (full), or
    all but the outputs of matrix products, convolutions and attention (selective); auto: the
    fastest that fits by the plan."""
    compile: bool = False
    """Compile each block with torch.compile."""
    eval_every: int | str | None = None
    """Steps between evaluations, or epochs as in `0.5ep`; 0 or null: only before the first step and
    after the last one. The evaluation before the first step is left out if it is predicted to take
    five minutes."""
    eval_steps: int | Literal["all"] = 8
    """Global batches per evaluation, at most one pass over the validation samples; all: exactly one
    pass; 0: no evaluations at all."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What a loss or gradient that is not finite does: end the run, skip the step, or go back to
    the last checkpoint and skip the batches since then."""
    max_rollbacks: int = 3
    """How often `train.on_nonfinite=rollback` may go back before the run ends."""
    objective: Literal["dpo", "masked", "distill"] | None = None
    """dpo: preference pairs (`prompt`, `chosen`, `rejected`) against the model as the run begins;
    masked: hidden tokens of text, for BERT and its like; distill: labels and a teacher's
    probabilities; null: the loss of the model, or `train.loss`."""
    dpo: DPO = field(default_factory=DPO)
    """Settings of `train.objective=dpo`."""
    masking: Masking = field(default_factory=Masking)
    """Settings of `train.objective=masked`."""
    distill: Distill = field(default_factory=Distill)
    """Settings of `train.objective=distill`."""
    loss: str | None = None
    """`package.module:callable` of (batch, outputs) that returns (sum, count), or a mean over the
    targets; null: the model's forward has the loss."""
    metrics: str | None = None
    """`package.module:callable` of (batch, outputs), called in evaluations, that returns a dict of
    numbers: each a (sum, count), or a mean over the targets."""
    stop_early: StopEarly = field(default_factory=StopEarly)
    """The end of a run whose evaluations no longer improve."""
    on_gradients: str | None = None
    """`package.module:callable` of (model, number of steps before this one), called with the
    gradients of each step before clipping."""
    profile: Profile = field(default_factory=Profile)
    """Traces of a few steps by torch's profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the run."""

    name: str = "cosine"
    """Shape after the warm-up: cosine, linear, constant, wsd (constant, then linear at the end), or
    `package.module:callable` of (step from 0, steps of the run) that returns a factor of `optim.lr`
    and replaces the warm-up."""
    decay_steps: int | None = None
    """wsd: steps of the linear decay; null: a fifth of the run."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    warmup_ratio: float | None = None
    """Warm-up as a fraction of the run, instead of `warmup_steps`."""
    min_lr_ratio: float = 0.1
    """Learning rate at the last update, as a fraction of `optim.lr`; skipped steps make none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """The optimizer."""

    name: str = "adamw"
    """adamw, sgd, lion, muon (for the matrices of layers; AdamW for the rest), adafactor, or
    `package.module:Class`, which is called with parameter groups, `lr` and `args`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of an optimizer of your own."""
    rules: list[RulePlan] = field(default_factory=list)
    """Settings for some parameters: `[{match: "embed*", lr_scale: 0.1, weight_decay: 0.0}]`; later
    rules win if several match."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """The two decay rates of AdamW and Lion."""
    momentum: float | None = None
    """Momentum of sgd and muon; null: the first of `betas` for sgd, the second for muon."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Weight decay of matrices, decoupled but for sgd, which adds it to the gradient as torch does;
    norms and biases of any shape, vectors and scalars have none."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Gradient accumulation, which only colotrain controls."""

    steps: int | Literal["auto"] = "auto"
    """Micro-batches per rank and step; auto: from the other three sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic(Recovery):
    """Recovery from failures of ranks and nodes."""

    min_nodes: int | None = None
    """Minimum number of nodes with which the run continues; null: `cluster.nodes`."""
    max_nodes: int | None = None
    """Maximum number of nodes in the run; null: `cluster.nodes`."""
    check_every: int | None = 100
    """Steps between searches for silent data corruption; 0 or null turns them off."""
    memory_copy: Size | bool = "auto"
    """Memory of each node for two copies of its ranks' state, from which dead workers restart, and
    with several nodes for two of another node's: a size, and each step is copied, on GPUs in at
    most 1 % of the time; off; auto: if there is room, in at most 1 % of the time, not on GPUs."""


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
    """Minutes between checkpoints under `every=auto`."""
    keep: int = 2
    """Number of newest checkpoints to keep; the last good one is always kept."""
    best: Best = field(default_factory=Best)
    """The checkpoint of the best evaluation."""
    async_: bool = True
    """Train on while the state is written (written `async`); may need memory for a copy."""
    resume: str = "auto"
    """auto (continue from this run's newest checkpoint), none, or a run or checkpoint folder."""
    content: Literal["all", "trained"] = "all"
    """trained: without parameters that never trained, for example under adapters; to resume or
    export such a checkpoint, the model that the run began with must still exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration."""

    name: str | None = None
    """Name of the run and of its folder under ./runs; by default from recipe, plugin and time."""
    recipe: str | None = None
    """Name of a recipe: ./recipes/NAME.yaml, or one of those shipped."""
    runs_dir: str | None = None
    """Address of an object store, as `s3://bucket/path`, to which the run's folder under ./runs is
    copied while it trains (the extra `colotrain[store]`); null: none."""
    plugin: Plugin = field(default_factory=Plugin)
    """The sharding strategy."""
    mesh: Mesh = field(default_factory=Mesh)
    """Ranks that work on the same samples."""
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
    """Nodes and devices of the run."""
    hardware: Hardware = field(default_factory=Hardware)
    """Hardware that is planned for, if it is not this machine."""
    elastic: Elastic = field(default_factory=Elastic)
    """Recovery from failures of ranks and nodes."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Saved states."""
    observe: Observe = field(default_factory=Observe)
    """What is recorded."""
