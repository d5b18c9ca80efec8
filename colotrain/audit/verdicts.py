"""Verdicts of the checks, their names and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from colotrain.audit.sites import Site

Outcome = Literal["ok", "wrong", "cannot tell", "not checked"]
"""*Cannot tell*: what was found may be meant. *Not checked*: nothing could be compared."""

CHECKS = {
    "steps": "real optimizer steps, and micro-batches in each",
    "ranks": "all ranks make the same steps of the same micro-batches",
    "accumulation": "the loss is divided by the number of micro-batches once",
    "gradient": "the gradient at the step is the mean of the micro-batches' and ranks'",
    "targets": "every target counts the same, whatever micro-batch and rank it is in",
    "update": "the parameters change by what the gradient asks for",
    "zeroing": "gradients are zeroed after each step, and at no other time",
    "clipping": "the whole, unscaled gradient is clipped once per step",
    "scheduler": "at most one scheduler step per optimizer step",
    "parameters": "every trainable parameter is in one optimizer, with a gradient, or tied to one",
    "frozen": "what is frozen does not change",
    "mode": "a model that trains is in train mode",
    "weights": "all ranks start from the same weights and keep them the same",
    "data": "ranks see different data, in another order each epoch",
    "dropout": "ranks draw different dropout masks",
    "checkpointing": "recomputed modules get gradients",
}
"""Check → what it finds to be so where all is right."""

MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of one check."""

    check: str
    outcome: Outcome
    text: str
    """Evidence with numbers, or why nothing can be told."""
    sites: tuple[str, ...] = ()
    """Lines of the script, and of the library where one made the call."""
    step: int | None = None
    """First step in which it was seen."""


def ok(check: str, text: str) -> Verdict:
    return Verdict(check=check, outcome="ok", text=text)


def wrong(check: str, text: str, *sites: Site | Sequence[str], step: int | None = None) -> Verdict:
    found = [site if isinstance(site, Site) else Site.of(site) for site in sites]
    lines = tuple(dict.fromkeys(str(site) for site in found if site.line or site.library))
    return Verdict(check=check, outcome="wrong", text=text, sites=lines, step=step)


def unknown(check: str, why: str, *sites: Site | Sequence[str]) -> Verdict:
    return replace(wrong(check, why, *sites), outcome="cannot tell")


def unchecked(check: str, why: str, *sites: Site | Sequence[str]) -> Verdict:
    return replace(wrong(check, why, *sites), outcome="not checked")


def named(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
