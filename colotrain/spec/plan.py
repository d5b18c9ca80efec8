"""The run plan: the fully resolved, validated, immutable description of a run (`plan.json`).

Workers read this file and torchrun's variables, and nothing else. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from colotrain.errors import ColotrainError, ConfigError
from colotrain.records import from_plain, to_plain
from colotrain.spec.memory import Ledger, PeakRange
from colotrain.spec.offload import Budget
from colotrain.spec.plugins import Gradients, ParametersLive

SCHEMA = 1
READ_BACK = "smoke: step 1 is saved, and new ranks resume from its checkpoint"
"""Why the ranks of a smoke run stop after their first step."""

Recompute = Literal["none", "selective", "full"]
"""What backward computes again: nothing, what is cheap in each block, or all of it."""
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
"""From the most memory to the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginPlan:
    """The plugin's row with everything decided."""

    name: str
    reason: str
    parameters_live: ParametersLive
    gradients: Gradients
    mesh: tuple[int, ...]
    """(shard,) or (replicate, shard): sizes of the device mesh."""
    chunk_bytes: int | None = None
    """gemini: modules are packed into groups of about this size."""
    split_blocks: bool = False
    """gemini: blocks larger than that are cut into their modules."""
    reshard_overrides: dict[str, bool] = field(default_factory=dict)
    """Module glob → whether its group is freed after use."""
    budget: Budget | None = None
    """gemini: bytes per tier and rank; None keeps everything on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """Small trainable matrices beside the frozen weights of linear layers."""

    name: Literal["lora"] = "lora"
    rank: int
    alpha: float
    """The adapter's product is multiplied by alpha / rank."""
    targets: tuple[str, ...]
    dropout: float = 0.0
    path: str | None = None
    """A directory in PEFT's format that the adapters start from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    target: str
    """Empty for a Hugging Face directory."""
    args: dict[str, Any] = field(default_factory=dict)
    hf: str | None = None
    """A Hugging Face model directory."""
    adapter: AdapterPlan | None = None

    @property
    def key(self) -> str:
        """The setting that names the model."""
        return "model.hf" if self.hf else "model.target"

    @property
    def value(self) -> str:
        return self.hf or self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """A part of a mixture; `weight` is relative to the other parts'."""

    paths: tuple[str, ...]
    weight: float
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    source: Literal["corpus", "path", "target", "mixture"]
    corpus: str | None = None
    paths: tuple[str, ...] = ()
    format: str = "auto"
    mixture: tuple[PartPlan, ...] = ()
    target: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    seq_len: int
    tokenizer: str
    columns: dict[str, str] = field(default_factory=dict)
    """Meaning (text, prompt, completion, messages) → the name that records have for it."""
    chat_template: str | None = None
    loss_on: Literal["answers", "last", "all"] = "answers"
    packing: Literal["auto", "stream", "whole", "none"] = "auto"
    isolate: bool = False
    on_bad: Literal["stop", "skip"] = "stop"
    workers: int = 0
    """0: one per core."""
    num_workers: int = 0
    """Processes of a rank that read micro-batches ahead; 0: it reads them itself."""
    shuffle: bool
    validation_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """global_batch = micro_batch × accumulation_steps × data_parallel, always."""

    global_batch: int
    micro_batch: int
    accumulation_steps: int
    data_parallel: int
    owner: Literal["colotrain"] = "colotrain"
    tokens_per_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    max_steps: int
    seed: int
    precision: Literal["fp32", "bf16", "fp16"]
    grad_clip: float | None
    activation_checkpointing: Recompute
    compile: bool
    eval_every: float
    """In steps; 0: only before the first and after the last step."""
    eval_steps: int
    eval_first: bool = True
    """There is an evaluation before the first step."""
    on_nonfinite: Literal["stop", "skip", "rollback"]
    max_rollbacks: int = 3
    on_gradients: str | None = None
    epochs: float | None = None
    """What `max_steps` was made from."""
    epoch_steps: float = 0.0
    """Steps of an epoch; 0: not known, for nothing was said in epochs."""
    last_batch: Literal["fill", "drop"] = "fill"


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePlan:
    """What differs for the parameters that a glob names."""

    match: str
    lr_scale: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimPlan:
    name: str
    """adamw, sgd, lion, muon, adafactor, or `package.module:Class`."""
    lr: float
    betas: tuple[float, ...]
    eps: float
    weight_decay: float
    schedule: Literal["cosine", "linear", "constant", "wsd"]
    warmup_steps: int
    final_ratio: float
    decay_steps: int | None = None
    """wsd: steps of the decay at the end; None: a fifth of the run."""
    args: dict[str, Any] = field(default_factory=dict)
    """Of an optimizer of the user's own."""
    rules: tuple[RulePlan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezePlan:
    patterns: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()
    unfreeze: dict[int, tuple[str, ...]] = field(default_factory=dict)
    matched: dict[str, int] = field(default_factory=dict)
    """Pattern → how many parameters it names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    nodes: int
    procs_per_node: int
    device: str
    threads_per_rank: int
    memory_bytes: int
    """Memory one rank may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPlan:
    max_restarts: int
    hang_timeout_s: float
    grace_s: float = 300.0
    check_every: int = 0
    """0: never."""
    min_nodes: int = 1
    max_nodes: int = 1
    """Other than `cluster.nodes`: nodes may come and go, the global batch stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    enabled: bool
    every: float
    """Steps between checkpoints; 0: not by steps."""
    keep: int
    resume: str
    every_s: float = 0.0
    """Seconds between checkpoints; 0: not by time."""
    content: Literal["all", "trained"] = "all"
    async_: bool = True
    best_metric: str | None = None
    """The checkpoint of its best evaluation is kept; None: the newest alone are."""
    best_mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservePlan:
    log_every: int | Literal["auto"]
    """auto: lines of progress by time; 0: none."""
    grads_every: int
    """0: no gradient records."""
    trackers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    total: int
    trainable: int
    frozen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How fast a step is expected to be; zeros where nothing is known."""

    step_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    schema: int = SCHEMA
    name: str
    recipe: str | None
    world_size: int
    plugin: PluginPlan
    model: ModelPlan
    data: DataPlan
    batch: BatchPlan
    train: TrainPlan
    optim: OptimPlan
    freeze: FreezePlan
    cluster: ClusterPlan
    elastic: ElasticPlan
    checkpoint: CheckpointPlan
    observe: ObservePlan
    parameters: ParameterCounts
    memory: Ledger
    peak: PeakRange = field(default_factory=PeakRange)
    """What `memory` adds up to, as a range."""
    memory_shape: str = ""
    """The name under which the measured peak is kept for later plans of the same shape."""
    flops_per_token: float
    """Forward and backward, per trained token."""
    time: Prediction = field(default_factory=Prediction)
    warnings: tuple[str, ...] = ()
    smoke: bool = False
    """Ranks that begin anew save and leave after one step; the next launch resumes from there."""

    @property
    def snapshot_bytes(self) -> int:
        """What copies for a checkpoint that is written while training goes on may take of each
        rank's memory: only where that is free, so it is no part of `memory`."""
        needed = self.checkpoint.enabled and self.checkpoint.async_
        return self.memory.parameters + self.memory.optimizer if needed else 0

    def to_json(self) -> str:
        return json.dumps(to_plain(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> RunPlan:
        """The plan that `text` holds; raises `ColotrainError` where it is not one."""
        try:
            plain = json.loads(text)
            train = plain.get("train", {}) if isinstance(plain, dict) else {}
            if isinstance(train, dict) and train.get("activation_checkpointing") == "blocks":
                train["activation_checkpointing"] = "full"  # as it was called before
            return from_plain(RunPlan, plain)
        except (ValueError, RecursionError, ConfigError) as error:
            raise ColotrainError(
                f"not a run plan: {error}", "restore plan.json or start a new run"
            ) from error

    @staticmethod
    def load(path: Path) -> RunPlan:
        try:
            return RunPlan.from_json(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ColotrainError(
                f"{path}: cannot be read ({error})", "give a run directory that has a plan.json"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """A parameter as the model declares it, before sharding."""

    name: str
    shape: tuple[int, ...]
    numel: int
    itemsize: int
    frozen_by: str | None
    """The pattern that freezes it, "requires_grad" where the model does, or None."""
    aliases: tuple[str, ...] = ()
    group: str = ""
    """The block it is gathered with; empty for the root's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a look at the model on the meta device tells the resolver."""

    parameters: tuple[ParameterInfo, ...]
    matched: dict[str, int]
    """Freeze pattern → how many parameters it names."""
    flops_per_token: float
    vocab_size: int | None = None
    num_positions: int | None = None
    """Tokens of a sample that the model was made for, where its configuration says so."""
    learned_positions: bool = False
    """It has an embedding of its positions: there are no more."""
    isolates: bool = False
    """The model takes `document_ids` and keeps documents apart."""
    built_whole: bool = False
    """It cannot be built without storage: every rank begins with the whole model."""
    uses_transformers: bool = False
    """It has modules of that library, which every rank imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is computed."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    """Read and written by everything that is neither of the two."""
    num_ops: int = 0
    num_repeated: float = 0.0
    """Of them those that backward repeats, by what repeating takes (`tracing.REPEATED`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a micro-batch between two of a group's hooks."""

    phase: Literal["forward", "backward"]
    block: str
    """The block that is being computed; empty for what lies between blocks."""
    events: tuple[int, ...]
    """n: storage n begins; -1 - n: it ends."""
    work: Work = field(default_factory=Work)
    reduced: bool = True
    """backward: gradients are complete at its end, not only at that of the whole backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A micro-batch as autograd carries it out, forward and backward, with whole parameters."""

    segments: tuple[Segment, ...]
    storages: tuple[int, ...]
    """Bytes of each storage."""
    gradients: dict[int, str]
    """Storage that becomes a parameter's gradient → block of the parameter."""
    buffer_bytes: int = 0
    """The model's own buffers."""
    input_bytes: int = 0
    """The micro-batch itself."""
