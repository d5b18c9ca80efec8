"""The script's calls between two steps of an optimizer, and the factors that scale its losses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from torch import Tensor

from colotrain.audit.modes import Modes
from colotrain.audit.sites import Site

KEY = "colotrain"
"""Key in the metadata of an autograd node, of the factor that the node applies."""
SUMMED = "colotrain summed"
"""Key of what a sum adds: how many of its numbers are not zero, and how many there are."""
DONE = "colotrain backward"
"""Key of the number of the last backward that began at a node, or at a multiple of it."""
TRANSPARENT = (
    "ToCopyBackward0",
    "CloneBackward0",
    "AliasBackward0",
    "_DDPSinkBackward",
    "ViewBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsqueezeBackward0",
    "NegBackward0",
)
"""Nodes between a loss and its factors that change nothing but its shape, dtype or sign."""
ADDING = ("AddBackward0", "SubBackward0")
"""Nodes of a sum of two terms, whatever the sign of the second."""
OF_ONE_TERM = (*ADDING, "StackBackward0")
"""Nodes that change nothing where they have one term."""
SCALING = {"MulBackward0": False, "DivBackward0": True}
"""Node of a product or a quotient → whether it divides."""
OF_ONE = 1, 1
"""What is noted at a sum or a mean of one number, which changes nothing."""
EXACT = 1e-5
"""Relative difference of a number and its float32 value."""
MOST_NODES = 256
"""Nodes of a loss that are followed at most."""
MOST_NODES_OF_GRAPH = 100_000
"""Nodes that are followed at most to the leaves."""


@dataclass(slots=True)
class Factor:
    """One multiplication of a loss."""

    by: Any
    """The other operand: a number or a tensor without gradient."""
    inverse: bool
    """Whether the loss was divided by it."""
    operand: int
    """Position of the loss among the node's inputs."""
    site: Site
    loss_scale: bool
    """Whether this is the scale of a GradScaler, which it takes back."""
    terms: int
    """Number of terms whose sum the loss is."""

    @property
    def how(self) -> str:
        """As in `Details.factors`."""
        if self.terms > 1 and math.isclose(self.value() * self.terms, 1.0, rel_tol=EXACT):
            return "mean of terms"
        return "divided" if self.inverse else "times"

    def value(self) -> float:
        number = float(self.by)
        if not self.inverse:
            return number
        return 1 / number if number else math.inf

    def fields(self) -> list[Any]:
        """As in `Details.factors`."""
        return [self.value(), self.site.plain(), self.loss_scale, self.how]


