"""What `train.precision` means: the dtype that forward and backward compute in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    dtype: str
    """torch's name of it."""
    num_bytes: int
    is_cast: bool
    """Parameters are cast to it; fp32 computes in each parameter's own."""
    tolerance: float
    """What its rounding explains between two runs, relative."""
    scales_loss: bool = False
    """Small gradients would vanish without a scaled loss."""


PRECISIONS = {
    "fp32": Precision(dtype="float32", num_bytes=4, is_cast=False, tolerance=1e-6),
    "bf16": Precision(dtype="bfloat16", num_bytes=2, is_cast=True, tolerance=3e-2),
    "fp16": Precision(dtype="float16", num_bytes=2, is_cast=True, tolerance=4e-3, scales_loss=True),
}
