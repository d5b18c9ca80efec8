"""The run plan: the fully resolved, validated, immutable description of a run (`plan.json`).

All that a worker knows of the run's settings is in this file. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from colotrain.errors import ColotrainError, ConfigError, UsageError
from colotrain.records import after, from_json, from_plain, to_plain
from colotrain.spec.axes import MeshPlan, Ranks
from colotrain.spec.elastic import ElasticPlan
from colotrain.spec.memory import MemoryBreakdown, PeakRange
from colotrain.spec.objectives import IGNORE_INDEX, Head, MaskedPlan, ObjectivePlan, RelatedPlan
from colotrain.spec.observing import ObservePlan, ProfilePlan
from colotrain.spec.offload import Budget
from colotrain.spec.optimizers import optimizer_of
from colotrain.spec.plugins import Gradients, ParametersLive
from colotrain.spec.settings import (
    CommonCheckpoint,
    CommonData,
    CommonModel,
    CommonOptim,
    CommonPart,
    CommonTrain,
)

SCHEMA = 1
READ_BACK = "smoke: step 1 is saved, and new ranks resume from its checkpoint"
"""Reason shown when the ranks of a smoke run stop after their first step."""

Recompute = Literal["none", "selective", "full"]
"""Activations that backward recomputes: none, the cheap ones of each block, or all."""
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
"""The modes of recomputation, from the most memory to the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginPlan:
    """The plugin's settings, all resolved."""

    name: str
    reason: str
    parameters_live: ParametersLive
    gradients: Gradients
    mesh: tuple[int, ...]
    """Sizes of the device mesh's axes: (dp_shard,) or (dp_replicate, dp_shard).

    Their product is the number of ranks, or of tensor-parallel groups of ranks.
    """
    chunk_bytes: int | None = None
    """gemini: bytes per group that modules are packed into."""
    split_blocks: bool = False
    """gemini: whether blocks larger than `chunk_bytes` are split into their modules."""
    reshard_overrides: dict[str, bool] = field(default_factory=dict)
    """Module glob → whether its group is freed after use."""
    budget: Budget | None = None
    """gemini: bytes per tier and rank; None keeps everything on the device."""

    @property
    def is_hybrid(self) -> bool:
        """Whether the mesh has a `dp_replicate` axis."""
        return len(self.mesh) > 1

    def arrange(self, mesh: MeshPlan, *, world: int) -> Ranks:
        """Return the arrangement of `world` ranks, in this plugin's axes and the others."""
        return Ranks.of(mesh, world=world, shard=self.dp_shard if self.is_hybrid else None)

    @property
    def dp_shard(self) -> int:
        """Ranks that divide each parameter among themselves."""
        return self.mesh[-1]

    @property
    def dp_replicate(self) -> int:
        """Groups of such ranks; each holds all parameters."""
        return self.mesh[0] if self.is_hybrid else 1


ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer but the output head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """Small trainable matrices beside the frozen weights of linear layers.

    Without `path`, names of layers are globs on the whole name or the last part of it. With it,
    `targets` are whole names, and the other names are what PEFT writes.
    """

    name: Literal["lora", "dora"] = "lora"
    rank: int
    alpha: float
    """The adapter's product is multiplied by alpha / rank, or alpha / √rank."""
    rslora: bool = False
    """Whether the root of the rank divides (Kalajdzievski 2023)."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Name → the rank where it is another one."""
    alphas: dict[str, float] = field(default_factory=dict)
    """Name → alpha where it is another one."""
    targets: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    """Names of parameters that have an adapter of their own, or the ends of their names."""
    init: Literal["pissa", "olora"] | None = None
    """The part of each weight that the adapter began with, and that was taken out of it."""
    dropout: float = 0.0
    path: str | None = None
    """Directory in PEFT's format with the adapters' initial values."""
    modules: tuple[str, ...] = ()
    """Modules that train whole, from the values in `path`."""
    merge: tuple[AdapterPlan, ...] = ()
    """Adapters that are added to the weights as a run begins, one after the other."""

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a key of `ranks` or `alphas`, or a glob on layers, is of the layer `name`."""
        if self.path is not None:  # PEFT's rule
            return re.match(rf"(.*\.)?({pattern})$", name) is not None
        return any(fnmatchcase(n, pattern) for n in (name, name.rpartition(".")[2]))

    def matches_parameter(self, pattern: str, name: str) -> bool:
        if self.path is not None:
            return f".{name}".endswith(f".{pattern}")
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")

    def targets_layer(self, name: str) -> bool:
        if self.path is not None:
            return name in self.targets
        return any(self.matches(glob, name) for glob in self.targets)

    def excludes(self, name: str) -> bool:
        return any(self.matches(glob, name) for glob in self.exclude)

    def adapts(self, name: str) -> bool:
        """Whether the parameter `name` has an adapter of its own."""
        return any(self.matches_parameter(pattern, name) for pattern in self.parameters)

    def rank_of(self, name: str) -> int:
        return next((n for key, n in self.ranks.items() if self.matches(key, name)), self.rank)

    def alpha_of(self, name: str) -> float:
        return next((a for key, a in self.alphas.items() if self.matches(key, name)), self.alpha)

    def scale_of(self, name: str) -> float:
        """Factor of the product of the matrices of the adapter of `name`."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (math.sqrt(rank) if self.rslora else rank)


