"""A distillation's teacher as a model, and what ranks keep of what it says.

Standard library only.
"""

from __future__ import annotations

from colotrain.spec.objectives import DistillPlan
from colotrain.spec.plan import ModelPlan

PART_BYTES = 64 << 20
"""Bytes of rows after which a rank writes a file of them."""
COPIES = 3
"""Copies of the rows that exist while they are written: single, stacked, and as a file's bytes."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""Precision of a run → dtype of its teacher, float32 in others."""


def teacher_of(model: ModelPlan, precision: str) -> ModelPlan | None:
    """The teacher as a model, in the run's precision; None under objectives without one."""
    if model.objective is None or model.objective.teacher is None:
        return None
    args = {"dtype": DTYPES.get(precision, "float32")}
    return ModelPlan(target="", hf=model.objective.teacher, args=args)


def kept_bytes(distill: DistillPlan, *, num_samples: int, seq_len: int) -> int:
    """Most host memory of a rank for what the teacher says of `num_samples` of its samples."""
    row_bytes = distill.row_size * 4 * seq_len
    return COPIES * min(num_samples * row_bytes, PART_BYTES + row_bytes)
