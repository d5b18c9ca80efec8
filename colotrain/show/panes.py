"""Panes of the dashboard: functions from the state of a run and a size to lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from rich.text import Text

from colotrain.events.slow_ranks import slow_ranks
from colotrain.events.view import mfu, planned_memory, stages, unit
from colotrain.records import to_plain
from colotrain.show.charts import (
    GREEN,
    MARK,
    ORANGE,
    SERIES,
    SKY,
    STATUS_STYLES,
    VERMILLION,
    bar,
    chart,
    heat_legend,
    heat_lines,
    scale_of,
    spark,
    stacked,
    stacked_bar,
)
from colotrain.show.formatting import clean, epoch, shortened, shown, shown_loss
from colotrain.show.frame import FrameState, stragglers, worst_parameters
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.quantities import short_duration, short_size

ROOMY = 72
"""Columns from which a pane has room for reasons."""

Pane = Callable[[FrameState, int, int], list[Text]]

STATE_STYLES = {
    "running": f"bold {GREEN}",
    "starting": GREEN,
    "finished": f"bold {SKY}",
    "failed": f"bold {VERMILLION}",
    "dead": f"bold {VERMILLION}",
    "preempted": f"bold {ORANGE}",
    "interrupted": f"bold {ORANGE}",
}


def header(frame: FrameState, width: int) -> list[Text]:
    """Return two lines: the run's name, setup and state; its progress."""
    view, plan = frame.view, frame.plan
    world = view.world_size or plan.world_size
    where = f"in {plan.mesh.pp} stages on" if plan.mesh.pp > 1 else "on"
    what = f"{clean(plan.name)}  {plan.plugin.name}, {world} ranks {where} {plan.cluster.device}"
    first = Text.assemble((what, "bold"), "  ", (frame.state, STATE_STYLES.get(frame.state, "")))
    if view.cause and frame.state != "running":
        first.append(f": {clean(view.cause)}")
    max_steps = view.max_steps or plan.train.max_steps
    elapsed = frame.until - view.launched_at if view.launched_at is not None else None
    numbers = f" step {view.steps}/{max_steps}"
    if plan.train.epoch_steps:
        numbers += f"  epoch {epoch(view.steps, plan.train)}"
    numbers += f"  elapsed {short_duration(elapsed)}"
    if not frame.ended:
        numbers += f"  ETA {short_duration(view.eta_s)}"
        numbers += _within(frame)
    second = bar(view.steps, of=max_steps, width=max(4, width - len(numbers)), style=GREEN)
    return [first, second.append(numbers)]


def _within(frame: FrameState) -> str:
    """Return the progress of a long step or evaluation that is running; empty if none is."""
    progress = frame.view.progress
    if progress is None:
        return ""
    what = f"step {progress.step}" if progress.what == "step" else clean(progress.what)
    left = None if progress.eta_s is None else progress.eta_s - (frame.until - progress.t)
    text = f"  {what}: micro-batch {progress.micro_batch}/{progress.micro_batches}"
    return f"{text}, {progress.done:.0%}, {short_duration(left and max(0.0, left))} left"


def loss(frame: FrameState, width: int, height: int) -> list[Text]:
    view = frame.view
    now = shown_loss(view.loss[-1][1] if view.loss else None)
    title = Text(f"train {now}")
    if view.evals:
        title.append(f"  {MARK} ", f"bold {ORANGE}")
        title.append(f"validation {shown_loss(view.evals[-1][1])}")
        title.append("".join(f"  {name} {value:.4g}" for name, value in view.metrics.items()))
    skipped = " (skipped)" if view.steps in view.skipped_steps[-1:] else ""
    title.append(f"  log scale  lr {shown(view.lr, '.2g')}{skipped}", "dim")
    return [title, *chart(view.loss, view.evals, width=width, height=height - 1, log=True)]


def speed(frame: FrameState, width: int, height: int) -> list[Text]:
    view, each = frame.view, unit(frame.view, frame.plan)
    lines = [Text(f"{shown(view.tokens_per_s_smooth, ',.0f')} {each}/s  ", "bold")]
    lines[0].append_text(spark(view.throughput, width=max(1, width - len(lines[0]))))
    lines.append(_mfu(frame))
    pace = f"step {short_duration_ms(view.pace_s)}"
    if view.lost_s:
        pace += f"  restarts cost {short_duration(view.lost_s)}"
    return [*lines, Text(pace), *time_split(frame, width, height - 3)]


