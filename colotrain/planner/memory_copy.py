"""Whether each rank's state is copied to its launcher's memory, and what that takes."""

from __future__ import annotations

from dataclasses import replace

from colotrain.config.sizes import parse_size
from colotrain.errors import Problem
from colotrain.planner.budget import host_bytes
from colotrain.planner.context import PlanningContext
from colotrain.planner.model_states import model_state_bytes
from colotrain.spec.elastic import COPY_EXTRA_BYTES, MemoryCopyPlan
from colotrain.spec.memory import PeakRange
from colotrain.spec.plan import PluginPlan
from colotrain.spec.quantities import format_size

KEY = "elastic.memory_copy"
AUTOMATIC_SHARE = 0.01
"""Largest share of the time that copying takes by default, and always on a GPU."""
OF_ANOTHER = ", and of as many of another node,"


def plan_memory_copy(
    context: PlanningContext, plugin: PluginPlan, peak: PeakRange
) -> tuple[MemoryCopyPlan, list[Problem]]:
    """The copies that `elastic.memory_copy` allows: auto, off, or a size for each node."""
    scale, elastic = context.scale, context.settings.elastic
    asked = elastic.memory_copy
    is_here = scale.device == "cpu" or context.machine.num_devices > 0
    capacity = host_bytes(scale, context.machine) if is_here else 0
    on_host = plugin.budget.host_bytes if plugin.budget is not None else 0
    used = peak.high if scale.device == "cpu" else on_host
    several = (elastic.max_nodes or scale.nodes) > 1
    on_way = scale.device == "cuda"  # in page-locked memory, while the next gradients are computed
    num_bytes = ((4 if several else 2) + on_way) * copy_bytes(context, plugin)
    node_bytes, room = num_bytes * scale.procs_per_node, capacity - used
    what = f"two copies of the state of {scale.procs_per_node} ranks" + several * OF_ANOTHER
    what += on_way * ", and one on the way to the host,"
    sized = f"{format_size(node_bytes)} on each node"
    if asked in ("off", False, 0):
        return MemoryCopyPlan(bytes=num_bytes, reason=f"off ({KEY}={asked})"), []
    if elastic.max_restarts == 0:
        return MemoryCopyPlan(bytes=num_bytes, reason="off (elastic.max_restarts=0)"), []
    if context.train.on_nonfinite == "rollback":
        reason = "off: train.on_nonfinite=rollback goes back to checkpoints"
        problem = Problem(key=KEY, value=asked, expected="auto or off with rollback", fix="set off")
        return MemoryCopyPlan(bytes=num_bytes, reason=reason), [problem] * (asked != "auto")
    fits = not capacity or num_bytes <= room
    if asked == "auto" and scale.device == "cuda":
        reason = f"off on GPUs, which copy through page-locked memory; {KEY}=SIZE makes them"
        return MemoryCopyPlan(bytes=num_bytes, reason=reason), []
    # a GPU's step is short beside a copy, which passes through PCIe and one thread of the host
    share = AUTOMATIC_SHARE if asked == "auto" or scale.device == "cuda" else 0.0
    often = f"at most {share:.0%} of the time" if share else "after each step"
    plan = MemoryCopyPlan(enabled=True, bytes=num_bytes, share=share, reason=often)
    if asked == "auto":
        unfit = f"off: {sized} would not fit beside the ranks"
        return plan if fits else replace(plan, enabled=False, reason=unfit), []
    try:
        allowed = parse_size(asked, whole=capacity * scale.procs_per_node or None)
    except ValueError as error:
        expected = f"auto, off, {error}"
        return plan, [Problem(key=KEY, value=asked, expected=expected, fix=f"as in {KEY}=4GiB")]
    if node_bytes > allowed:
        expected = f"at least {format_size(node_bytes)}: {what}"
        return plan, [Problem(key=KEY, value=asked, expected=expected, fix="raise it, or set off")]
    if not fits:
        expected = f"auto or off: {what} ({sized}) do not fit beside the ranks"
        fix = "use a plugin or a batch that takes less memory, or set off"
        return plan, [Problem(key=KEY, value=asked, expected=expected, fix=fix)]
    return plan, []


def copy_bytes(context: PlanningContext, plugin: PluginPlan) -> int:
    """Bytes of one copy of a rank's state, on the rank that holds most."""
    layout, stage = context.layout(plugin), context.stage
    trace = stage.traces(context.train.activation_checkpointing, layout.micro_batch)
    states = model_state_bytes(layout, stage.survey)
    buffers = trace.buffer_bytes if trace is not None else 0
    return states.parameters + states.optimizer + buffers + COPY_EXTRA_BYTES
