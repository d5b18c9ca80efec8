"""What one process of an audited command sees, and what it writes of it.

No method raises into the script and none communicates, but for the whole gradients of a sharded
model, which all ranks gather at the same steps.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.audit import model
from colotrain.audit.records import (
    Clip,
    Details,
    Membership,
    ObservedEnd,
    ObservedStep,
    Remark,
)
from colotrain.audit.reference import Taps
from colotrain.audit.report import Report, rank, undivided
from colotrain.audit.shards import Shards
from colotrain.audit.sites import Site, here
from colotrain.audit.sketch import packed, sketch
from colotrain.audit.window import Window, factors_of, number, product
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
        self.roots = model.Roots()
        self.taps = Taps(lambda: self.is_looking and not self.quiet)
        self.window = Window()
        self.optimizers: list[weakref.ref[Any]] = []
        self.made_at: weakref.WeakKeyDictionary[Any, Site] = weakref.WeakKeyDictionary()
        self.steps: list[int] = []
        self.steps_before = 0
        """Steps of all optimizers before the GradScaler's step that is under way."""
        self.micro_batches = 0
        self.backwards = 0
        """Calls of backward that began."""
        self.backward_at = self.forward_at = Site("")
        self.forwards = 0
        """Forwards of training since the last step."""
        self.shards = Shards()
        self.remarks: set[tuple[str, str]] = set()
        self.blocked = ""
        """Why the evidence is not complete; empty if it is."""
        self.before: dict[str, Tensor] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.taken: dict[str, Tensor] = {}
        self.records: EventWriter | None = None
        self.report: Report | None = None

    # -- writing ---------------------------------------------------------------------------------

    def write(self, event: EventKind) -> None:
        if self.records is None:
            self.records = EventWriter(self.rundir.audit_file(rank=rank(), pid=os.getpid()))
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
        coming = max(self.steps, default=0) + 1
        return coming <= FIRST or coming % EVERY == 0

    def forward(self, module: nn.Module, inputs: object) -> None:
        if self.backward_depth or not self.roots.add(module):
            return
        if torch.is_grad_enabled():
            self.forwards += 1
            self.forward_at = here()
        if not self.is_looking:
            return
        self.taps.watch(self.roots)
        if torch.is_grad_enabled():
            device = next(module.parameters()).device
            self.window.inputs.append(model.hash_of(inputs))
            self.window.random.append(model.random_state(device))

    def backward(self, losses: Any, *, plain: bool) -> None:
        """Before a call of backward, which is `plain` if it has one loss and no other arguments."""
        window = self.window
        window.backward_at = self.backward_at = here()
        self.backwards += 1
        loss = losses if isinstance(losses, Tensor) else None
        if isinstance(losses, list | tuple) and len(losses) == 1:
            loss = losses[0]
        factors = [] if loss is None else factors_of(loss)
        if window.micro_batches == 0 and self.is_looking and self.steps:
            window.stale = self._has_gradients() and not window.zero_calls
        if loss is not None and loss.numel() == 1:
            window.losses.append((loss.detach().clone(), product(factors)[0]))
        if self.is_looking:
            window.factors.append(factors)
            counts, window.new_counts = window.new_counts, []
            window.counts.append(counts[0] if len(counts) == 1 else None)
            if loss is None or not plain or loss.numel() != 1:
                window.why_not = "backward was called with other arguments than one loss"
            window.product = product(factors)
            window.why_not = window.why_not or self.taps.attach(self.roots) or self.blocked

    def _has_gradients(self) -> bool:
        found = (p.grad for p in self.roots.parameters().values() if p.requires_grad)
        own = (model.local(gradient) for gradient in found if gradient is not None)
        return any(bool(gradient.detach().count_nonzero()) for gradient in own)

    def after_backward(self) -> None:
        self.window.add_reference(self.taps.detach())
        self.window.micro_batches += 1
        self.micro_batches += 1

    def zeroed(self) -> None:
        self.window.zeroed(here())

    def clipping(self) -> None:
        """Before a call that clips gradients."""
        window = self.window
        if self.is_looking and window.micro_batches not in (0, window.clipped_after):
            window.before_clip, window.clip_rows = self.take()
            window.clipped_after = window.micro_batches

    def clipped(self, *, by: str, norm: Any, limit: Any) -> None:
        clip = Clip(
            by=by,
            norm=number(norm) if self.is_looking else None,
            limit=number(limit),
            site=here().plain(),
            after=self.window.micro_batches,
            scaled=self.window.scale and not self.window.unscaled,
        )
        self.window.clips.append(clip.fields())

    def scheduled(self, how: str) -> None:
        if how != "_initial_step":
            self.window.scheduler_steps += 1
            self.window.scheduler_at = here()

    def skipped(self) -> None:
        """A GradScaler left a step out, because gradients were not finite."""
        self.remark("skipped", "a GradScaler skipped a step: gradients were not finite")
        self.window = Window()

    # -- steps -----------------------------------------------------------------------------------

    def take(self, gradient_of: Any = None) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Return sketches and table rows of all whole gradients; collective where sharded."""
        found, rows = {}, {}
        with model.gathered(self.roots.all()):
            for name, parameter in self.roots.parameters().items():
                why = "no backward of this step reached it"
                gradient = parameter.grad if gradient_of is None else gradient_of(parameter)
                gradient = model.whole(gradient) if parameter.requires_grad else None
                rows[name] = model.row(parameter, gradient, why)
                if gradient is not None and gradient.layout == torch.strided:
                    found[name] = sketch(gradient)
        return found, rows

    def weights(self, value_of: Any = None) -> dict[str, Tensor]:
        with model.gathered(self.roots.all()):
            return {
                name: sketch(value)
                for name, p in self.roots.parameters().items()
                if (value := model.whole(p.detach()) if value_of is None else value_of(p))
                is not None
            }

    def entering(self, optimizer: Any, *, gradient_of: Any = None, value_of: Any = None) -> None:
        """At the entry of an optimizer's step, after its closure."""
        if self.number_of(optimizer) == 0 and self.report is None:
            self.report = Report(self.rundir)
            self.write(self.report.begin(self.roots))
            if (sharding := self.shards.event()) is not None:
                self.write(sharding)
            atexit.register(self.end, os.getpid())
        if self.is_looking:
            self.taken, self.rows = self.take(gradient_of)
            self.before = self.weights(value_of)

    def number_of(self, optimizer: Any) -> int:
        for index, known in enumerate(self.optimizers):
            if known() is optimizer:
                return index
        self.optimizers.append(weakref.ref(optimizer))
        self.steps.append(0)
        return len(self.optimizers) - 1

    def stepped(self, optimizer: Any, *, value_of: Any = None, own: Any = None) -> None:
        """After an optimizer's step; `own` are its settings if they are not in `optimizer`."""
        index, looking, window = self.number_of(optimizer), self.is_looking, self.window
        self.steps[index] += 1
        step = self.steps[index]
        details = self.details(own or optimizer, value_of) if looking else None
        self.write(
            ObservedStep(
                step=step,
                optimizer=index,
                optimizer_name=type(own or optimizer).__name__,
                site=here().plain(),
                micro_batches=window.micro_batches,
                backward_at=window.backward_at.plain(),
                step_calls=max(1, window.step_calls),
                closure_calls=window.closure_calls,
                zero_calls=window.zero_calls,
                lost=window.lost,
                lost_at=window.lost_at.plain(),
                stale=window.stale,
                clips=window.clips,
                scheduler_steps=window.scheduler_steps,
                scheduler_at=window.scheduler_at.plain(),
                scale=window.scale,
                losses=undivided(window),
                details=None if details is None else details.fields(),
            )
        )
        if looking:
            self.write(self.membership(step, complete=own is None))
        if index == 0 and self.report is not None:
            rows = None
            if looking:
                rows = self.rows if window.clip_rows is None else window.clip_rows
            self.report.step(
                step, window, rows, lr=learning_rate(own or optimizer), total=self.micro_batches
            )
        self.window, self.forwards = Window(), 0
        self.taps.whole.clear()
        if self.limit and min(self.steps) >= self.limit:
            self.finish()

    def details(self, optimizer: Any, value_of: Any) -> Details:
        window, after = self.window, self.weights(value_of)
        change = {n: after[n] - self.before[n] for n in after if n in self.before}
        why = window.why_not
        if not why and not window.declared:
            why = "no backward was seen before this step"
        return Details(
            gradient=texts(self.taken),
            before_clip=texts(window.before_clip) if window.before_clip is not None else None,
            declared=None if why else texts(window.declared),
            base=None
            if why
            else texts({n: v / window.micro_batches for n, v in window.base.items()}),
            last=None if why else texts(window.last),
            why_not=why,
            factors=[
                [[f.value(), f.site.plain(), f.loss_scale] for f in each] for each in window.factors
            ],
            counts=window.counts,
            inputs=window.inputs,
            random=window.random,
            dropout=model.has_dropout(self.roots.all()),
            weights=texts(self.before),
            change=texts(change),
            plain_sgd=is_plain_sgd(optimizer),
            engine_clip=window.engine_clip,
            lr=learning_rate(optimizer),
            epsilon=max(
                (torch.finfo(p.dtype).eps for p in self.roots.parameters().values()), default=0.0
            ),
        )

    def membership(self, step: int, *, complete: bool) -> Membership:
        parameters = self.roots.parameters()
        optimizers = [o for ref in self.optimizers if (o := ref()) is not None]
        groups = [group for o in optimizers for group in getattr(o, "param_groups", ())]
        held = (id(p) for group in groups if complete for p in group["params"])
        counts = Counter(held)
        ids = {id(p) for p in parameters.values()}
        made = next((self.made_at[o] for o in optimizers if o in self.made_at), Site(""))
        return Membership(
            step=step,
            trainable=[n for n, p in parameters.items() if p.requires_grad],
            frozen=[n for n, p in parameters.items() if not p.requires_grad],
            missing=[
                n
                for n, p in parameters.items()
                if complete and p.requires_grad and id(p) not in counts
            ],
            twice=[n for n, p in parameters.items() if counts[id(p)] > 1],
            foreign=sum(1 for key in counts if key not in ids),
            made_at=made.plain(),
            complete=complete,
        )

    def end(self, pid: int) -> None:
        if os.getpid() == pid:  # not in a fork
            end = ObservedEnd(
                backwards=self.backwards,
                backward_at=self.backward_at.plain(),
                forwards=self.forwards,
                forward_at=self.forward_at.plain(),
                failed=hasattr(sys, "last_value"),
            )
            self.write(end)

    def finish(self) -> None:
        """End the script after the last step that was asked for."""
        self.remark("limit", f"ended after {self.limit} steps", Site(""))
        if self.report is not None:
            self.report.end(max(self.steps))
        sys.exit(0)


def texts(sketches: dict[str, Tensor]) -> dict[str, str]:
    return {name: packed(values) for name, values in sketches.items()}


def learning_rate(optimizer: Any) -> float | None:
    return number(optimizer.param_groups[0].get("lr"))


def is_plain_sgd(optimizer: Any) -> bool:
    """Whether one step adds -lr times the gradient, with one lr and nothing else."""
    groups = optimizer.param_groups
    return "SGD" in type(optimizer).__name__ and all(
        not group.get("momentum")
        and not group.get("weight_decay")
        and not group.get("maximize")
        and group.get("lr") == groups[0].get("lr")
        for group in groups
    )