def _mfu(frame: FrameState) -> Text:
    view = frame.view
    if not view.peak_flops_per_s:
        return Text("MFU -  (no peak was measured)", "dim")
    share = mfu(view, frame.plan, view.tokens_per_s_smooth or 0.0)
    peak = f"{view.peak_flops_per_s / 1e12:.3g} TFLOP/s per rank"
    what = f" ({clean(view.peak_flops_what)})" if view.peak_flops_what else ""
    return Text(f"MFU {share:.1%} of {peak}{what}")


def time_split(frame: FrameState, width: int, height: int) -> list[Text]:
    """Draw how a step's time divides: a bar, and as many legend lines as fit."""
    times = [(name, seconds) for name, seconds in frame.view.times if seconds > 0]
    whole = sum(seconds for _, seconds in times)
    if not times or whole <= 0 or height < 1:
        return []
    legend = [Text()]
    for i, (name, seconds) in enumerate(times):
        part = Text.assemble(
            (f"{name[0]} ", SERIES[i % len(SERIES)]), f"{name} {seconds / whole:.0%}  "
        )
        if len(legend[-1]) + len(part) > width:
            legend.append(Text())
        legend[-1].append_text(part)
    return [stacked(times, width=width), *legend][:height]


def short_duration_ms(seconds: float | None) -> str:
    """Same as `short_duration`, but in milliseconds below one second."""
    if seconds is None or not 0 <= seconds < 1:
        return short_duration(seconds)
    return f"{seconds * 1000:.0f}ms"


def memory(frame: FrameState, width: int, height: int) -> list[Text]:
    """Draw a bar per rank with a line at the predicted peak; show the fullest ranks.

    The numbers are those of the event `memory` (`engine.step.recording`).
    """
    view, plan = frame.view, frame.plan
    predicted = planned_memory(plan).total
    scale = scale_of(max(predicted, *view.peak_by_rank, 0), plan.cluster.memory_bytes)
    lines = [_prediction(frame, width)] if height > 2 else []
    if height > 3 and view.memory_by_rank:
        lines.append(_measurement(frame, width))
    if height > 4 and view.tiers:
        lines.append(_tiers(frame, width))
    peaks = sorted(enumerate(view.peak_by_rank), key=lambda item: (-item[1], item[0]))
    room = height - len(lines)
    listed = peaks if len(peaks) <= room else peaks[: max(0, room - 1)]
    for rank, peak in sorted(listed) if len(listed) == len(peaks) else listed:
        rss = view.rss_by_rank[rank] if rank < len(view.rss_by_rank) else 0
        numbers = f" peak {short_size(peak)}"
        held = "host" if plan.cluster.device == "cuda" else "now"  # peaks on a GPU are of its own
        numbers += f", {held} {short_size(rss)}" if width > 50 else ""
        line = Text(f"{rank:>4} ")
        bar_width = max(4, width - 5 - (26 if width > 50 else 13))
        parts = _parts(view.memory_by_rank.get(rank)) or [("peak", float(peak))]
        line.append_text(stacked_bar(parts, of=scale, width=bar_width, mark=predicted))
        lines.append(line.append(numbers))
    if len(listed) < len(peaks):
        rest = peaks[len(listed) :]
        least, most = short_size(rest[-1][1]), short_size(rest[0][1])
        lines.append(Text(f"     {len(rest)} more ranks: {least} to {most}", "dim"))
    return lines or [Text("nothing measured yet", "dim")]


def _prediction(frame: FrameState, width: int) -> Text:
    """Return the plan's memory breakdown, largest categories first."""
    capacity, planned = frame.plan.cluster.memory_bytes, planned_memory(frame.plan)
    line = Text.assemble(("│", f"bold {ORANGE}"))
    line.append(f" predicted {short_size(planned.total)}")
    line.append(f" of {short_size(capacity)}")
    for name, size in sorted(to_plain(planned).items(), key=lambda item: -item[1]):
        part = f" {name} {short_size(size)}"
        if size > 0 and len(line) + len(part) <= width:
            line.append(part, "dim")
    return line


NAMES = {"baseline": "torch", "buffers": "model buffers", "activations": "step"}
"""Displayed names of memory categories, chosen so that no two begin with the same letter."""


