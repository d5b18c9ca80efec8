"""How long a step takes. Standard library only."""

from __future__ import annotations

from colotrain.estimate.communication import Traffic, traffic
from colotrain.estimate.groups import find
from colotrain.estimate.hardware import Costs, Hardware
from colotrain.estimate.layout import Layout
from colotrain.plan import Prediction, Survey, Trace


def step_time(
    layout: Layout,
    survey: Survey,
    trace: Trace,
    hardware: Hardware,
    *,
    tokens_per_step: int,
    flops_per_token: float,
    world_size: int,
) -> Prediction:
    """Seconds of a step: computing, collectives as far as nothing hides them, the optimizer.

    MFU counts what the model needs, without recomputation (PaLM, Chowdhery et al. 2022).
    """
    costs = hardware.costs
    sent = traffic(layout, survey, trace)
    computing = layout.accumulation_steps * compute_s(trace, costs, hardware.overlaps)
    exchanging = exchange_s(sent, costs)
    if hardware.overlaps:
        rest = exchanging * _exposed_share(layout, sent)
        working = max(computing, exchanging) + rest
    else:
        working = computing + exchanging
    elements = sum(g.trained_shard_numel for g in find(survey, trace, layout).values())
    step_s = working + elements * costs.element_s + costs.step_s
    tokens_per_s = tokens_per_step / step_s
    ideal = world_size * hardware.peak_flops
    mfu = flops_per_token * tokens_per_s / ideal if ideal else 0.0
    return Prediction(step_s=step_s, tokens_per_s=tokens_per_s, mfu=mfu)


def compute_s(trace: Trace, costs: Costs, overlaps: bool) -> float:
    """Forward and backward of a micro-batch, recomputation included.

    A GPU's host only hands out the work: where it is slower than the GPU, it decides.
    """
    device = host = 0.0
    for segment in trace.segments:
        work = segment.work
        device += work.matmul_flops * costs.flop_s
        device += work.attention_flops * costs.attention_flop_s
        device += work.moved_bytes * costs.byte_s
        host += work.num_ops * costs.op_s
    return max(device, host) if overlaps else device + host


def exchange_s(sent: Traffic, costs: Costs) -> float:
    return (
        sent.gathered_bytes * costs.gathered_byte_s
        + sent.reduced_bytes * costs.reduced_byte_s
        + sent.replicated_bytes * costs.replicated_byte_s
        + (sent.gathers + sent.reductions) * costs.collective_s
    )


def _exposed_share(layout: Layout, sent: Traffic) -> float:
    """What no computing can hide: the first all-gather and the last reduction of a micro-batch."""
    collectives = sent.gathers + sent.reductions
    return min(1.0, 2 * layout.accumulation_steps / collectives) if collectives else 0.0
