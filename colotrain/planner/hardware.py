"""Speed of hardware, from published figures. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from colotrain.planner.layout import Layout

MATMUL_SHARE = 0.70
"""Share of the dense peak that large matmuls reach on GPUs (NVIDIA's guide: 0.65 to 0.8)."""
ATTENTION_SHARE = 0.45
"""Share of the peak of FlashAttention-2, forward and backward (Dao 2023, figures 4 to 6); causal
attention counts half of the pairs there."""
MEMORY_SHARE = 0.80
LINK_SHARE = 0.80
"""Share of link bandwidth that NCCL's rings reach (nccl-tests' bus bandwidth, large messages)."""
LAUNCH_S, REPEAT_S = 6e-6, 24e-6
"""Host seconds per operation, and per operation repeated in backward; a busy GPU hides them."""
LATENCY_S, NODE_LATENCY_S = 3e-6, 6e-6
"""Seconds per step of a ring inside a node, and between nodes."""
ADAM_BYTES = 28
"""Bytes read and written per element: parameter, two moments and gradient, all in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that one rank needs per unit of each kind of work."""

    flop_s: float
    attention_flop_s: float
    """Of causal attention half of the pairs of tokens count."""
    byte_s: float
    """Seconds per byte read or written by operations other than matmuls and attention."""
    op_s: float
    repeated_op_s: float
    """Added per operation that checkpointed blocks repeat in backward."""
    gathered_byte_s: float
    """All-gathers, per byte that a ring would send."""
    reduced_byte_s: float
    replicated_byte_s: float
    collective_s: float
    """Seconds per collective of any size; on CPU with the engine's own work for it."""
    element_s: float
    """Optimizer, per element of the shard."""
    step_s: float = 0.0
    """Everything else, per step."""
    gathered_whole_s: float = 0.0
    """All-gathers on CPU, per byte that arrives: in shared memory nothing is sent."""
    reduced_whole_s: float = 0.0
    attention_byte_s: float = 0.0
    """Exchanges of keys and values inside a node, per byte that a ring would send; on CPU they
    count as all-gathers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware of one rank."""

    name: str
    costs: Costs
    peak_flops: float
    """Dense peak in the plan's precision, which MFU is a share of."""
    overlaps: bool
    """Whether collectives overlap with computation: true on GPUs, false on CPU."""
    measured: bool = True
    """Whether the figures are measured or published; False where they are only typical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A data sheet: published figures per device."""

    name: str
    peak_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    node_bytes_per_s: float


def from_sheet(sheet: Sheet, layout: Layout, *, procs_per_node: int, parts: int = 1) -> Hardware:
    """Published hardware, with the costs of collectives on the mesh of `layout`.

    A ring across nodes is as fast as its slowest link; its latency grows with its length. Replicas
    all-reduce between nodes, all ranks of a node at the same time. With groups of `parts`
    neighbours that divide matrices or experts there are so many rings, which share the links of a
    node.
    """
    procs_per_node, of_node = procs_per_node // parts, sheet.node_bytes_per_s / parts
    inside = layout.shard <= procs_per_node
    link = sheet.link_bytes_per_s if inside else min(sheet.link_bytes_per_s, of_node)
    between = of_node / min(procs_per_node, layout.shard)
    memory_s = 1 / (sheet.memory_bytes_per_s * MEMORY_SHARE)
    nodes = max(1, layout.shard // procs_per_node)
    latency_s = (layout.shard - nodes) * LATENCY_S + (nodes - 1) * NODE_LATENCY_S
    copies_s = 2 * memory_s  # into the buffer of a collective or out of it
    return Hardware(
        name=sheet.name,
        costs=Costs(
            flop_s=1 / (sheet.peak_flops * MATMUL_SHARE),
            attention_flop_s=1 / (sheet.peak_flops * ATTENTION_SHARE),
            byte_s=memory_s,
            op_s=LAUNCH_S,
            repeated_op_s=REPEAT_S,
            gathered_byte_s=1 / (link * LINK_SHARE) + copies_s,
            reduced_byte_s=1 / (link * LINK_SHARE) + copies_s,
            replicated_byte_s=1 / (between * LINK_SHARE),
            collective_s=latency_s,
            element_s=ADAM_BYTES * memory_s,
            step_s=2e-3,
            attention_byte_s=1 / (sheet.link_bytes_per_s * LINK_SHARE) + copies_s,
        ),
        peak_flops=sheet.peak_flops,
        overlaps=True,
    )


TYPICAL_CORE = Costs(
    flop_s=1 / 40e9,
    attention_flop_s=1 / 7.5e9,
    byte_s=1 / 4e9,
    op_s=8e-6,
    repeated_op_s=REPEAT_S,
    gathered_byte_s=0.0,
    reduced_byte_s=0.0,
    replicated_byte_s=1 / 0.5e9,
    collective_s=2e-4,
    element_s=4e-9,
    step_s=4e-3,
    gathered_whole_s=1 / 3e9,
    reduced_whole_s=1 / 3e9,
)
"""Costs of one core of a server of about 2020, in fp32."""


def typical_cpu(*, threads: int, precision: str) -> Hardware:
    """Typical CPU cores, taken to be twice as slow in half precision."""
    slower = 1.0 if precision == "fp32" else 2.0
    core = TYPICAL_CORE
    costs = replace(
        core,
        flop_s=slower * core.flop_s / threads,
        attention_flop_s=slower * core.attention_flop_s / threads,
        byte_s=core.byte_s / min(threads, 4),
    )
    return Hardware(
        name="typical CPU cores",
        costs=costs,
        peak_flops=60e9 * threads,
        overlaps=False,
        measured=False,
    )