def _parts(breakdown: MemoryBreakdown | None) -> list[tuple[str, float]]:
    """Return the memory breakdown of a rank at its peak, largest categories first."""
    sizes = to_plain(breakdown) if breakdown is not None else {}
    found = [(NAMES.get(name, name), float(size)) for name, size in sizes.items() if size > 0]
    return sorted(found, key=lambda part: -part[1])


def _measurement(frame: FrameState, width: int) -> Text:
    """Return the legend of the bars, with the sizes of the rank with the highest peak."""
    by_rank = frame.view.memory_by_rank
    rank = max(by_rank, key=lambda r: by_rank[r].total)
    line = Text(f"  measured (rank {rank})")
    for i, (name, size) in enumerate(_parts(by_rank[rank])):
        part = f" {name} {short_size(int(size))}"
        if len(line) + len(part) <= width:
            line.append(part[:2], SERIES[i % len(SERIES)]).append(part[2:], "dim")
    return line


def _tiers(frame: FrameState, width: int) -> Text:
    """Return one rank's bytes per tier, by category."""
    sums: dict[str, list[str]] = {}
    totals: dict[str, int] = {}
    for kind, tiers in frame.view.tiers.items():
        for tier, size in tiers.items():
            totals[tier] = totals.get(tier, 0) + size
            sums.setdefault(tier, []).append(f"{kind} {short_size(size)}")
    line = Text()
    for tier, total in totals.items():
        line.append(f"{clean(tier)} {short_size(total)} ", "bold")
        detail = f"({clean(', '.join(sums[tier]))})  "
        if len(line) + len(detail) <= width:
            line.append(detail, "dim")
    line.truncate(width)
    return line


def ranks(frame: FrameState, width: int, height: int) -> list[Text]:
    """Draw the speed of each rank; name the stragglers, slowest first."""
    known = frame.view.ranks
    if not known:
        return [Text("no rank has done a step yet", "dim")]
    slow = {rank.rank: why for rank, why in stragglers(frame)}
    names = ", ".join(f"rank {rank}" for rank in list(slow)[:4])
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    measured = all(rank.wait_s is not None for rank in known)
    none = "no stragglers" if measured else "no late data (other waits are not measured here)"
    lines = [Text(none, "dim")]
    if slow:
        verb, causes = "holds" if len(slow) == 1 else "hold", slow_ranks(known)
        why = "; ".join(sorted({causes[n].cause for n in slow if n in causes} - {""}))
        text = f"{names}{more} {verb} the others up{why and ': '}{why}"
        lines = [Text(text, f"bold {VERMILLION}")]
    order = [rank for number in slow for rank in known if rank.rank == number]
    order += sorted((r for r in known if r.rank not in slow), key=lambda rank: -rank.busy_s)
    longest = max(rank.busy_s for rank in known)
    staged = 9 * any(rank.stage is not None for rank in known)
    bar_width = max(4, width - (44 if slow else 26) - staged)
    for rank in order[: max(0, height - 1)]:
        line = Text(f"{rank.rank:>4} ")
        style = VERMILLION if rank.rank in slow else SKY
        line.append_text(bar(rank.busy_s, of=longest, width=bar_width, style=style))
        at = "" if rank.stage is None else f"stage {rank.stage} "
        line.append(f" {short_duration_ms(rank.busy_s):>6} step {rank.step} {at}")
        lines.append(line.append(slow.get(rank.rank, ""), VERMILLION))
    if len(known) > height - 1:
        median = statistics.median(rank.busy_s for rank in known)
        lines[0].append(f"  ({len(known)} ranks, median {short_duration_ms(median)})", "dim")
    return lines


def pipeline(frame: FrameState, width: int, height: int) -> list[Text]:
    """Draw how long each pipeline stage waits for others; say which ranks hold which blocks."""
    found = stages(frame.view, frame.plan)
    listed = found if len(found) <= height else found[: max(0, height - 1)]
    lines, most = [], max((len(stage.place) for stage in listed), default=0)
    for stage in listed:
        line = Text(f"{stage.stage:>4} {stage.place:<{most}} ")
        waits = " wait -" if stage.wait is None else f" wait {stage.wait:>3.0%}"
        numbers = f"{waits} (planned {stage.planned_wait:>3.0%})" if width > 50 else waits
        numbers += f" peak {short_size(stage.peak)}" if stage.peak else ""
        bar_width = max(4, width - len(line) - len(numbers))
        line.append_text(bar(stage.wait or 0.0, of=1.0, width=bar_width, style=ORANGE))
        lines.append(line.append(numbers))
    if len(listed) < len(found):
        lines.append(Text(f"     {len(found) - len(listed)} more stages", "dim"))
    return lines