@dataclass(slots=True)
class Window:
    """Calls since the last step of an optimizer; `ObservedStep` and `Details` explain most."""

    backwards: int = 0
    lines: list[str] = field(default_factory=list)
    """Line of each backward that was the first after a forward."""
    forwarded: bool = False
    """Whether a forward of training was seen since the last backward."""
    is_closed: bool = False
    """Whether a closure has run once: further runs, as in a line search, are not recorded."""
    in_backward: bool = False
    set_aside: int = 0
    skips: int = 0
    unseen: bool = False
    given_number: bool = False
    """Whether a forward was given a number, by which it may divide its loss."""
    hidden: bool = False
    wants_inputs: bool = False
    """Whether a forward's input is a leaf that requires a gradient."""
    by_hand: bool = False
    clipped_ids: set[int] = field(default_factory=set)
    """Ids of the parameters whose gradients were clipped."""
    backward_at: Site = field(default_factory=lambda: Site(""))
    again_at: Site = field(default_factory=lambda: Site(""))
    losses: list[tuple[Tensor, float]] = field(default_factory=list)
    """Detached losses, and the product of the factors that were applied to them."""
    zero_calls: int = 0
    lost: int = 0
    lost_at: Site = field(default_factory=lambda: Site(""))
    stale: bool | None = None
    clips: list[dict[str, Any]] = field(default_factory=list)
    schedulers: Counter[Any] = field(default_factory=Counter)
    """Calls of each scheduler's `step`."""
    scheduler_at: Site = field(default_factory=lambda: Site(""))
    scale: bool = False
    unscaled: bool = False
    step_calls: int = 0
    closure_calls: int = 0
    factors: list[list[Factor]] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)
    new_counts: list[Any] = field(default_factory=list)
    """Counts of cross-entropies since the last backward."""
    modes: Modes = field(default_factory=Modes)
    inputs: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    declared: dict[str, Tensor] = field(default_factory=dict)
    base: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)
    again: dict[str, Tensor] = field(default_factory=dict)
    reached: set[frozenset[str]] = field(default_factory=set)
    """Names of the parameters that each backward computed gradients of."""
    product: tuple[float, float] = (1.0, 1.0)
    """Factor of the micro-batch under way, and the GradScaler's scale."""
    why_not: str = ""
    before_clip: dict[str, Tensor] | None = None
    clip_rows: dict[str, dict[str, Any]] | None = None
    """Table rows of the gradients in `before_clip`."""
    norms: dict[str, float] = field(default_factory=dict)
    """Norms of the gradients that the call under way clips, as in `Clip`."""
    engine_clip: float = 1.0
    clipped_after: int = -1
    """Number of backwards before the clip that `before_clip` belongs to; -1: no clip."""

    @property
    def micro_batches(self) -> int:
        return len(self.lines)

    @property
    def losses_per_batch(self) -> int:
        """How many lines called backward, if all did equally often; else 1."""
        calls = Counter(self.lines)
        return len(calls) if len(set(calls.values())) == 1 else 1

    def began(self, site: Site) -> None:
        """Note that a backward begins: without a forward it is of the last micro-batch."""
        self.backward_at = site
        if self.forwarded or not self.lines:
            self.lines.append(str(site))
        self.forwarded = False

    def zeroed(self, site: Site) -> None:
        self.zero_calls += 1
        if self.backwards > self.lost:
            self.lost, self.lost_at = self.backwards, site

    def restarted(self) -> Window:
        """Return a window without the backwards that were for something else than the step."""
        return Window(
            set_aside=self.set_aside + self.backwards,
            zero_calls=max(1, self.zero_calls),
            forwarded=self.forwarded,
            wants_inputs=self.wants_inputs,
            skips=self.skips,
            schedulers=self.schedulers,
            scheduler_at=self.scheduler_at,
            scale=self.scale,
            closure_calls=self.closure_calls,
            step_calls=self.step_calls,
            new_counts=self.new_counts,
            modes=self.modes,
            inputs=self.inputs,
            random=self.random,
        )

    def add_reference(self, gradients: dict[str, Tensor], *, ranks: int) -> None:
        """Add the sketches of a micro-batch's gradients, as its backward computed them."""
        self.reached.add(frozenset(gradients))
        factor, scale = self.product
        self.last = {name: value / scale for name, value in gradients.items()}
        for name, value in self.last.items():
            self.declared[name] = self.declared.get(name, 0) + value
            self.again[name] = self.again.get(name, 0) * ranks + value
            self.base[name] = self.base.get(name, 0) + value / factor


@dataclass(slots=True)
class Origin:
    """What was done to a loss before its backward."""

    factors: list[Factor] = field(default_factory=list)
    """Factors of the whole loss, the last one first."""
    count: list[Any] | None = None
    """What the loss sums, as in `Details.counts`; None: it is not known to be a sum."""
    compiled: bool = False
    """Whether a compiled function computed the loss, in which no factor is seen."""


def origin_of(loss: Tensor) -> Origin:
    """Follow a loss to where it was computed, through the factors that were applied to it."""
    return _origin(loss.grad_fn, loss.output_nr, iter(range(MOST_NODES)))


def _origin(node: Any, number: int, budget: Iterator[int]) -> Origin:
    found: list[Factor] = []
    for _ in budget:
        if node is None:
            break
        factor, summed = factor_of(node), node.metadata.get(SUMMED)
        following = [place for place, (own, _) in enumerate(node.next_functions) if own is not None]
        if factor is not None:
            found.append(factor)
            place = factor.operand
        elif node.name() in TRANSPARENT:
            place = number
        elif len(following) == 1 and (node.name() in OF_ONE_TERM or summed == OF_ONE):
            (place,) = following
        elif terms := _terms(node, summed):
            whole = reduce(_together, (_origin(term, place, budget) for term, place in terms))
            return Origin([*found, *whole.factors], whole.count)
        else:
            if summed is not None:
                return _sum_of(found, *summed)
            return Origin(found, compiled="CompiledFunction" in node.name())
        node, number = node.next_functions[place]
    return Origin(found)


def factor_of(node: Any) -> Factor | None:
    """The factor of a product or quotient of one loss and a number; None for other nodes.

    Where no method of a tensor made it (`torch.div(loss, 4)`), autograd knows the number, and
    nobody the line.
    """
    noted = node.metadata.get(KEY)
    following = [place for place, (own, _) in enumerate(node.next_functions) if own is not None]
    if noted is not None or node.name() not in SCALING or len(following) != 1:
        return noted
    (place,), inverse = following, SCALING[node.name()]
    by = node._saved_other if place == 0 else node._saved_self
    if by is None or by.numel() != 1 or (inverse and place):
        return None
    return Factor(by.detach(), inverse, place, Site(""), False, 1)


