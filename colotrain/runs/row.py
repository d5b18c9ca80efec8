"""What the list of runs knows of one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from colotrain.show.formatting import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run in the list; unknown fields are None."""

    name: str
    state: str
    plugin: str | None = None
    world_size: int | None = None
    steps: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_s: float | None = None
    unit: str = "tokens"
    """Unit of `tokens_per_s`."""
    restarts: int | None = None
    nodes_left: int | None = None
    """Nodes that held the others up, and without which the run went on."""
    lost_steps: int | None = None
    """Finished steps that restarts made again."""
    goodput: float | None = None
    """Share of the time that was spent in steps that count, over all launches."""
    age_s: float | None = None
    """Seconds since the first launch, or since the plan was written."""
    run_dir: str
    problem: str | None = None
    """Why a damaged run cannot be read."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from those of other runs with the same recipe."""
    job: str | None = None
    """Id of the run's job."""
    job_state: str | None = None
    job_reason: str | None = None


def cost_cells(row: Row) -> list[str]:
    """Return what restarts cost a run."""
    left = f", {row.nodes_left} node{'s' * (row.nodes_left > 1)} left" if row.nodes_left else ""
    restarts = shown(row.restarts, "d") + left
    return [restarts, shown(row.lost_steps, "d"), shown(row.goodput, ".0%")]


def job_text(row: Row) -> str:
    """Return text like `123 PENDING (Resources)`."""
    if row.job is None:
        return "-"
    reason = f" ({row.job_reason})" if row.job_reason else ""
    return f"{row.job} {row.job_state or 'unknown'}{reason}"
