"""The observer of one process of an audited command: it records the script's calls and steps.

No method raises into the script, and none communicates, except to gather the whole gradients and
weights of a sharded model, which all ranks do at the same steps.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.audit import model
from colotrain.audit.optimizers import (
    ENGINES,
    Optimizers,
    at_rest,
    is_plain_sgd,
    learning_rate,
    positions,
)
from colotrain.audit.records import Clip, Details, ObservedEnd, ObservedStep, Remark, Sharding
from colotrain.audit.reference import GATHERED, Taps, packed, sketch
from colotrain.audit.report import Report, rank, undivided, world_size
from colotrain.audit.sites import Site, here
from colotrain.audit.window import (
    Origin,
    Window,
    last_backward,
    leaves_of,
    number,
    origin_of,
    product,
)
from colotrain.events.event import EventKind
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir

FIRST, EVERY = 3, 20
"""Steps that are looked into: the first ones, and then every `EVERY`-th."""
FEW = 32
"""Remarks per process."""


class Observer:
    """State of one process; a fork starts with a new one."""

    def __init__(self, rundir: RunDir, *, steps: int) -> None:
        self.rundir, self.limit = rundir, steps
        self.quiet = 0
        """Above 0 within calls of the observer's own and within an engine's step."""
        self.backward_depth = 0
        self.optimizers = Optimizers()
        self.roots = model.Roots(self.optimizers.held)
        self.taps = Taps(lambda: self.is_looking and not self.quiet)
        self.window = Window()
        self.steps_before = 0
        """Steps of all optimizers before the GradScaler's step that is under way."""
        self.micro_batches = 0
        self.backwards = 0
        """Calls of backward that began."""
        self.backward_at = self.forward_at = Site("")
        self.forward_depth = 0
        """Calls of modules that are under way."""
        self.forwards = 0
        """Forwards of training since the last step."""
        self.marks: tuple[Sample, Sample] = {}, {}
        """Samples of weights and gradients after the last backward of a step looked into."""
        self.shards = Shards()
        self.epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Sampler → epoch of its last whole pass in which an optimizer made steps."""
        self.eval_calls: weakref.WeakKeyDictionary[nn.Module, Site] = weakref.WeakKeyDictionary()
        """Module → last call that put it into eval mode, and not one that it is in."""
        self.remarks: set[tuple[str, str]] = set()
        self.blocked = ""
        """Why the evidence is not complete; empty if it is."""
        self.loose: dict[int, str] = {}
        """Id of a parameter that a loss has and no optimizer and no module → what it is."""
        self.mark_before = ""
        self.before: dict[str, Tensor] = {}
        """Sketches of the weights before the step under way."""
        self.rows: dict[str, dict[str, Any]] = {}
        self.taken: dict[str, Tensor] = {}
        """Sketches of the gradients at the entry of the step."""
        self.records: EventWriter | None = None
        self.report: Report | None = None
        self.fused: Any = None
        """Optimizer that stepped within the backward under way."""

    # -- writing ---------------------------------------------------------------------------------

    def write(self, event: EventKind) -> None:
        if self.records is None:
            file = self.rundir.audit_file(rank=rank(), pid=os.getpid())
            self.records = EventWriter(file, inside=self.rundir.path)
        self.records.write(event)

    def remark(self, what: str, text: str, site: Site | None = None) -> None:
        site = site or here()
        if (what, site.line) not in self.remarks and len(self.remarks) < FEW:
            self.remarks.add((what, site.line))
            self.write(Remark(what=what, text=text, site=site.plain()))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run the observer's own code: silent to itself, and a failure is a remark."""
        self.quiet += 1
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.blocked = self.blocked or f"the observer failed: {text}"
            self.remark("failure", text)
        finally:
            self.quiet -= 1

    # -- calls of the script ---------------------------------------------------------------------

    @property
    def is_looking(self) -> bool:
        """Whether the step that is being accumulated is looked into."""
        coming = max(self.optimizers.steps, default=0) + 1
        return coming <= FIRST or coming % EVERY == 0

    def forward(self, module: nn.Module, inputs: object) -> None:
        if self.backward_depth:
            return
        is_root = self.roots.add(module)
        if not is_root and (self.forward_depth or not self.roots.have(module)):
            return  # a root's forward is under way, and calls its parts
        if torch.is_grad_enabled():
            self.forwards += 1
            self.forward_at, self.window.forwarded = here(), True
            if is_root:
                self.window.modes.note(module, self.forward_at)
        if not self.is_looking or self.window.is_closed:
            return
        self.taps.watch(self.roots)
        if is_root:
            self.window.modes.count(module)
        if torch.is_grad_enabled():
            self.window.wants_inputs |= model.has_leaf(inputs)
            self.window.given_number |= model.has_number(inputs)
            device = next(module.parameters()).device
            self.window.inputs.append(model.hash_of(inputs))
            self.window.random.append(model.random_state(device))

    def backward(self, losses: Any, *, plain: bool) -> None:
        """Before a call of backward, which is `plain` if it has one loss and no other arguments."""
        self.backward_at = here()
        if not self.backwards and self.report is None:
            atexit.register(self.end, os.getpid())
        self.backwards += 1
        if self.window.is_closed:
            return
        loss = losses if isinstance(losses, Tensor) else None
        if isinstance(losses, list | tuple) and len(losses) == 1:
            loss = losses[0]
        again = plain and loss is not None and self._was_begun(loss)
        if self.is_looking and self.window.backwards and self._was_aside(again=again):
            self.window = self.window.restarted()
        window = self.window
        window.began(self.backward_at)
        if again and window.backwards and self._has_gradients():
            window.again_at = self.backward_at
        origin = Origin() if loss is None else origin_of(loss)
        factors = origin.factors
        if window.backwards == 0 and self.is_looking and self.optimizers.steps:
            window.stale = not window.set_aside and self._has_gradients(stepped=True)
        if loss is not None and loss.numel() == 1:
            window.losses.append((loss.detach().clone(), product(factors)[0]))
        if self.is_looking:
            window.factors.append(factors)
            window.hidden |= origin.compiled and window.given_number
            counts, window.new_counts = window.new_counts, []
            window.counts.append(origin.count or (counts[0] if len(counts) == 1 else None))
            if loss is None or not plain or loss.numel() != 1:
                window.why_not = "backward was called with other arguments than one loss"
            window.product = product(factors)
            if loss is not None and not any(self.optimizers.steps):
                self._note_loose(loss)
            attached = self.taps.attach(self.roots, self.optimizers.outside(self.roots))
            window.why_not = window.why_not or attached or self.blocked

    def _note_loose(self, loss: Tensor) -> None:
        """Note parameters in a loss that are in no module that ran and in no optimizer."""
        if model.framework(self.roots.all()) in (*GATHERED, *ENGINES):
            return
        known = {id(p) for root in self.roots.all() for p in root.parameters()}
        for leaf in leaves_of(loss):
            if (
                isinstance(leaf, nn.Parameter)
                and id(leaf) not in known | self.optimizers.held().keys()
            ):
                self.loose[id(leaf)] = f"one of shape {list(leaf.shape)}"

    def _gradients(self, *, stepped: bool = False) -> Iterator[Tensor]:
        """Yield this rank's parts of gradients that an optimizer has, or one that made a step."""
        held = self.optimizers.held(stepped=stepped)
        for parameter in self.roots.parameters().values():
            if parameter.grad is not None and id(parameter) in held:
                own = model.local(parameter.grad.detach())
                yield own.coalesce().values() if own.is_sparse else own

    def _has_gradients(self, *, stepped: bool = False) -> bool:
        return any(bool(gradient.count_nonzero()) for gradient in self._gradients(stepped=stepped))

    def _was_begun(self, loss: Tensor) -> bool:
        """Whether a backward of this step began at a loss or a term of it; note that one does."""
        if loss.grad_fn is None:
            return False
        first = self.backwards - self.window.backwards
        return last_backward(loss, self.backwards) >= first

    def _was_aside(self, *, again: bool) -> bool:
        """Whether the backwards before this one were for something else than the step.

        Their gradients are gone, and this one computes them `again`, or they moved the weights
        meanwhile or were the inputs'.
        """
        if self.window.lost < self.window.backwards and self._has_gradients():
            return False
        if again and self.window.micro_batches == 1:
            return True
        return self.window.wants_inputs or has_changed(self.marks[0], sample(self._leaves()))

    def _leaves(self) -> Iterable[Tensor]:
        return self.roots.parameters().values()

    def after_backward(self) -> None:
        window = self.window
        if window.is_closed:
            return
        found = self.taps.detach()
        window.why_not = window.why_not or self.taps.failure
        if self.is_looking:
            for name, leaf in self.optimizers.outside(self.roots).items() if found else ():
                if name in found:
                    self.roots.bare[name] = weakref.ref(leaf)
            self.marks = sample(self._leaves()), self._sampled_gradients()
        window.add_reference(found, ranks=len(self.peers()) or world_size())
        window.backwards += 1
        self.micro_batches += 1
        if window.in_backward:
            self.stepped_in_backward()

    def mark(self) -> str:
        """Return a hash by which ranks tell whether their trained weights are equal."""
        held = self.optimizers.held() if world_size() > 1 else {}
        values = sample(p for p in self._leaves() if id(p) in held).values()
        return model.hash_of(torch.cat([v.to(torch.float64) for v in values])) if values else ""

    def _sampled_gradients(self) -> Sample:
        return sample(parameter.grad for parameter in self._leaves())

    def zeroed(self) -> None:
        window = self.window
        if window.is_closed or self.backward_depth:
            return
        is_new = window.backwards > window.lost
        if is_new and not all(g.isfinite().all() for g in self._gradients()):
            self.skipped("the script")
        self.window.zeroed(here())

    def unscaled(self) -> None:
        """After a GradScaler's scale was taken off the gradients."""
        self.window.unscaled = True
        if self.is_looking and not self.window.by_hand:
            self.marks = self.marks[0], self._sampled_gradients()

    def clipping(self, parameters: Iterable[Tensor]) -> None:
        """Before a call that clips the gradients of `parameters`."""
        window = self.window
        given = {id(p): p.grad is not None for p in parameters}
        window.clipped_ids.update(given)
        if self.is_looking and window.backwards not in (0, window.clipped_after):
            window.by_hand |= not are_same(self.marks[1], self._sampled_gradients())
            window.before_clip, window.clip_rows = gradients(self.roots)
            window.clipped_after = window.backwards
        window.norms = self.norms_of({key for key, has_gradient in given.items() if has_gradient})

    def norms_of(self, ids: Collection[int]) -> dict[str, float]:
        """Return the norms of the whole gradients of some parameters; empty if one is not known."""
        rows = (self.window.clip_rows if self.is_looking else None) or {}
        found = {n: rows[n]["norm"] for n in self.names_of(ids) if n in rows}
        is_known = len(found) == len(ids) and None not in found.values()
        return found if is_known else {}

    def clipped(self, *, by: str, norm: Any, limit: Any, power: float = 2.0) -> None:
        clip = Clip(
            by=by,
            norm=number(norm) if self.is_looking else None,
            limit=number(limit),
            site=here().plain(),
            after=self.window.backwards,
            scaled=self.window.scale and not self.window.unscaled,
            norms=self.window.norms if by == "norm" and power == 2.0 else {},
        )
        self.window.clips.append(clip.fields())

    def scheduled(self, scheduler: Any, how: str) -> None:
        if how != "_initial_step":
            self.window.schedulers[scheduler] += 1
            self.window.scheduler_at = here()

    def passing(self, sampler: Any, order: Iterator[int], site: Site) -> Iterator[int]:
        """Yield what a shuffling sampler of ranks does, and look whether passes are the same."""
        before = sum(self.optimizers.steps)
        yield from order
        with self.guarded():
            if sum(self.optimizers.steps) > before:
                if self.epochs.get(sampler) == sampler.epoch:
                    text = f"each epoch has the order of epoch {sampler.epoch}: call set_epoch"
                    self.remark("order", text, site)
                self.epochs[sampler] = sampler.epoch

    def skipped(self, by: str) -> None:
        """A step was left out, because gradients were not finite."""
        self.remark("skipped", f"{by} skipped a step: gradients were not finite")
        old = self.window
        self.window = Window(
            skips=old.skips + 1, schedulers=old.schedulers, scheduler_at=old.scheduler_at
        )

    # -- steps -----------------------------------------------------------------------------------

    def entering(self, optimizer: Any, *, gradient_of: Any = None, value_of: Any = None) -> None:
        """At the entry of an optimizer's step, after its closure."""
        window = self.window
        self.begin(optimizer)
        self.mark_before = self.mark()
        if not self.is_looking and (window.backwards or len(self.optimizers.steps) > 1):
            return
        old = self.taken
        if window.clipped_after < 0:
            window.by_hand = not are_same(self.marks[1], self._sampled_gradients())
        scale = number(getattr(optimizer, "grad_scale", None)) or 1.0
        self.taken, self.rows = gradients(self.roots, gradient_of, scale=scale)
        self.before = weights(self.roots, value_of)
        if not window.backwards:  # as they are if the script steps twice
            equal = (n in old and v.equal(old[n]) for n, v in self.taken.items() if v.any())
            window.unseen = not all(equal)

    def begin(self, optimizer: Any) -> None:
        """Write what is trained, at the first step."""
        if self.optimizers.number_of(optimizer) == 0 and self.report is None:
            self.report = Report(self.rundir)
            self.write(self.report.begin(self.roots))
            if (sharding := self.shards.event()) is not None:
                self.write(sharding)
            if not self.backwards:
                atexit.register(self.end, os.getpid())

    def stepping_in_backward(self, optimizer: Any) -> None:
        """An optimizer steps in a hook of a backward: all of that backward count as one step."""
        if not self.window.in_backward:
            self.begin(optimizer)
            self.window.in_backward = True
            self.fused = optimizer

    def stepped_in_backward(self) -> None:
        optimizer, self.fused = self.fused, None
        if optimizer is not None:
            self.count(0, optimizer, None)

    def stepped(self, optimizer: Any, *, value_of: Any = None, own: Any = None) -> None:
        """After an optimizer's step; `own` are its settings if they are not in `optimizer`."""
        index, looking = self.optimizers.number_of(optimizer), self.is_looking
        details = self.details(own or optimizer, value_of) if looking else None
        self.count(index, own or optimizer, details)
        if looking:
            step = self.optimizers.steps[index]
            self.write(
                self.optimizers.membership(
                    step, self.roots, loose=[*self.loose.values()], complete=own is None
                )
            )
        self.taps.whole.clear()
        if self.limit and min(self.optimizers.steps) >= self.limit:
            self.finish()

    def count(self, index: int, optimizer: Any, details: Details | None) -> None:
        """Write one step, and begin the next."""
        window, steps = self.window, self.optimizers.steps
        steps[index] += 1
        off, off_at = self.switched_off(optimizer)
        self.write(
            ObservedStep(
                step=steps[index],
                optimizer=index,
                optimizer_name=type(optimizer).__name__,
                site=here().plain(),
                micro_batches=window.micro_batches,
                backwards=window.backwards,
                lines=window.losses_per_batch,
                set_aside=window.set_aside,
                in_backward=window.in_backward,
                unseen=window.unseen,
                skips=window.skips,
                backward_at=window.backward_at.plain(),
                again_at=window.again_at.plain(),
                step_calls=max(1, window.step_calls),
                closure_calls=window.closure_calls,
                zero_calls=window.zero_calls,
                lost=window.lost,
                lost_at=window.lost_at.plain(),
                stale=window.stale,
                clips=window.clips,
                scheduler_steps=max(window.schedulers.values(), default=0),
                scheduler_at=window.scheduler_at.plain(),
                scale=window.scale,
                losses=undivided(window),
                factor=window.losses[-1][1] if window.losses else 1.0,
                mark=self.mark_before,
                rebuilt=self.optimizers.is_rebuilt(index, optimizer),
                off=off,
                off_at=off_at.plain(),
                details=None if details is None else details.fields(),
            )
        )
        if index == 0 and self.report is not None:
            rows = None
            if details is not None:
                rows = self.rows if window.clip_rows is None else window.clip_rows
            rate = learning_rate(optimizer)
            self.report.step(steps[0], window, rows, self.roots, lr=rate, total=self.micro_batches)
        self.window, self.forwards = Window(), 0

    def switched_off(self, optimizer: Any) -> tuple[list[str], Site]:
        """Return what is in eval mode while it trains, and the call of `eval`, if one was seen."""
        if not self.window.modes.off:
            return [], Site("")
        held = {id(parameter) for _, parameter in positions(optimizer)}
        names, root, forward_at = self.window.modes.switched_off(held)
        if root is None:
            return [], Site("")
        calls = (self.eval_calls.get(each) for each in (root, model.inner(root)))
        return names, next((site for site in calls if site is not None), forward_at)

    def details(self, optimizer: Any, value_of: Any) -> Details:
        window, after = self.window, weights(self.roots, value_of)
        apart = self.roots.apart()
        change = {n: after[n] - self.before[n] for n in after if n in self.before}
        why = window.why_not
        if not why and not window.declared:
            why = "no backward was seen before this step"
        return Details(
            gradient=texts(self.taken, apart),
            before_clip=None if window.before_clip is None else texts(window.before_clip, apart),
            declared=None if why else texts(window.declared, apart),
            base=None
            if why
            else texts({n: v / window.micro_batches for n, v in window.base.items()}, apart),
            last=None if why else texts(window.last, apart),
            again=None if why else texts(window.again, apart),
            why_not=why,
            reached=len(window.reached),
            by_hand=window.by_hand,
            hidden=window.hidden,
            unclipped=self.unclipped(optimizer),
            at_rest=self.names_of(at_rest(optimizer)),
            factors=[[factor.fields() for factor in each] for each in window.factors],
            counts=window.counts,
            inputs=window.inputs,
            peers=self.peers(),
            random=window.random,
            dropout=model.has_dropout(self.roots.all()),
            moving=window.modes.moving(self.roots.training()),
            weights=texts(self.before),
            change=texts(change),
            plain_sgd=is_plain_sgd(optimizer),
            engine_clip=window.engine_clip,
            lr=learning_rate(optimizer),
            epsilon=max(
                (torch.finfo(p.dtype).eps for p in self.roots.parameters().values()), default=0.0
            ),
        )

    def peers(self) -> list[int]:
        """Return the ranks that are to have this one's samples, as its matrices tell.

        Ranks that share parameters of more than two axes have experts, and samples of their own.
        """
        found = [ranks for ranks, most_axes in self.taps.peers.items() if ranks and most_axes <= 2]
        return sorted(found[0]) if len(found) == 1 else []

    def names_of(self, ids: Container[int]) -> list[str]:
        return [n for n, parameter in self.roots.parameters().items() if id(parameter) in ids]

    def unclipped(self, optimizer: Any) -> list[str]:
        """Return the optimizer's parameters with gradients that no call clipped, if one did."""
        held = {id(p) for _, p in positions(optimizer)} - self.window.clipped_ids
        return [n for n in self.names_of(held) if n in self.taken] if self.window.clips else []

    def end(self, pid: int) -> None:
        if os.getpid() == pid:  # not in a fork
            end = ObservedEnd(
                backwards=self.backwards,
                backward_at=self.backward_at.plain(),
                forwards=self.forwards,
                forward_at=self.forward_at.plain(),
                failed=hasattr(sys, "last_value"),
                mark=self.mark(),
            )
            self.write(end)
            if self.report is None:
                text = f"{self.backwards} backwards and no step of an optimizer: updates by hand?"
                self.remark("no step", text, self.backward_at)

    def finish(self) -> None:
        """End the script after the last step that was asked for."""
        self.remark("limit", f"ended after {self.limit} steps", Site(""))
        if self.report is not None:
            self.report.end(max(self.optimizers.steps))
        sys.exit(0)


