"""Settings that a built-in objective (`train.objective`) excludes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colotrain.config.schema import Config
from colotrain.errors import Problem

Excluded = Iterator[tuple[str, Any, tuple[Any, ...], str]]
"""Key, value, values that are allowed, and a reason."""


def check_objective(settings: Config) -> Iterator[Problem]:
    """Yield what cannot be had together with the objective."""
    objective = settings.train.objective
    if objective is None:
        return
    under = f"under train.objective={objective}"
    for key, value, allowed, why in EXCLUDED[objective](settings):
        if value not in allowed:
            shown = " or ".join("null" if v is None else f"{v}".lower() for v in allowed)
            expected = f"{shown} {under}{why}"
            yield Problem(key=key, value=value, expected=expected, fix=f"set {key}={shown}")
    resume = settings.checkpoint.resume
    if objective == "dpo" and resume not in ("auto", "none"):
        expected = f"auto or none {under}, whose reference is the model as the run begins"
        fix = "export that checkpoint (`colotrain export`), and name the directory in model.hf"
        yield Problem(key="checkpoint.resume", value=resume, expected=expected, fix=fix)


def _dpo(settings: Config) -> Excluded:
    train, data, mesh = settings.train, settings.data, settings.mesh
    yield "train.loss", train.loss, (None,), ", which is the loss"
    yield "train.metrics", train.metrics, (None,), ", which has its own"
    yield "train.on_nonfinite", train.on_nonfinite, ("stop", "skip"), ""
    yield "data.target", data.target, (None,), ": pairs come from files (data.path)"
    yield "data.corpus", data.corpus, (None,), ": a corpus has no preference pairs"
    yield "data.packing", data.packing, ("auto", "none"), ": each pair is a sample"
    yield "data.isolate", data.isolate, (False,), ": each pair is a sample"
    yield "data.loss_on", data.loss_on, ("answers", "last"), ": prompts have no part in it"
    yield "mesh.cp", mesh.cp, (1,), ""
    yield "mesh.tp", mesh.tp, (1,), ""


def _masked(settings: Config) -> Excluded:
    data, mesh = settings.data, settings.mesh
    yield "data.target", data.target, (None,), ", which hides tokens of files (data.path)"
    yield "data.isolate", data.isolate, (False,), ""
    yield "mesh.cp", mesh.cp, (1,), ""
    yield "mesh.tp", mesh.tp, (1,), ""


def _distill(settings: Config) -> Excluded:
    train, data, mesh = settings.train, settings.data, settings.mesh
    yield "train.loss", train.loss, (None,), ", which is the loss"
    yield "data.target", data.target, (None,), ": the teacher reads files (data.path)"
    yield "mesh.cp", mesh.cp, (1,), ""
    yield "mesh.tp", mesh.tp, (1,), ""


EXCLUDED = {"dpo": _dpo, "masked": _masked, "distill": _distill}
"""Objective → function of the settings that yields what it excludes."""