def _terms(node: Any, summed: Any) -> list[tuple[Any, int]]:
    """The terms that a node adds, if they are losses themselves: two, or those of a stack."""
    (inner, _), *more = node.next_functions or [(None, 0)]
    if node.name() in ADDING and inner is not None and more[0][0] is not None:
        return list(node.next_functions)
    is_stack = not more and inner is not None and inner.name() == "StackBackward0"
    if not is_stack or summed is None or summed[1] != len(inner.next_functions):
        return []
    return [(term, place) for term, place in inner.next_functions if term is not None]


def _sum_of(factors: list[Factor], num: int, whole: int) -> Origin:
    """The origin of a sum: with its mean, the division by its own number is no factor."""
    for place, factor in enumerate(factors):
        value = factor.value()
        if any(size and math.isclose(value, 1 / size, rel_tol=EXACT) for size in (num, whole)):
            others = factors[:place] + factors[place + 1 :]
            return Origin(others, ["none", num, whole, factor.fields()])
    return Origin(factors, ["summed", num, whole])


def _together(one: Origin, other: Origin) -> Origin:
    """The origin of a loss of two terms: the factors that both have."""
    left, common = list(other.factors), []
    for factor in one.factors:
        same = [o for o in left if math.isclose(o.value(), factor.value(), rel_tol=EXACT)]
        if same:
            left.remove(same[0])
            common.append(factor)
    terms = ((one, len(common) == len(one.factors)), (other, not left))
    whole = [term.count for term, is_whole in terms if is_whole and term.count is not None]
    sums = [term.count for term, _ in terms if term.count and term.count[0] != "none"]
    count = next((count for count in whole if count[0] != "none"), None)
    if count is None and sums:
        count = ["own", *sums[0][1:3]]
    return Origin(common, count)


def note_factor(result: Any, loss: Any, by: Any, *, inverse: bool, site: Site, scale: bool) -> None:
    """Note at the node of `result` that it is `loss` times or divided by `by`."""
    if isinstance(by, Tensor):
        if by.requires_grad or by.numel() != 1:
            return
        by = by.detach()
    elif not isinstance(by, int | float):
        return
    node = result.grad_fn
    if node is None or not isinstance(loss, Tensor) or loss.numel() != 1:
        return
    inputs = [following for following, _ in node.next_functions]
    operand = next((i for i, following in enumerate(inputs) if following is not None), None)
    if operand is not None:
        terms = num_terms(loss.grad_fn)
        node.metadata[KEY] = Factor(by, inverse, operand, site, scale, terms)


def last_backward(loss: Tensor, number: int) -> int:
    """Note that backward `number` begins at a loss, and return the last one before.

    That is one that began at this loss or at a term of it, whatever either was multiplied by.
    """
    whole: Any = loss.grad_fn
    while _scales(whole) and len(following := _following(whole)) == 1:
        (whole,) = following
    nodes, last = [whole], 0
    for _ in range(MOST_NODES):
        if not nodes:
            break
        node = nodes.pop()
        last = max(last, node.metadata.get(DONE, 0))
        if _scales(node) or node.name() in ADDING:
            nodes += _following(node)
    if "AccumulateGrad" not in whole.name():  # a parameter is no loss
        whole.metadata[DONE] = number
    return last


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a loss has gradients for."""
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes and len(seen) < MOST_NODES_OF_GRAPH:
        node: Any = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += _following(node)
            if hasattr(node, "variable"):
                yield node.variable


def _scales(node: Any) -> bool:
    return factor_of(node) is not None or node.name() in TRANSPARENT


def _following(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def num_terms(node: Any) -> int:
    """Return how many terms a node adds, through the additions before it; 0 where they are many."""
    nodes, found = [node], 0
    for _ in range(MOST_NODES):
        if not nodes:
            return found
        node = nodes.pop()
        if node is not None and node.name() in ADDING:
            nodes += [following for following, _ in node.next_functions if following is not None]
        else:
            found += 1
    return 0


def number(value: Any) -> float | None:
    """Return a number that may be a tensor, or None."""
    try:
        return float(value.full_tensor() if hasattr(value, "full_tensor") else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def target_counts(target: Tensor, ignore_index: int) -> list[int]:
    """Return how many targets a cross-entropy counts, and how many it is given."""
    if target.dtype.is_floating_point:
        return [target.shape[0] if target.dim() else 1] * 2
    return [int((target != ignore_index).sum()), target.numel()]


def product(factors: list[Factor]) -> tuple[float, float]:
    """Return the product of the factors, and of those that are a GradScaler's scale alone."""
    scale = math.prod(f.value() for f in factors if f.loss_scale)
    return math.prod(f.value() for f in factors if not f.loss_scale), scale
