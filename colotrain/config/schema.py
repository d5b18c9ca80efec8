"""Schema of the settings; the strings under its fields become docs/configuration.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from colotrain.config.schema_cluster import Cluster, Hardware
from colotrain.config.sizes import Size
from colotrain.records import after
from colotrain.spec.elastic import Recovery
from colotrain.spec.objectives import (
    DPO,
    KTO,
    ORPO,
    Classify,
    ClassifyTokens,
    Distill,
    Embed,
    Masking,
    Reward,
    SimPO,
)
from colotrain.spec.observing import Notify, TextSamples
from colotrain.spec.plan import Freeze, Recompute, StopEarly
from colotrain.spec.settings import (
    CommonCheckpoint,
    CommonData,
    CommonMesh,
    CommonModel,
    CommonOptim,
    CommonPart,
    CommonTrain,
)


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
class Mesh(CommonMesh):
    """Axes of the mesh of ranks beside the plugin's."""

    pp_schedule: Literal["1f1b", "interleaved"] = field(default="1f1b", metadata=after("pp"))
    """Order in which stages run micro-batches, 1f1b or interleaved: under the latter each has
    several chunks of blocks, waits less, and passes on more."""
    pp_chunks: int | None = field(default=None, metadata=after("pp_schedule"))
    """interleaved: chunks of consecutive blocks that each stage has; by default 2."""
    tp_plan: dict[str, str] = field(default_factory=dict, metadata=after("tp"))
    """Glob on modules → colwise, rowwise, colwise_gather_output, rowwise_split_input or
    replicated_with_grad_allreduce: how `mesh.tp` divides a model of yours."""
    ep_plan: list[str] = field(default_factory=list, metadata=after("ep"))
    """Globs on modules of experts that `mesh.ep` divides in a model of yours: all their parameters
    are [experts, …], and they take tokens, the indices of each token's experts and their gates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(CommonModel):
    """The model."""

    target: str | None = field(default=None, metadata=after(""))
    """`package.module:callable` that returns an nn.Module."""
    hf: str | None = field(default=None, metadata=after("target"))
    """A Hugging Face model directory (config.json and safetensors), or a name of the Hub, whose
    files are downloaded where its cache lacks them; the extra `hf` reads it."""
    revision: str | None = field(default=None, metadata=after("hf"))
    """Branch, tag or commit of the names of the Hub; null: their main branch."""
    tokens: list[str] = field(default_factory=list)
    """Special tokens to add to the tokenizer. With `hf`, embedding and head get rows for those that
    have none: the mean of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(CommonPart):
    """One part of a mixture."""

    path: str | list[str] = field(metadata=after(""))
    """Files as in `data.path`."""
    validation_path: str | list[str] | None = field(default=None, metadata=after("weight"))
    """Same as `data.validation_path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(CommonData):
    """The data: files (`path`, `mixture`), a corpus, or a dataset of your own (`target`)."""

    path: str | list[str] | None = field(default=None, metadata=after("corpus"))
    """Folder, file or glob of text, JSON, CSV, Parquet, Arrow or token files, or a Hugging Face
    dataset's folder."""
    validation_path: str | list[str] | None = field(default=None, metadata=after("path"))
    """Validation data, written as `data.path`, which then is trained on whole; null: what names of
    files say, or else a share (`validation_fraction`)."""
    mixture: list[Part] = field(default_factory=list, metadata=after("format"))
    """Several sources instead of one: `[{path: a.jsonl, weight: 3}, {path: b/, weight: 1}]`."""
    workers: int | Literal["auto"] = field(default="auto", metadata=after("on_bad"))
    """Processes that tokenize records; auto: one per core, at most 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Small trainable matrices beside the weights of linear layers; all others are frozen."""

    name: Literal["lora", "dora"] | None = None
    """lora: low-rank adapters; dora: these, and the magnitude of each output; null: none."""
    rank: int | None = None
    """Rank of the matrices; 8 unless `path` has another."""
    alpha: float | None = None
    """The matrices' product is multiplied by alpha / rank; 16 unless `path` has another."""
    rslora: bool | None = None
    """Multiply by alpha / √rank instead (rank-stabilised)."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Glob on what has an adapter → another rank: `{"*mlp*": 16}`."""
    alphas: dict[str, float] = field(default_factory=dict)
    """Glob on what has an adapter → another alpha."""
    targets: str | list[str] = field(default_factory=list)
    """Globs on the names of linear layers or the last part of the names: `["*attn*", "q_proj"]`.
    all-linear: every linear layer but the output head."""
    exclude: list[str] = field(default_factory=list)
    """Globs on linear layers that get no adapter."""
    parameters: list[str] = field(default_factory=list)
    """Globs on the names, or ends of names, of parameters outside of linear layers that get an
    adapter, such as experts in one parameter: `["experts.down_proj"]`."""
    init: Literal["pissa", "olora"] | None = None
    """Begin with a part of each weight, which is taken out of it: its largest singular values
    (pissa), or the first rows of its QR decomposition (olora); null: with B of zeros."""
    dropout: float | None = None
    """Dropout on the adapters' inputs; 0 unless `path` has another."""
    path: str | None = None
    """Directory in PEFT's format to start from; all but the dropout is as it says."""
    merge: list[str] = field(default_factory=list)
    """Directories in PEFT's format that are added to the frozen weights as the run begins, one
    after the other, such as the adapter of an earlier stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Traces of a few steps by torch's profiler."""

    steps: list[int] = field(default_factory=list)
    """First and last step that are traced, as `[10, 12]`; none: no step."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that write a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(CommonTrain):
    """The training settings."""

    max_steps: int | None = field(default=None, metadata=after(""))
    """Optimizer steps of the whole run; null: the steps of `epochs`, or 100."""
    global_batch: int | None = field(default=None, metadata=after("last_batch"))
    """Samples per step over all ranks."""
    micro_batch: int | Literal["auto"] | None = field(default=None, metadata=after("global_batch"))
    """Samples that one rank feeds forward at once; auto: the fastest that fits by the plan, while
    accumulation keeps the global batch; null: from the other three sizes."""
    activation_checkpointing: Recompute | Literal["auto"] = field(
        default="none", metadata=after("grad_clip")
    )
    """Recompute activations per block in backward (always non-reentrant): all of them (full), or
    all but the outputs of matrix products, convolutions and attention (selective); auto: the
    fastest that fits by the plan."""
    eval_every: int | str | None = field(default=None, metadata=after("compile"))
    """Steps between evaluations, or epochs as in `0.5ep`; 0 or null: only before the first step and
    after the last one. The evaluation before the first step is left out if it is predicted to take
    five minutes."""
    objective: (
        Literal[
            "dpo",
            "masked",
            "distill",
            "kto",
            "embed",
            "orpo",
            "simpo",
            "reward",
            "classify",
            "classify_tokens",
        ]
        | None
    ) = field(default=None, metadata=after("max_rollbacks"))
    """dpo: preference pairs (`prompt`, `chosen`, `rejected`) against the model as the run begins;
    masked: hidden tokens of text, for BERT and its like; distill: labels and a teacher's
    probabilities; kto: answers with a label, good or bad (`prompt`, `completion`, `label`), against
    the model as the run begins; embed: vectors of texts that belong together (`query`, `positive`);
    orpo, simpo: preference pairs without a reference; reward: a new head that scores the texts of
    preference pairs; classify: a new head that tells the classes of texts (`text`, `label`);
    classify_tokens: one that tells the classes of words (`tokens`, `labels`); null: the loss of the
    model, or `train.loss`."""
    dpo: DPO = field(default_factory=DPO, metadata=after("objective"))
    """Settings of `train.objective=dpo`."""
    masking: Masking = field(default_factory=Masking, metadata=after("dpo"))
    """Settings of `train.objective=masked`."""
    distill: Distill = field(default_factory=Distill, metadata=after("masking"))
    """Settings of `train.objective=distill`."""
    kto: KTO = field(default_factory=KTO, metadata=after("distill"))
    """Settings of `train.objective=kto`."""
    embed: Embed = field(default_factory=Embed, metadata=after("kto"))
    """Settings of `train.objective=embed`."""
    orpo: ORPO = field(default_factory=ORPO, metadata=after("embed"))
    """Settings of `train.objective=orpo`."""
    simpo: SimPO = field(default_factory=SimPO, metadata=after("orpo"))
    """Settings of `train.objective=simpo`."""
    reward: Reward = field(default_factory=Reward, metadata=after("simpo"))
    """Settings of `train.objective=reward`."""
    classify: Classify = field(default_factory=Classify, metadata=after("reward"))
    """Settings of `train.objective=classify`."""
    classify_tokens: ClassifyTokens = field(
        default_factory=ClassifyTokens, metadata=after("classify")
    )
    """Settings of `train.objective=classify_tokens`."""
    loss: str | None = field(default=None, metadata=after("classify_tokens"))
    """`package.module:callable` of (batch, outputs) that returns (sum, count), or a mean over the
    targets; null: the model's forward has the loss."""
    stop_early: StopEarly = field(default_factory=StopEarly, metadata=after("metrics"))
    """The end of a run whose evaluations no longer improve."""
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
class Optim(CommonOptim):
    """The optimizer."""

    momentum: float | None = field(default=None, metadata=after("betas"))
    """Momentum of sgd and muon; null: the first of `betas` for sgd, the second for muon."""
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
class Checkpoint(CommonCheckpoint):
    """Saved states of the run."""

    every: int | str | None = field(default="auto", metadata=after(""))
    """Steps between checkpoints, or epochs as in `1ep`; auto: by time (`minutes`); null: only when
    the run is asked to stop and at its end; 0: none at all."""
    minutes: float = field(default=10.0, metadata=after("every"))
    """Minutes between checkpoints under `every=auto`."""
    best: Best = field(default_factory=Best, metadata=after("keep"))
    """The checkpoint of the best evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """What is recorded."""

    log_every: int | Literal["auto"] | None = "auto"
    """Steps between progress lines without a terminal; auto: a line every 10 to 60 seconds; 0 or
    null turns them off."""
    grads_every: int | None = 10
    """Steps between gradient records; 0 or null turns them off."""
    samples: TextSamples = field(default_factory=TextSamples)
    """Texts that the model writes after evaluations."""
    notify: Notify = field(default_factory=Notify)
    """A command or a webhook that is told what becomes of the run."""
    metrics_port: int | None = None
    """Port on the loopback address at which the launcher answers Prometheus; null: none."""
    trackers: list[str] = field(default_factory=list)
    """Other destinations of records: `tensorboard`, `wandb` (offline unless WANDB_MODE=online),
    `mlflow`, each an extra to install."""


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
