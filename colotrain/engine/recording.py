"""The events that a rank writes about each step."""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace
from typing import Any

import torch

from colotrain import module_tree
from colotrain.dotted import described
from colotrain.engine.gradients.statistics import Recorder
from colotrain.engine.precision import dtype_of
from colotrain.engine.probes import highest_peak, matmul_peak_flops, memory_now
from colotrain.engine.run_state import Run, StepResult
from colotrain.engine.sharding.shards import local_shard
from colotrain.errors import MOST_WRITTEN, ColotrainError, message_of, shortened
from colotrain.events.kinds import DeviceMemory, Failure, Note, PeakFlops, PeakMemory, Step
from colotrain.events.log import EventWriter
from colotrain.spec.exit_codes import FAILED, WORKER_FINAL

FIX_MEMORY = (
    "set train.micro_batch=1 or train.activation_checkpointing=full, or take plugin=gemini with "
    "a lower plugin.budget"
)


def record_peak_flops(events: EventWriter, precision: str, device: torch.device) -> None:
    """Measure the peak FLOP/s of this rank's device, before anything is allocated on it."""
    flops = matmul_peak_flops(device, dtype_of(precision))
    events.write(PeakFlops(flops_per_s=flops, what=f"measured {precision} matmul"))


def record_step(
    run: Run, result: StepResult, *, times: dict[str, Any], lr: float, skipped: bool
) -> None:
    """Write one event per rank and step; rank 0 adds what all ranks agreed on."""
    rss, peak = memory_now()[0], highest_peak()
    indices = range(run.plan.batch.accumulation_steps)
    samples = [i for index in indices for i in run.train_data.ids(run.batch_index - 1, index)]
    if not run.plan.mesh.reads_first(run.rank, world=run.plan.world_size):
        samples = []
    values: dict[str, Any] = {**times, "samples": samples, "rss": rss, "peak": peak}
    if run.rank == 0:
        values |= {
            "loss": result.loss,
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / times["step_s"],
            "grad_norm": result.grad_norm,
            "clip_ratio": run.gradients.clip_ratio,
            "lr": lr,
            "optimizer_steps": run.optimizer.steps,
            "total_micro_batches": run.micro_batches,
            "skipped": skipped,
        }
    run.events.write(Step(step=run.step, micro_batches=result.totals.micro_batches, **values))
    if pressure := run.pressure.read(run.step):
        run.events.write(pressure)
    if result.record or not run.memory_recorded:
        record_memory(run, peak)
    if torch.cuda.is_initialized():
        record_device_memory(run)
    if run.rank == 0 and (warning := run.spikes.check(result.loss)):
        run.events.write(Note(text=f"step {run.step}: {warning}"))


def record_memory(run: Run, peak: int) -> None:
    """Write the bytes that this rank held at its peak, in the categories of the memory breakdown.

    The remainder counts as activations: they, whole parameters and gradients, and all else that
    exists only within a step. With tiers there is no such event, because tensors on disk are not
    memory.
    """
    if run.tiers is not None or run.optimizer.torch is None:
        return
    grads = [p.grad for p in module_tree.parameters(run.sharded.module) if p.grad is not None]
    held = {
        **lasting_bytes(run),
        "gradients": sum(local_shard(grad).nbytes for grad in grads),
        "baseline": run.baseline_bytes,
    }
    run.memory_recorded = True
    rest = max(0, peak - sum(held.values()))
    run.events.write(PeakMemory(step=run.step, **held, activations=rest))


def record_device_memory(run: Run) -> None:
    """Write what torch's allocator kept at most and what the device says, once there is more."""
    reserved = torch.cuda.max_memory_reserved()
    if reserved > run.reserved_bytes:
        run.reserved_bytes = reserved
        free, total = torch.cuda.mem_get_info()
        outside = max(0, total - free - torch.cuda.memory_reserved())
        run.events.write(DeviceMemory(step=run.step, reserved=reserved, free=free, outside=outside))


def lasting_bytes(run: Run) -> dict[str, int]:
    """Return the bytes that this rank holds of the model between two steps, gradients excluded."""
    model = run.sharded.module
    states = run.optimizer.torch.state.values() if run.optimizer.torch is not None else ()
    return {
        "parameters": sum(local_shard(p).nbytes for _, p in run.sharded.named_parameters()),
        "optimizer": sum(
            local_shard(value).nbytes
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
    }


def record_gradients(run: Run, recorder: Recorder, *, noise: dict[str, Any] | None) -> None:
    """Write the statistics of this step, which answers a request in the control folder."""
    run.at("record")
    gradients = recorder.finish(run.step + 1)
    if run.rank == 0:
        run.rundir.grads_request_file.unlink(missing_ok=True)
        run.events.write(replace(gradients, noise=noise))


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, or on CPU in a process with a limit (ulimit -v)."""
    refused = "DefaultCPUAllocator: can't allocate memory" in message_of(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or refused


def record_failure(events: EventWriter, error: BaseException, *, phase: str, step: int) -> int:
    """Write the event for a failure of this rank in `step` (from 1); returns its exit code."""
    text = "".join(traceback.format_exception(error))
    if ran_out_of_memory(error):
        error = ColotrainError(f"memory ran short: {message_of(error)}", FIX_MEMORY)
    told = described(error)
    traceback_text = shortened(text, MOST_WRITTEN)  # all of it is in the rank's log
    events.write(Failure(phase=phase, step=step, error=told, traceback=traceback_text))
    sys.stderr.write(text)
    return WORKER_FINAL if isinstance(error, ColotrainError) else FAILED
