"""What a run records and whom it tells, as the plan has it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Notified = Literal["finished", "failed", "stopped", "restarted"]
NOTIFIED: tuple[Notified, ...] = get_args(Notified)
TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Names of trackers; `show.trackers` has the class of each."""
VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")
"""Reference to an environment variable, which files keep in place of its value."""
KEEPS_VARIABLES = ("observe.notify.command", "observe.notify.url")
"""Settings in which references to environment variables stay references."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """A command or a webhook that is told when the run finished, failed, stopped or restarted."""

    command: str | tuple[str, ...] | None = None
    """Command, as words or as one text. It is run without a shell, with JSON on its standard input
    and variables such as `COLOTRAIN_STATUS`; `${oc.env:NAME}` in it stays unresolved in files."""
    shell: bool = False
    """Let a shell run `command`, which is one text then."""
    url: str | None = None
    """Address that gets the same JSON as a POST. It holds `${oc.env:NAME}`, because addresses of
    webhooks are secrets and every other setting is written to the run's files."""
    events: tuple[Notified, ...] = NOTIFIED
    """Which of finished, failed, stopped, restarted are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyPlan(Notify):
    """The section, with its command in words."""

    command: tuple[str, ...] = ()
    """Words of the command, or the one text that a shell runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """Steps that ranks trace with torch's profiler."""

    first: int
    last: int
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSamples:
    """Texts that the model writes after evaluations, by its most probable tokens."""

    prompts: tuple[str, ...] = ()
    """Beginnings that it continues; none: it writes nothing."""
    max_tokens: int = 64
    """Tokens that a prompt is continued by; each takes a forward of all ranks."""
    every: int = 1
    """Evaluations from one set of texts to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservePlan:
    log_every: int | Literal["auto"]
    """Steps between lines of progress; auto: by time; 0: none."""
    grads_every: int
    """Steps between gradient records; 0: none."""
    trackers: tuple[str, ...] = ()
    samples: TextSamples | None = None
    notify: NotifyPlan | None = None
    metrics_port: int | None = None


def unset_variables(text: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the environment variables that `text` refers to and that are not set."""
    return [name for name in VARIABLE.findall(text) if name not in environment]


def with_variables(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return `text` with the values of the environment variables that it refers to."""
    return VARIABLE.sub(lambda found: environment[found[1]], text)