def heat(frame: FrameState, width: int, height: int) -> list[Text]:
    lines = heat_lines(frame.view.heat, width=width, height=height - 1)
    return [*lines, heat_legend()] if frame.view.heat.steps else lines


def worst(frame: FrameState, width: int, height: int) -> list[Text]:
    record = frame.view.gradients
    if record is None:
        return [Text("no gradient records yet", "dim")]
    clipped = f", clipped to {record.clipped_to:.4g}" if record.clipped_to is not None else ""
    lines = [Text(f"step {record.step}: norm {shown(record.global_norm, '.4g')}{clipped}")]
    lines[0].append("  (norm, update/weight)", "dim")
    for row, why in worst_parameters(frame.view)[: max(0, height - 1)]:
        numbers = f" {shown(row.norm, '.2e'):>8} {shown(row.update_ratio, '.1e'):>7} "
        if width < ROOMY:  # only the number for which it is listed
            numbers = (
                f" {shown(row.update_ratio if why.startswith('update') else row.norm, '.1e'):>7} "
            )
        name_width = max(8, width - len(numbers) - (26 if width >= ROOMY else 12))
        lines.append(Text(f"{shortened(clean(row.name), name_width):<{name_width}}{numbers}"))
        lines[-1].append(clean(why), STATUS_STYLES.get(row.status, "dim"))
    return lines


def health(frame: FrameState, width: int, height: int) -> list[Text]:
    """Return checkpoints, restarts with their causes, and the first error."""
    view = frame.view
    lines = [_checkpoint(frame)]
    if view.save_failure is not None:
        lines.append(Text(clean(view.save_failure), f"bold {VERMILLION}"))
    if view.nonfinite is not None:
        lines.append(Text("the first value that was not finite:", f"bold {VERMILLION}"))
        lines.append(Text(clean(str(view.nonfinite)), VERMILLION))
    if view.failure is not None:
        lines.append(Text(clean(f"failed: {view.failure}"), VERMILLION))
    restarts = f"{view.restarts} restart{'' if view.restarts == 1 else 's'}"
    restarts += f": {view.goodput.cost}" if view.goodput.recoveries else ""
    lines.append(Text(restarts if view.restarts else "no restarts", "" if view.restarts else "dim"))
    for number, cause in reversed(list(enumerate(view.restart_causes, 1))):
        lines.append(Text(f" {number}: {clean(cause)}", ORANGE))
    lines += [
        Text(f"rollback {back.route}: a loss or gradient was not finite", ORANGE)
        for back in reversed(view.rollbacks)
    ]
    if view.skipped_steps:
        lines.append(Text(f"{len(view.skipped_steps)} steps skipped (not finite)", ORANGE))
    lines += [Text(f"warning: {clean(text)}", ORANGE) for text in frame.plan.warnings]
    return lines[:height]


def _checkpoint(frame: FrameState) -> Text:
    saved, saving = frame.view.checkpoint, frame.view.saving
    if not frame.plan.checkpoint.enabled:
        return Text("checkpoints are off", ORANGE)
    if saving is not None and not frame.ended:
        since = short_duration(frame.until - saving[1])
        before = f"; step {saved.step} is saved" if saved is not None else ""
        return Text(f"writing the checkpoint of step {saving[0]} for {since}{before}")
    if saved is None:
        return Text("no checkpoint yet", "dim")
    behind = frame.view.steps - saved.step
    age = f"checkpoint of step {saved.step}, {frame.ago(saved.t)}"
    took = f", took {short_duration(saved.seconds)}" if saved.seconds is not None else ""
    return Text(f"{age}{took}" + (f"; {behind} steps since" if behind > 0 else ""))


def output(frame: FrameState, width: int, height: int) -> list[Text]:
    if not frame.output:
        return [Text("workers have written nothing", "dim")]
    return [Text(line) for line in frame.output[-height:]]
