"""What a run reads beside its plan: data, and the model of a reference or a teacher.

A checkpoint tells their identities, so that a run which goes on with others says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from colotrain.data.prepare.identity import identities
from colotrain.engine.checkpoint.manifest import Manifest
from colotrain.engine.run_state import Run
from colotrain.models import huggingface
from colotrain.spec.plan import RunPlan

DATA, SAMPLES, REFERENCE, TEACHER = "data", "num_samples", "reference", "teacher"


def sources_of(plan: RunPlan, *, num_samples: int) -> dict[str, str]:
    """Kind of source → its identity; `num_samples` are those of training."""
    found: dict[str, str] = {}
    if plan.data.source != "target":
        found[DATA] = " ".join(identities(plan.data))
    elif num_samples != sys.maxsize:  # a stream has no length
        found[SAMPLES] = str(num_samples)
    if plan.data.pairs and plan.model.hf is not None:
        found[REFERENCE] = huggingface.fingerprint(Path(plan.model.hf))
    if plan.model.distill is not None:
        found[TEACHER] = huggingface.fingerprint(Path(plan.model.distill.teacher))
    return found


def warnings_of(run: Run, manifest: Manifest, settings: list[str]) -> Iterator[str]:
    """What differs from the sources of a checkpoint, or the order of samples, in one line each.

    `settings` are those that decide the order of samples and differ.
    """
    now, then, step = run.sources, manifest.sources, manifest.step
    different = {kind for kind in now.keys() & then.keys() if now[kind] != then[kind]}
    changed = "the order of samples changes at step"
    some = "some may come twice or not at all"
    if settings:
        yield f"was made with another {', '.join(settings)}: {changed} {step + 1}; {some}"
    elif DATA in different:
        yield f"was made with data files of another content: {changed} {step + 1}; {some}"
    elif SAMPLES in different:
        was = f"was made with {then[SAMPLES]} samples of data.target, of which there are"
        yield f"{was} {now[SAMPLES]} now: {changed} {step + 1}; {some}"
    if TEACHER in different:
        yield (
            "was made with other weights of train.distill.teacher: another teacher is learned "
            f"from, from step {step + 1} on"
        )
    if REFERENCE in different:
        yield (
            "was made with other weights of model.hf: they are the reference from step "
            f"{step + 1} on"
        )
