"""Properties of a plan that its memory and time depend on. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from colotrain.spec.cpu_memory import NUM_SLOTS
from colotrain.spec.installed_torch import torch_has_cuda
from colotrain.spec.optimizers import optimizer_of
from colotrain.spec.pipeline_schedule import in_flight, slots_around
from colotrain.spec.plan import BatchPlan, OptimPlan, PluginPlan
from colotrain.spec.plugins import Gradients, ParametersLive
from colotrain.spec.survey import COMPILER, TRANSFORMERS

CPU_BASELINE_BYTES = 257 << 20
"""Memory of a worker with torch 2.13 for CPU: 240 to 248 MiB when the model is built, without the
model, and 8 to 15 MiB of library pages first touched in training."""
CUDA_BUILD_BYTES = 158 << 20
"""Memory added by the libraries of a CUDA build of torch where there is no GPU (2.11.0+cu130)."""
LIBRARY_BYTES = {TRANSFORMERS: 55 << 20, COMPILER: 100 << 20}
"""Memory added to a rank on the CPU by a library: transformers with the code of one model, the
compiler with what it takes while it compiles (torch 2.13: 74 MiB once imported)."""
CUDA_BASELINE_BYTES = 800 << 20
"""Memory of a CUDA context, about 0.5 GiB, and NCCL's channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything about a plan, but the model, that a rank's memory and time depend on."""

    parameters_live: ParametersLive
    gradients: Gradients
    shard: int
    """Number of ranks that a copy of the model is sharded over."""
    replicas: int = 1
    owners: int = 1
    """Ranks that divide each matrix, into shards and parts of its inputs or outputs."""
    expert_ranks: int = 1
    """Ranks that divide experts, and sum the gradients of all other parameters once a step."""
    accumulation_steps: int = 1
    micro_batch: int = 1
    precision: str = "fp32"
    optim: OptimPlan
    device: str = "cpu"
    shared_memory: bool = False
    """Whether the ranks of a shard group exchange through shared memory (CPU, one host)."""
    uses_shards: bool = False
    """Whether a rank computes with its shards where their dtype allows it, because they are whole
    and stay where they are (`engine.sharding.shared_parameters`)."""
    chunk_bytes: int | None = None
    split_blocks: bool = False
    reshard_overrides: dict[str, bool] = field(default_factory=dict)
    records_gradients: bool = False
    """Whether gradient statistics are recorded, which copies the gradients' shards."""
    stages: int = 1
    """Pipeline stages of the model."""
    stage: int = 0
    """The stage of this rank."""
    stage_chunks: int = 1
    """Chunks of consecutive blocks that each stage has."""
    activation_bytes: int = 0
    """Bytes of a sample's activations, which each stage passes on to the next."""
    gradients_sent: int = 0
    """Chunks of this stage that send gradients back, because something before them trains."""
    links_stages: bool = False
    """Whether a rank has shared memory with those of neighbouring stages (CPU, one host)."""
    baseline: int = 0

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations a stage keeps at a time."""
        return in_flight(
            self.stage,
            stages=self.stages,
            chunks=self.stage_chunks,
            micro_batches=self.accumulation_steps,
        )

    @property
    def passed_bytes(self) -> tuple[int, int]:
        """Bytes that a rank passes to the next stage, and back to the one before, in a step."""
        whole = self.accumulation_steps * self.micro_batch * self.activation_bytes
        on = self.stage_chunks - (self.stage == self.stages - 1)
        return whole * on, whole * self.gradients_sent

    @property
    def link_bytes(self) -> int:
        """Bytes of memory that a rank shares with neighbouring stages (`engine.comms.link`)."""
        ends = (self.stage == 0) + (self.stage == self.stages - 1)
        slots = NUM_SLOTS * (2 - ends)
        if ends == 1 and self.stage_chunks > 1:
            slots += slots_around(self.stages)
        return 2 * slots * self.links_stages * self.micro_batch * self.activation_bytes

    @property
    def is_single_rank(self) -> bool:
        """Whether there is one rank: `sharding.reduce_scatter` copies only gradients it casts."""
        return self.shard == self.replicas == 1

    @property
    def shares_parameters(self) -> bool:
        """Whether no parameter is gathered, as in `engine.sharding.shared_parameters`."""
        return (self.shared_memory or self.uses_shards) and self.precision == "fp32"


def layout_of(
    plugin: PluginPlan,
    batch: BatchPlan,
    *,
    optim: OptimPlan,
    precision: str = "fp32",
    device: str = "cpu",
    on_one_node: bool = False,
    records_gradients: bool = False,
    libraries: tuple[str, ...] = (),
) -> Layout:
    """The layout of a resolved plugin and batch.

    `on_one_node`: whether the ranks that divide parameters among themselves are on one node.
    """
    return Layout(
        parameters_live=plugin.parameters_live,
        gradients=plugin.gradients,
        shard=plugin.dp_shard,
        owners=plugin.dp_shard,
        replicas=plugin.dp_replicate,
        accumulation_steps=batch.accumulation_steps,
        micro_batch=batch.micro_batch,
        precision=precision,
        optim=optim,
        device=device,
        shared_memory=device == "cpu" and on_one_node,
        uses_shards=plugin.dp_shard == 1 and plugin.budget is None,
        chunk_bytes=plugin.chunk_bytes,
        split_blocks=plugin.split_blocks,
        reshard_overrides=plugin.reshard_overrides,
        records_gradients=records_gradients,
        baseline=baseline_bytes(device, libraries),
    )


def counter_bytes(optim: OptimPlan) -> int:
    """Bytes of single numbers per trained parameter, such as AdamW's step count."""
    return optimizer_of(optim.name).counter_bytes


def baseline_bytes(device: str, libraries: Iterable[str]) -> int:
    """Bytes that a worker holds before the model is built.

    On CPU: the interpreter with torch, most of it inherited from the server that workers are forked
    from, and the pages of libraries that training touches. On CUDA: the context and NCCL's buffers.
    """
    if device == "cuda":
        return CUDA_BASELINE_BYTES
    added = CUDA_BUILD_BYTES if torch_has_cuda() else 0
    return CPU_BASELINE_BYTES + added + sum(LIBRARY_BYTES[name] for name in libraries)
