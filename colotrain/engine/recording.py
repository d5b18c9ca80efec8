"""What a rank writes down about each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colotrain.engine.statistics import Recorder
from colotrain.observe.probes import highest_peak, memory_now

if TYPE_CHECKING:
    from colotrain.engine.loop import Run, StepResult


def record_step(
    run: Run, result: StepResult, *, times: dict[str, float], lr: float, skipped: bool
) -> None:
    """One event per rank and step; rank 0 adds what all ranks agreed on."""
    rss, peak = memory_now()[0], highest_peak()
    indices = range(run.plan.batch.accumulation_steps)
    samples = [i for index in indices for i in run.train_data.ids(run.batch_index - 1, index)]
    shared = {}
    if run.rank == 0:
        shared = {
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
    run.events.write(
        "step",
        step=run.step,
        **times,
        micro_batches=result.totals.micro_batches,
        samples=samples,
        rss=rss,
        peak=peak,
        **shared,
    )
    if run.rank == 0 and (warning := run.spikes.look(result.loss)):
        run.events.write("note", text=f"step {run.step}: {warning}")


def record_gradients(run: Run, recorder: Recorder, **extra: Any) -> None:
    """Write the statistics of this step, which answers a request in the control folder."""
    run.at("record")
    record = recorder.finish() | extra
    if run.rank == 0:
        run.rundir.grads_request_file.unlink(missing_ok=True)
        run.events.write("gradients", step=run.step + 1, **record)
