"""The two launches of a smoke run: up to its first checkpoint, and on from there."""

from __future__ import annotations

from collections.abc import Sequence

from colotrain.errors import ColotrainError
from colotrain.events.event import Event
from colotrain.events.kinds import WorkerStopped
from colotrain.launch.elastic import Follow, launch
from colotrain.launch.rendezvous import Node
from colotrain.rundir import RunDir
from colotrain.spec.exit_codes import PREEMPTED
from colotrain.spec.plan import READ_BACK, RunPlan


def launch_and_resume(
    plan: RunPlan,
    rundir: RunDir,
    *,
    follow: Follow = lambda events: (),
    node: Node | None = None,
    began_at: float | None = None,
) -> tuple[int, str]:
    """Run the plan's workers, which stop after one step, then new ones that resume from its save.

    Every node's launcher must call this; arguments and result are those of `launch`.
    """
    reasons: list[str] = []

    def note(events: list[Event]) -> Sequence[str]:
        stops = (WorkerStopped.of(e) for e in events if e.kind == WorkerStopped.KIND)
        reasons.extend(stop.reason for stop in stops)
        return follow(events)

    exit_code, cause = launch(plan, rundir, follow=note, node=node, began_at=began_at)
    if exit_code == PREEMPTED and READ_BACK in reasons:
        reasons.clear()
        exit_code, cause = launch(plan, rundir, follow=note, node=node, began_at=began_at)
        if READ_BACK in reasons:
            return ColotrainError.exit_code, "the second launch did not resume from the checkpoint"
    return exit_code, cause
