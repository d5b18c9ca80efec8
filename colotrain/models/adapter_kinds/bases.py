"""What becomes of a frozen weight before an adapter trains on it: products that are added to it.

PiSSA (Meng et al. 2024) and OLoRA (Büyükakyüz 2024) begin with matrices that are a part of the
weight, and leave the rest of it frozen. The layer's output is at first what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from colotrain.spec.plan import AdapterPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`scale` times B A, in the shape of a weight [outputs, inputs]."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float


def products_of(plan: AdapterPlan, name: str, weight: Tensor) -> list[Product]:
    """Return what is added to an adapted layer's `weight` [outputs, inputs] before it is frozen.

    The last one is what a new adapter begins with, and of which the scale is therefore below 0.
    """
    if plan.init is None:
        return []
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    a, b = STARTS[plan.init](wide, plan.rank_of(name), plan.scale_of(name))
    if plan.path is None:  # the adapter begins with these matrices, in the weight's dtype
        a, b = a.to(weight.dtype), b.to(weight.dtype)
    return [Product(a=a, b=b, scale=-plan.scale_of(name))]


def with_products(weight: Tensor, products: Iterable[Product]) -> Tensor:
    """Return the sum, computed in float32 or wider, in the weight's dtype."""
    found = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for product in products:
        found = found + product.scale * (product.b.to(found.dtype) @ product.a.to(found.dtype))
    return found.to(weight.dtype)


def _principal(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A and B of which `scale` B A is the nearest matrix of this rank (PiSSA, equations 2 to 4).

    The largest number of each row of A is above 0: singular vectors alone leave the signs open.
    """
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    largest = right.gather(1, right.abs().argmax(1, keepdim=True))
    signs, roots = largest.sign().squeeze(1), (values / scale).sqrt()
    return (signs * roots).unsqueeze(1) * right, left * (signs * roots)


def _orthonormal(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """The first rows of R and columns of Q of the weight's QR decomposition (OLoRA)."""
    q, r = torch.linalg.qr(weight)
    return r[:rank].contiguous(), q[:, :rank].contiguous()


STARTS: dict[str, Callable[[Tensor, int, float], tuple[Tensor, Tensor]]] = {
    "pissa": _principal,
    "olora": _orthonormal,
}
"""Name in settings → (A, B) of a weight in float32 or wider, the rank and the scale."""
