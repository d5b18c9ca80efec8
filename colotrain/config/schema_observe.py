"""Schema of what is recorded and whom it is told; its strings become docs/configuration.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from colotrain.spec.observing import NOTIFIED, Notified, TextSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """A command or a webhook that is told when the run finished, failed, stopped or restarted."""

    command: str | list[str] | None = None
    """Command, as words or as one text. It is run without a shell, with JSON on its standard input
    and variables such as `COLOTRAIN_STATUS`; `${oc.env:NAME}` in it stays unresolved in files."""
    shell: bool = False
    """Let a shell run `command`, which is one text then."""
    url: str | None = None
    """Address that gets the same JSON as a POST. It holds `${oc.env:NAME}`, because addresses of
    webhooks are secrets and every other setting is written to the run's files."""
    events: list[Notified] = field(default_factory=lambda: list(NOTIFIED))
    """Which of finished, failed, stopped, restarted are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Traces of a few steps by torch's profiler."""

    steps: list[int] = field(default_factory=list)
    """First and last step that are traced, as `[10, 12]`; none: no step."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that write a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """What is recorded."""

    log_every: int | Literal["auto"] | None = "auto"
    """Steps between progress lines without a terminal; auto: a line every 10 to 60 seconds; 0 or
    null turns them off."""
    grads_every: int | None = 10
    """Steps between gradient records; 0 or null turns them off."""
    samples: TextSamples = field(default_factory=TextSamples)
    """Texts that the model writes after evaluations."""
    notify: Notify = field(default_factory=Notify)
    """A command or a webhook that is told what becomes of the run."""
    metrics_port: int | None = None
    """Port on the loopback address at which the launcher answers Prometheus; null: none."""
    trackers: list[str] = field(default_factory=list)
    """Other destinations of records: `tensorboard`, `wandb` (offline unless WANDB_MODE=online),
    `mlflow`, each an extra to install."""
