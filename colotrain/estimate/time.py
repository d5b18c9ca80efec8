"""How long a step takes. Standard library only."""

from __future__ import annotations

from colotrain.estimate.communication import Traffic, traffic
from colotrain.estimate.groups import find
from colotrain.estimate.hardware import Costs, Hardware
from colotrain.estimate.layout import Layout
from colotrain.plan import Prediction, Survey, Trace, Work


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
    computing = layout.accumulation_steps * compute_s(layout, trace, costs, hardware.overlaps)
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


def compute_s(layout: Layout, trace: Trace, costs: Costs, overlaps: bool) -> float:
    """Forward and backward of a micro-batch, recomputation included.

    A GPU's host only hands out the work: where it is slower than the GPU, it decides.
    """
    device = host = 0.0
    for segment in trace.segments:
        work, size = segment.work, layout.micro_batch
        device += at(work.matmul_flops, size) * costs.flop_s
        device += at(work.attention_flops, size) * costs.attention_flop_s
        device += at(work.moved_bytes, size) * costs.byte_s
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


def at(pair: tuple[float, float], micro_batch: int) -> float:
    """A fixed number and one per sample, for a micro-batch of this size."""
    return pair[0] + pair[1] * micro_batch


def total(trace: Trace, micro_batch: int) -> Work:
    """The work of a whole micro-batch, as fixed numbers."""
    works = [segment.work for segment in trace.segments]

    def summed(name: str) -> tuple[float, float]:
        return (sum(at(getattr(work, name), micro_batch) for work in works), 0.0)

    return Work(
        matmul_flops=summed("matmul_flops"),
        attention_flops=summed("attention_flops"),
        moved_bytes=summed("moved_bytes"),
        num_ops=sum(work.num_ops for work in works),
    )