def texts(sketches: dict[str, Tensor], without: Container[str] = ()) -> dict[str, str]:
    return {name: packed(values) for name, values in sketches.items() if name not in without}


def gradients(
    roots: model.Roots, gradient_of: Any = None, *, scale: float = 1.0
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return sketches and table rows of all gradients: collective where they are sharded.

    `gradient_of` returns a parameter's gradient where an engine has it; `scale` is a GradScaler's
    that the optimizer takes off by itself.
    """
    found, rows = {}, {}
    with model.gathered(roots.all()):
        for name, parameter in roots.parameters().items():
            gradient = parameter.grad if gradient_of is None else gradient_of(parameter)
            gradient = model.whole(gradient) if parameter.requires_grad else None
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = gradient if scale == 1.0 else gradient / scale
            rows[name] = model.row(parameter, gradient, "no backward of this step reached it")
            if gradient is not None and gradient.layout == torch.strided:
                found[name] = sketch(gradient)
    return found, rows


def weights(roots: model.Roots, value_of: Any = None) -> dict[str, Tensor]:
    """Return sketches of all parameters: collective where they are sharded."""
    found = {}
    with model.gathered(roots.all()):
        for name, parameter in roots.parameters().items():
            own = parameter.detach()
            value = model.whole(own) if value_of is None else value_of(parameter)
            if value is not None:
                found[name] = sketch(value)
    return found


class Shards:
    """Sketches of whole parameters before they were sharded, and of the shards right after."""

    def __init__(self) -> None:
        self.calls = 0
        self.weights: dict[str, str] = {}
        self.site = Site("")
        self.is_known = True
        """Whether it can be told that shards were replaced after the call."""
        self._after: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def sharding(self, modules: Sequence[nn.Module]) -> None:
        """Sketch the whole parameters before a call shards them, and leave earlier shards alone."""
        self.calls, self.site = self.calls + 1, self.site if self.weights else here()
        units = [m for module in modules for m in module.modules() if model.is_fsdp(m)]
        shards = {id(parameter) for unit in units for parameter in unit.parameters()}
        for name, parameter in named(modules):
            if id(parameter) in shards:
                continue
            if not model.is_dtensor(parameter) and not parameter.is_meta and parameter.numel():
                self.weights[f"{self.calls}:{name}"] = packed(sketch(parameter))

    def sharded(self, modules: Iterable[nn.Module]) -> None:
        """Sketch the shards after a call of `fully_shard`."""
        for name, parameter in named(modules):
            key = f"{self.calls}:{name}"
            if key in self.weights and model.is_dtensor(parameter):
                self._after[key] = parameter, sketch(model.local(parameter))

    def event(self) -> Sharding | None:
        """Return what is known at the first step; None if nothing was sharded."""
        if not self.weights:
            return None
        kept = [
            key
            for key, (parameter, values) in self._after.items()
            if sketch(model.local(parameter)).equal(values)
        ]
        self._after.clear()
        return Sharding(
            weights=self.weights, kept=kept if self.is_known else None, site=self.site.plain()
        )


def named(modules: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [pair for module in modules for pair in module.named_parameters()]


MOST = 32
"""Approximate number of elements per tensor."""
Sample = dict[tuple[int, torch.Size], Tensor]
"""Id and local shape of a tensor → some of its elements."""


def sample(tensors: Iterable[Tensor | None]) -> Sample:
    """Return copies of elements of this rank's part of each tensor, spread evenly over it."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            own = model.local(tensor.detach())
            flat = (own.coalesce().values() if own.is_sparse else own).reshape(-1)
            key = id(tensor), own.shape  # a shard and the whole may be one tensor in turns
            found[key] = flat[:: max(1, flat.numel() // MOST)].clone()
    return found


def are_same(one: Sample, other: Sample) -> bool:
    """Whether all tensors of both samples are the same ones, unchanged."""
    return one.keys() == other.keys() and not has_changed(one, other)


def has_changed(one: Sample, other: Sample) -> bool:
    """Whether a tensor of both samples is not the same in them."""
    return any(key in other and not value.equal(other[key]) for key, value in one.items())
