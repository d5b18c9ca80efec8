"""Values of `train.precision`: the dtype that forward and backward compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    dtype: str
    """torch's name of the dtype."""
    num_bytes: int
    is_cast: bool
    """Whether parameters are cast to the dtype; fp32 computes in each parameter's own dtype."""
    tolerance: float
    """Relative difference between two runs that rounding explains."""
    scales_loss: bool = False
    """Whether the loss is scaled, because small gradients would underflow otherwise."""


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(dtype="float32", num_bytes=4, is_cast=False, tolerance=1e-6),
    "bf16": Precision(dtype="bfloat16", num_bytes=2, is_cast=True, tolerance=3e-2),
    "fp16": Precision(dtype="float16", num_bytes=2, is_cast=True, tolerance=4e-3, scales_loss=True),
}