OWN_MODELS = frozenset({"colotrain.models.llm:LLM"})
"""Models of this package, which any plan may name, with any arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan(CommonModel):
    """The section, and what else there is to the model."""

    target: str = field(metadata=after(""))
    """`package.module:callable` that makes the model; empty for a Hugging Face directory."""
    hf: str | None = field(default=None, metadata=after("args"))
    """A Hugging Face model directory."""
    adapter: AdapterPlan | None = None
    loss: str | None = None
    """`package.module:callable` of a batch and the model's outputs; None: forward has the loss."""
    objective: ObjectivePlan | None = None
    """What colotrain computes the loss of; None: the model's forward has it, or `loss`."""
    tp_plan: dict[str, str] = field(default_factory=dict)
    """Glob on modules → how ranks divide them; empty for models that say so themselves."""
    ep_plan: list[str] = field(default_factory=list)
    """Globs on modules of experts; empty where they are found."""

    @property
    def head(self) -> Head | None:
        """The new head that the objective gives the model; None: it keeps its own."""
        return None if self.objective is None else self.objective.head

    @property
    def key(self) -> str:
        """Configuration key that names the model."""
        return "model.hf" if self.hf else "model.target"

    @property
    def value(self) -> str:
        return self.hf or self.target

    @property
    def is_shipped(self) -> bool:
        """Whether it is one of colotrain's own models, with no code and no file of the user's.

        All of its blocks are groups: no trial finds anything else.
        """
        return self.target in OWN_MODELS and not (self.loss or self.objective or self.adapter)

    @property
    def is_deferred(self) -> bool:
        """Whether parameters get their values after sharding; others are made as plain torch does.

        This holds for model directories, colotrain's own models, and where `deferred_init` says so.
        """
        return bool(self.hf) or self.deferred_init or self.target in OWN_MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan(CommonPart):
    """A part of a mixture, with the paths of its files."""

    paths: tuple[str, ...]
    validation_paths: tuple[str, ...] = ()


