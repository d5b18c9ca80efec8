"""What a run reads beside its plan: data, and the model of a reference or a teacher.

A checkpoint tells their identities, so that a run which goes on with others says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from colotrain.data.prepare.identity import identity_of, versions_of
from colotrain.data.prepare.prepared import Prepared
from colotrain.engine.state.manifest import Manifest
from colotrain.engine.state.run_state import Run
from colotrain.events.kinds import Note
from colotrain.models import huggingface
from colotrain.models.objective import kept_of
from colotrain.spec.plan import RunPlan
from colotrain.spec.teacher import teacher_of

DATA, SAMPLES = "data", "num_samples"


def sources_of(plan: RunPlan, shards: Sequence[Prepared], *, num_samples: int) -> dict[str, str]:
    """Kind of source → its identity; `num_samples` are those of training.

    `shards` are those of the plan's files; there are none where data are the user's own.
    """
    found: dict[str, str] = {}
    if shards:
        found[DATA] = identity_of(shards)
    elif num_samples != sys.maxsize:  # a stream has no length
        found[SAMPLES] = str(num_samples)
    asked = teacher_of(plan.model, plan.train.precision) or plan.model
    if (kept := kept_of(plan.model)) is not None and asked.hf is not None:
        found[kept.source] = huggingface.fingerprint(Path(asked.hf))
    return found


def tell_changed_files(run: Run) -> None:
    """Warn of token files that somebody has changed since this rank opened them.

    They are read in place, step by step: the samples are no longer those of the steps before.
    """
    for path, version in versions_of(run.saver.files_in_place).items():
        if version != run.saver.files_in_place[path]:
            run.saver.files_in_place[path] = version
            what = f"warning: {path} has changed while the run reads it"
            text = f"{what}: the samples after step {run.step} may be others than before"
            run.events.write(Note(text=text))


def warnings_of(run: Run, manifest: Manifest, settings: list[str]) -> Iterator[str]:
    """What differs from the sources of a checkpoint, or the order of samples, in one line each.

    `settings` are those that decide the order of samples and differ.
    """
    now, then, step = run.saver.sources, manifest.sources, manifest.step
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
    if (kept := kept_of(run.plan.model)) is not None and kept.source in different:
        yield f"was made with other {kept.other.format(step=step + 1)}"
