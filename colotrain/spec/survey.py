"""Facts about a model that need no training: its parameters, and a traced micro-batch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from colotrain.spec.axes import EP, MeshPlan
from colotrain.spec.divisions import Divisions
from colotrain.spec.objectives import IGNORE_INDEX

TRANSFORMERS = "transformers"
"""The library of the model or of its teacher."""
COMPILER = "torch's compiler"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """A parameter as the model declares it, before sharding."""

    name: str
    shape: tuple[int, ...]
    numel: int
    itemsize: int
    frozen_by: str | None
    """Pattern that freezes it, "requires_grad" where the model itself does, or None."""
    aliases: tuple[str, ...] = ()
    group: str = ""
    """Name of the block it is gathered with; empty for the root group."""
    dtype: str = "float32"
    is_cast: bool = True
    """Whether it is gathered in the compute dtype; whole numbers, as of packed blocks, are not."""
    divided_shape: tuple[int, ...] | None = None
    """Shape of the whole parameter where ranks divide matrices or experts; `shape` is a part's."""
    num_weights: int | None = None
    """Numbers of the model that it stands for, where it is packed; None: its own."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.divided_shape or self.shape

    @property
    def counted(self) -> int:
        """Numbers of the model that it has."""
        return self.numel if self.num_weights is None else self.num_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Facts about the model, from building it on the meta device, that the resolver uses."""

    parameters: tuple[ParameterInfo, ...]
    matched: dict[str, int]
    """Freeze pattern → number of parameters whose names match it."""
    flops_per_token: float
    vocab_size: int | None = None
    num_positions: int | None = None
    """Longest sample in tokens that the model's configuration names; None where it names none."""
    learned_positions: bool = False
    """Whether positions have an embedding, so that longer samples are impossible."""
    isolates: bool = False
    """Whether the model takes `document_ids` and keeps attention within documents."""
    chunks_loss: bool = False
    """Whether the loss is computed chunk by chunk, by colotrain alone."""
    scores_tokens: bool = False
    """Whether the loss of each token is known, not only of all together."""
    other_task: str = ""
    """What a model of transformers is for, if that is not the prediction of next tokens."""
    finds_hidden: bool = False
    """Whether it is a masked language model of transformers."""
    samples: str = ""
    """Entries of samples for that task."""
    of_images: tuple[str, ...] = ()
    """Modules of an image-text model that a text without images does not reach."""
    balances_experts: bool = False
    """Whether its loss has one for routers, which must not count padding."""
    batch_norms: tuple[str, ...] = ()
    """Modules that normalize a micro-batch as a whole, in training."""
    missing: tuple[str, ...] = ()
    """Parameters that the files of a Hugging Face directory lack."""
    remarks: tuple[str, ...] = ()
    """What people should know of how the loss is computed."""
    divides_sequences: bool = False
    """Whether several ranks can divide the tokens of a sample (`mesh.cp`)."""
    whole_sequences: str = ""
    """Why they cannot, of a model of transformers."""
    divisions: Divisions | None = None
    """How ranks can divide its matrices (`mesh.tp`); None where they cannot."""
    experts: Divisions = field(default_factory=lambda: Divisions(axis=EP))
    """How ranks can divide its experts (`mesh.ep`)."""
    built_whole: bool = False
    """Whether the model cannot be built without storage, so that every rank holds it whole."""
    libraries: tuple[str, ...] = ()
    """What every rank imports beside torch: `TRANSFORMERS`, `COMPILER`."""

    def divided(self, mesh: MeshPlan) -> Survey:
        """The model with the parameters that one rank with parts of matrices, or experts, holds."""
        parameters = self.parameters
        for ranks, how in ((mesh.tp, self.divisions), (mesh.ep, self.experts)):
            if ranks > 1 and how is not None:
                parameters = tuple(_part_of(p, how, ranks) for p in parameters)
        return dataclasses.replace(self, parameters=parameters)


def _part_of(parameter: ParameterInfo, how: Divisions, ranks: int) -> ParameterInfo:
    shape = how.part_of(parameter.name, parameter.shape, ranks)
    if shape == parameter.shape:
        return parameter
    whole, numel, packed = parameter.whole_shape, math.prod(shape), parameter.num_weights
    return dataclasses.replace(
        parameter,
        shape=shape,
        numel=numel,
        divided_shape=whole,
        num_weights=None if packed is None else packed // ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChecks:
    """What a small copy of a model, divided over mesh axes, computes beside the whole copy.

    Each is what differs, by the name of the module or parameter; "" for nothing.
    """

    matrices: str = ""
    """Of ranks that divide matrices (`mesh.tp`)."""
    tokens: str = ""
    """Of those that divide tokens between them, too (`mesh.sequence_parallel`)."""
    sequences: str = ""
    """Of ranks that divide samples (`mesh.cp`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStudy:
    """What forwards in one process found of a loss (`engine.step.loss_trial`)."""

    ignore_index: int | None = IGNORE_INDEX
    """Label that does not count; None: all labels count."""
    notes: tuple[str, ...] = ()
    """What people should know of it."""
    problem: dict[str, Any] = field(default_factory=dict)
    """Fields of the `errors.Problem` for which the loss must not be trained; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Amount of computation in a part of a micro-batch."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    """Bytes read and written by operations other than matmuls and attention."""
    num_ops: int = 0
    num_repeated: float = 0.0
    """Operations that backward repeats, each weighted by its cost (`tracing.REPEATED`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a micro-batch between two of a group's hooks."""

    phase: Literal["forward", "backward"]
    block: str
    """Name of the block that is computed; empty between blocks."""
    events: tuple[int, ...]
    """Storages in the order they are allocated (n) and freed (-1 - n)."""
    work: Work = field(default_factory=Work)
    reduced: bool = True
    """backward: whether the block's gradients are complete at the end of the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Collectives of one micro-batch between ranks that work on the same samples."""

    ranks: int = 1
    calls: int = 0
    whole_bytes: int = 0
    """Bytes of all that is gathered or summed, such as keys and values of whole samples."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends, with ring algorithms."""
        return self.whole_bytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, slots=True)
class Ungrouped:
    """Blocks that cannot be groups, so that their parameters are the root group's."""

    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Forward and backward of a micro-batch, as traced with unsharded parameters."""

    segments: tuple[Segment, ...]
    storages: tuple[int, ...]
    """Bytes of each storage, by index."""
    gradients: dict[int, str]
    """Index of a storage that becomes a parameter's gradient → the parameter's block."""
    buffer_bytes: int = 0
    """Bytes of the model's buffers."""
    input_bytes: int = 0
    """Bytes of the micro-batch itself."""
    exchanges: tuple[Exchange, ...] = ()
    """What ranks that divide samples' tokens exchange, and those that divide matrices."""
    ungrouped: tuple[str, ...] = ()
    """The blocks of `Ungrouped`."""
    passes_before: int = 0
    """Forwards without gradients of each micro-batch before those of a step."""
    row_bytes: float = 0.0
    """Bytes of what each sample's loss needs to know of one sample of the global batch."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that forward leaves for backward."""
        alive: set[int] = set()
        for segment in self.segments:
            for event in segment.events if segment.phase == "forward" else ():
                if event >= 0:
                    alive.add(event)
                else:
                    alive.discard(-1 - event)
        return sum(self.storages[number] for number in alive)