OF_SAMPLES = (
    *("target", "args", "collate"),
    *("seq_len", "pairs", "rated", "related", "masked", "classes", "isolate", "marks_padding"),
    *("images", "classes_of_words", "margins"),
)
"""Settings under `data` that samples' shapes depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan(CommonData):
    """The section, with its source."""

    source: Literal["corpus", "path", "target", "mixture"]
    paths: tuple[str, ...] = ()
    validation_paths: tuple[str, ...] = ()
    """Files of validation data alone; none: names decide, or `validation_fraction`."""
    mixture: tuple[PartPlan, ...] = ()
    tokens: tuple[str, ...] = ()
    """Special tokens that are added to the tokenizer."""
    pairs: bool = False
    """Whether each sample is a preference pair: a chosen answer and a rejected one."""
    margins: bool | None = None
    """Whether each pair has a margin, a number; None: the objective has none."""
    rated: bool = False
    """Whether each sample is an answer that is good or bad, and another record's answer to its
    prompt."""
    related: RelatedPlan | None = None
    """Texts of a sample, of which the model makes vectors; None: other samples."""
    classes: tuple[str, ...] = ()
    """Names of the classes of texts, by their numbers; none: samples have no class."""
    classes_of_words: bool = False
    """Whether each word of a text has one of the classes, instead of the text."""
    classes_numbered: bool = False
    """Whether labels may be numbers of classes: their order is the user's, the model's or the
    files', not that of the alphabet."""
    masked: MaskedPlan | None = None
    """Tokens that are hidden, for masked language modelling; None: labels are the next tokens."""
    marks_padding: bool = False
    """Whether samples with padding say where it is: the model's loss would count it otherwise."""
    workers: int = 0
    """Processes that tokenise; 0: one per core."""

    @property
    def rows(self) -> tuple[str, ...]:
        """Return what the rows of tokens of a sample are; a sample that is one row has no name."""
        if self.pairs:
            return "chosen answer", "rejected answer"
        if self.related is not None:
            return self.related.columns
        return ("answer", "answer of another record") if self.rated else ()

    @property
    def num_trained_rows(self) -> int:
        """Rows of a sample through which gradients flow; another record's answer has none."""
        return 1 if self.rated or self.classes else len(self.rows)

    @property
    def counts_samples(self) -> bool:
        """Return whether a step counts samples, which are texts by themselves, and no tokens."""
        return bool(self.rows or (self.classes and not self.classes_of_words))

    def of_samples(self) -> dict[str, Any]:
        """Return the settings that samples' shapes depend on."""
        return {name: value for name, value in to_plain(self).items() if name in OF_SAMPLES}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """global_batch = micro_batch × accumulation_steps × data_parallel, always.

    data_parallel is the number of ranks, or of groups of ranks that work on the same samples.
    """

    global_batch: int
    micro_batch: int
    accumulation_steps: int
    data_parallel: int
    owner: Literal["colotrain"] = "colotrain"
    tokens_per_step: int = 0
    reason: str = ""
    """Why the micro-batch and recomputation are these, where `auto` asked for them."""

    @property
    def share(self) -> int:
        """Samples of a step that each of the `data_parallel` has."""
        return self.global_batch // self.data_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class StopEarly:
    """The end of a run whose evaluations no longer improve."""

    metric: str | None = None
    """`validation_loss`, or the name of a metric; null: the run makes all of its steps."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher values are better."""
    patience: int = 3
    """Evaluations in a row without an improvement after which the run ends."""
    min_delta: float = 0.0
    """An improvement is a change by more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan(CommonTrain):
    """The section, with its lengths in steps."""

    max_steps: int
    activation_checkpointing: Recompute
    eval_every: float
    """Steps between evaluations; 0: evaluate only before the first and after the last step."""
    eval_first: bool = True
    stop_early: StopEarly | None = None
    epoch_steps: float = 0.0
    """Steps per epoch; 0: not computed, because no setting is in epochs."""
    num_validation: int | None = None
    """Number of validation samples; None: not counted, or the data was not prepared."""
    profile: ProfilePlan | None = None
    ignore_index: int | None = IGNORE_INDEX
    """Label that the loss leaves out, where trial forwards have found it; None: all count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimPlan(CommonOptim):
    """The section, with its momentum among `betas` and its schedule in steps."""

    schedule: str
    """cosine, linear, constant, wsd, or `package.module:callable` of (step, total)."""
    warmup_steps: int
    final_ratio: float
    decay_steps: int | None = None
    """wsd: steps of the final decay; None: a fifth of the run."""

    def num_decay_steps(self, max_steps: int) -> int:
        """wsd: steps of the final decay in a run of `max_steps`."""
        return min(self.decay_steps or max(max_steps // 5, 1), max_steps)

    def state_bytes_per_row(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes of state for each row of a parameter of this whole shape, step count excluded."""
        known = optimizer_of(self.name)
        if known.momentum_is_optional and not (self.betas and self.betas[0]):
            return 0
        kept = math.prod(shape[1:]) * itemsize if self.compensates(itemsize) else 0
        return known.bytes_per_row(shape, itemsize) + kept

    def compensates(self, itemsize: int) -> bool:
        """Whether what rounding takes off a parameter of so many bytes per element is state."""
        return self.rounding == "kahan" and itemsize == 2


def matches(names: Iterable[str], globs: Iterable[str]) -> bool:
    """Whether one of the globs names a parameter, known by these names."""
    return any(fnmatchcase(name, glob) for name in names for glob in globs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Which parameters do not train."""

    patterns: tuple[str, ...] = ()
    """Globs on parameter names: `["embed*", "blocks.0.*"]`."""
    except_: tuple[str, ...] = ()
    """Globs of exceptions: parameters that still train (written `except`)."""
    unfreeze: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """`{STEPS: [globs]}`: parameters that start to train after so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezePlan(Freeze):
    """The section, and what its patterns match."""

    matched: dict[str, int] = field(default_factory=dict)
    """Pattern → number of parameters whose names match it."""

    @property
    def scheduled(self) -> tuple[str, ...]:
        """The patterns that `unfreeze` names at any step."""
        return tuple(glob for globs in self.unfreeze.values() for glob in globs)

    def unfreezes(self, names: Iterable[str]) -> bool:
        """Whether `unfreeze` names a parameter, known by these names, at any step."""
        return matches(names, self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    nodes: int
    procs_per_node: int
    device: str
    threads_per_rank: int
    memory_bytes: int
    """Bytes of memory that one rank may use."""
    threads_set_by: str = ""
    """Environment variable that set `threads_per_rank`; empty: cores were divided among ranks."""

    @property
    def chosen_threads(self) -> str:
        """`, 4 threads each (OMP_NUM_THREADS)`; empty where cores were divided among ranks."""
        threads = f"{self.threads_per_rank} thread{'s' * (self.threads_per_rank > 1)}"
        return f", {threads} each ({self.threads_set_by})" if self.threads_set_by else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan(CommonCheckpoint):
    """The section, with the steps or the seconds between checkpoints."""

    enabled: bool
    every: float
    """Steps between checkpoints; 0: none by steps."""
    every_s: float = 0.0
    """Seconds between checkpoints; 0: none by time."""
    best_metric: str | None = None
    """Metric whose best evaluation's checkpoint is kept; None: only the newest are kept."""
    best_mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    total: int
    trainable: int
    frozen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Expected speed of a step; zeros where it is unknown."""

    step_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    """Model FLOPs utilization; 0: not known, as of samples of the user's own dataset."""
    waits: tuple[float, ...] = ()
    """Share of a step for which a rank of each pipeline stage waits for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    schema: int = SCHEMA
    name: str
    recipe: str | None
    runs_dir: str | None = None
    """Address of a store to which the run is copied, without the run's name; None: none."""
    world_size: int
    plugin: PluginPlan
    mesh: MeshPlan = field(default_factory=MeshPlan)
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
    memory: MemoryBreakdown
    peak: PeakRange = field(default_factory=PeakRange)
    memory_shape: str = ""
    """Key under which the measured peak is stored for later plans of the same shape."""
    flops_per_token: float
    """Floating-point operations of forward and backward per trained token."""
    time: Prediction = field(default_factory=Prediction)
    warnings: tuple[str, ...] = ()
    smoke: bool = False
    """Whether ranks that start from scratch save and exit after a step, which others resume."""

    @property
    def ranks(self) -> Ranks:
        """The arrangement of the ranks, in the plugin's axes and the others."""
        return self.plugin.arrange(self.mesh, world=self.world_size)

    def to_json(self) -> str:
        """Return the content of `plan.json`, the same for equal plans (1 of a float is 1.0)."""
        return json.dumps(to_plain(from_plain(RunPlan, to_plain(self))), indent=2) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of `plan.json`, by which its readers know the plan that was checked."""
        return _digest(self.to_json())

    @staticmethod
    def from_json(text: str, *, digest: str | None = None, file: object = "it") -> RunPlan:
        """Parse the run plan in `file`; raises `ColotrainError` where `text` is not one.

        `digest`: that of the plan as it was checked; `UsageError` for any other text.
        """
        if digest not in (None, _digest(text)):
            problem = f"{file}: was changed after it was checked; expected SHA-256 {digest}"
            raise UsageError(problem, "look who writes there, and start the command again")
        try:
            return from_plain(RunPlan, from_json(text))
        except (ValueError, ConfigError) as error:
            raise ColotrainError(
                f"not a run plan: {error}", "restore plan.json or start a new run"
            ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
