"""What becomes of a frozen weight before an adapter trains on it: products that are added to it.

PiSSA (Meng et al. 2024) and OLoRA (Büyükakyüz 2024) begin with matrices that are a part of the
weight, and leave the rest of it frozen. The layer's output is at first what it was. Adapters that
are merged are added before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from colotrain.models.stored import StoredTensors
from colotrain.spec.plan import AdapterPlan

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of every name in PEFT's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`scale` times B A, in the shape of a weight [outputs, inputs]."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseChange:
    """What is added to the weight of a layer before it is frozen."""

    name: str
    """Name of the layer."""
    plan: AdapterPlan
    """Of the adapters that train."""
    is_adapted: bool
    """Whether one of these is on the layer."""
    transposed: bool
    """Whether the weight is [inputs, outputs]."""

    @property
    def merged(self) -> list[AdapterPlan]:
        """The adapters that are added to the weight."""
        return [plan for plan in self.plan.merge if plan.targets_layer(self.name)]

    @property
    def has_start(self) -> bool:
        """Whether an adapter begins with a part of the weight, which is taken out last."""
        return self.is_adapted and self.plan.init is not None

    @property
    def rank(self) -> int:
        """Sum of the ranks of all products."""
        ranks = [plan.rank_of(self.name) * (2 if plan.init else 1) for plan in self.merged]
        return sum(ranks) + (self.plan.rank_of(self.name) if self.has_start else 0)

    @property
    def scale(self) -> float:
        """The scale of the adapter that trains on the weight, or of the first that is merged."""
        return (self.plan if self.is_adapted else self.merged[0]).scale_of(self.name)

    def products(self, weight: Tensor) -> list[Product]:
        """The products to be added to `weight`, which is as the layer holds it."""
        matrix = weight.T if self.transposed else weight
        found: list[Product] = []
        for plan in self.merged:
            if plan.init is not None:
                found.append(_start(plan, self.name, with_products(matrix, found)))
            a, b = _stored(plan, self.name)
            found.append(Product(a=a, b=b, scale=plan.scale_of(self.name)))
        if self.has_start:
            found.append(_start(self.plan, self.name, with_products(matrix, found)))
        return found

    def apply(self, weight: Tensor, products: list[Product] | None = None) -> Tensor:
        """The weight with these products, which are computed unless they are given."""
        products = self.products(weight) if products is None else products
        changed = with_products(weight.T if self.transposed else weight, products)
        return changed.T if self.transposed else changed


def _start(plan: AdapterPlan, name: str, weight: Tensor) -> Product:
    """What an adapter begins with, taken out of the weight [outputs, inputs]."""
    assert plan.init is not None, "asked by the caller"
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    a, b = STARTS[plan.init](wide, plan.rank_of(name), plan.scale_of(name))
    if plan.path is None:  # the adapter begins with these matrices, in the weight's dtype
        a, b = a.to(weight.dtype), b.to(weight.dtype)
    return Product(a=a, b=b, scale=-plan.scale_of(name))


def _stored(plan: AdapterPlan, name: str) -> tuple[Tensor, Tensor]:
    """A and B of a layer in the files of an adapter."""
    stored = StoredTensors([Path(str(plan.path)) / WEIGHTS])
    return (
        stored.rows(f"{PREFIX}{name}.lora_A.weight"),
        stored.rows(f"{PREFIX}{name}.lora_B.weight"),
    )


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
