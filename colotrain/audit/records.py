"""What observed processes write for the checks, as events in files of their own."""

from __future__ import annotations

from typing import Any

from colotrain.events.event import EventKind, event_kind

TENSOR_PARALLEL = "tensor parallelism"
"""What `ObservedProcess.framework` is where parameters are sharded while they are used."""


@event_kind("process")
class ObservedProcess(EventKind):
    """A process that trains, once at its first optimizer step."""

    rank: int
    world_size: int
    pid: int
    torch: str
    model: str
    """Class of the root module."""
    framework: str
    """What wraps the model: DistributedDataParallel, fully_shard, …; empty: nothing known."""


@event_kind("membership")
class Membership(EventKind):
    """Which parameters the model and the optimizers have."""

    step: int
    trainable: list[str]
    frozen: list[str]
    missing: list[str]
    """Trainable parameters that no optimizer has."""
    apart: list[str]
    """Trainable parameters with gradients, of models of which no optimizer has any."""
    twice: list[str]
    """Parameters that one optimizer has twice."""
    loose: list[str]
    """Parameters in a loss that are in no module that ran and in no optimizer."""
    shared: list[str]
    """Parameters that several optimizers have."""
    foreign: int
    """Parameters of optimizers that belong to no module that ran and are in no loss."""
    copies: int
    """Number of the `foreign` parameters that have gradients, set by the script itself."""
    made_at: list[str]
    """Site at which the optimizer was made."""
    complete: bool
    """False if the optimizer has no parameters of the model but its own copies."""
    untied: list[str]
    """Embeddings that the model's configuration ties, and that are two parameters."""


@event_kind("observed")
class ObservedStep(EventKind):
    """One call of an optimizer's `step`, and what came before it since the last one."""

    step: int
    optimizer: int
    """Number of the optimizer, in the order of their first steps."""
    optimizer_name: str
    site: list[str]
    micro_batches: int
    """Forwards since the last step whose loss a backward was called for."""
    backwards: int
    """Calls of backward since the last step."""
    lines: int = 1
    """Lines that called backward equally often."""
    set_aside: int = 0
    """Earlier backwards that were for something else: an attack, a perturbation."""
    in_backward: bool = False
    """Whether the step was within a backward."""
    unseen: bool = False
    """Whether there are new gradients that no backward computed."""
    skips: int = 0
    """Steps that were left out since the last one, because gradients were not finite."""
    backward_at: list[str]
    again_at: list[str]
    """Last backward of a loss that had one in this step, or has a term that had; empty: none."""
    step_calls: int
    """Calls of the engine's `step` since the last real one; 1 without an engine."""
    closure_calls: int
    zero_calls: int
    lost: int
    """Backwards after which gradients were zeroed before the step."""
    lost_at: list[str]
    stale: bool | None = None
    """Whether gradients of the last step were still there at the first backward of this one."""
    clips: list[Any]
    """Fields of `Clip`."""
    scheduler_steps: int
    """Calls of one scheduler's `step` since the last step of the optimizer."""
    scheduler_at: list[str]
    scale: bool
    """Whether a GradScaler scaled a loss."""
    losses: list[Any]
    factor: float = 1.0
    """What the last micro-batch's loss was multiplied by, without a GradScaler's scale."""
    mark: str = ""
    """Hash of some elements of all trained weights before the step; empty for one rank."""
    rebuilt: bool
    """Whether this is a new optimizer's first step, after the single step of one like it."""
    off: list[str]
    """Dropout and BatchNorms in eval mode, of a model that was so in all its forwards."""
    off_at: list[str]
    """Where that model was put into eval mode, or its forward."""
    details: dict[str, Any] | None = None
    """Fields of `Details` in the steps that are looked into."""


