"""What a rank does at the moment: the engine notes it; launcher, events and traces read it."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a rank does at the moment, in the words that messages show."""

    START = "start"
    TRIAL_FORWARD = "trial forward"
    TEACHER = "teacher"
    REFERENCE = "reference"
    DATA = "data"
    GLOBAL_PASS = "pass over the global batch"
    COMPUTE = "forward or backward"
    REDUCE = "reduce"
    PLACEMENT = "placement"
    NOISE = "gradient noise"
    OPTIMIZER = "optimizer"
    NONFINITE_SEARCH = "search for the first value that is not finite"
    ROLLBACK = "rollback"
    RECORD = "record"
    MEMORY_COPY = "memory copy"
    BUFFERS = "comparison of buffers"
    CORRUPTION_SEARCH = "search for corruption"
    EVALUATION = "evaluation"
    TEXT_SAMPLES = "samples of text"
    CHECKPOINT = "checkpoint"
    LEAVING = "leaving"
    """The rank leaves a step unfinished, to stop."""
    ENDING = "ending"
    """The rank has failed itself: it says why, and lets a save end."""

    @property
    def span(self) -> str:
        """Name of the phase in a trace, whose forward ends where the backward begins."""
        return _SPANS.get(self, self.value)


_SPANS = {Phase.COMPUTE: "forward", Phase.REDUCE: "wait", Phase.OPTIMIZER: "update"}

AFTER_A_STEP = frozenset(
    {
        Phase.RECORD,
        Phase.MEMORY_COPY,
        Phase.BUFFERS,
        Phase.CORRUPTION_SEARCH,
        Phase.EVALUATION,
        Phase.TEXT_SAMPLES,
        Phase.CHECKPOINT,
    }
)
"""Phases between two steps: they belong to the step before, all others to the one after."""

FINISHING = frozenset(
    {Phase.REDUCE, Phase.OPTIMIZER, Phase.RECORD, Phase.MEMORY_COPY, Phase.ENDING}
)
"""Phases that a rank can finish without a failed rank, which may have finished them; in seconds."""

LEFT_ALONE = frozenset({Phase.CHECKPOINT, Phase.ROLLBACK})
"""Phases that may not need the failed rank: other ranks continue, and nobody waits for them.

A checkpoint that is being written is waited for, unless it needs the failed rank.
"""


def where(phase: Phase | None, step: int, stage: int | None = None) -> str:
    """Return where in a run a rank is, as messages say it: `data (stage 1) of step 3`."""
    of_stage = "" if stage is None else f" (stage {stage})"
    return f"{phase or 'an unknown phase'}{of_stage} of step {step}"