@event_kind("clip")
class Clip(EventKind):
    """One call that clips gradients."""

    by: str
    """norm or value."""
    norm: float | None
    limit: float | None
    site: list[str]
    after: int
    """Backwards before the call."""
    scaled: bool
    """Whether gradients were still multiplied by the GradScaler's scale."""
    norms: dict[str, float]
    """Parameter → norm of its whole gradient before the call; empty where it is not known of all,
    and where the call's is another norm than the square root of the sum of squares."""


@event_kind("details")
class Details(EventKind):
    """A step that is looked into: sketches of its tensors, by parameter."""

    gradient: dict[str, str]
    """Gradients at the call of `step`."""
    before_clip: dict[str, str] | None = None
    """Gradients before a call clipped them; None if no call did."""
    declared: dict[str, str] | None = None
    """Sum over the micro-batches of the gradients of the losses given to backward."""
    base: dict[str, str] | None = None
    """Mean over the micro-batches of the losses' gradients before any factor was applied."""
    last: dict[str, str] | None = None
    """The last micro-batch's term of the sum `declared`."""
    again: dict[str, str] | None = None
    """What `declared` is if ranks sum the gradients so far after each backward: each earlier term
    counts as many times more as there are ranks."""
    why_not: str
    """Why there is no reference; empty if there is one."""
    factors: list[Any]
    """One list per micro-batch: [factor, site, whether it is a GradScaler's, how] of what scales
    the loss. How: divided, times, or mean of terms where it makes a mean of a sum's terms."""
    counts: list[Any]
    """One per backward: [reduction, targets, with ignored ones] of its cross-entropy, or None.

    Of what the script sums itself: summed, or none if it divides by that number, with the factor
    as in `factors`; own where the loss has such sums among its terms. Targets are then the numbers
    that are not zero.
    """
    inputs: list[str]
    """Hash of the model's inputs, per forward."""
    peers: list[int]
    """Ranks that share matrices which are sharded while they are used, this one among them: they
    are to have the same samples."""
    random: list[str]
    """Hash of the generators' states, per forward."""
    dropout: bool
    """Whether the model has dropout that is on."""
    moving: list[str]
    """BatchNorms of frozen parts whose running statistics moved."""
    weights: dict[str, str]
    """Parameters before the step."""
    change: dict[str, str]
    """Change of each parameter by the step."""
    reached: int = 1
    """Different sets of parameters that single backwards computed gradients of."""
    by_hand: bool = False
    """Whether gradients changed between the last backward and the step or the first clip."""
    hidden: bool = False
    """Whether a compiled function that was given a number computed a loss: it may divide by it."""
    unclipped: list[str]
    """Parameters with gradients that no call clipped, where some calls did."""
    at_rest: list[str]
    """Parameters whose learning rate is zero."""
    engine_clip: float = 1.0
    """Factor by which the engine clipped, within its step."""
    epsilon: float
    """Rounding error of the parameters' coarsest dtype."""
    plain_sgd: bool
    """Whether the update is the gradient times -lr."""
    lr: float | None


@event_kind("remark")
class Remark(EventKind):
    """Something that one process noticed once."""

    what: str
    """reentrant, failure, skipped, limit, no step, order, or sampler."""
    text: str
    site: list[str]


@event_kind("end")
class ObservedEnd(EventKind):
    """The end of a process that trained, unless it was killed."""

    backwards: int
    """Calls of backward that began."""
    backward_at: list[str]
    """Site of the last call of backward."""
    forwards: int
    """Forwards of training that began after the last step."""
    forward_at: list[str]
    failed: bool
    """Whether an exception ended the process."""
    mark: str = ""
    """`ObservedStep.mark` of the last weights."""


@event_kind("sharding")
class Sharding(EventKind):
    """Parameters as they were before ranks sharded them, written at the first optimizer step."""

    weights: dict[str, str]
    """Number of the call and name → sketch before the call."""
    kept: list[str] | None
    """Keys of weights that nothing replaced since, such as a checkpoint; None if unknown."""
    site: list[str]


@event_kind("engine")
class EngineInfo(EventKind):
    """What a framework's engine says about itself."""

    name: str
    accumulation_steps: int
    stage: int
