"""What is done to a model between its constructor and its first step, in the order of a list.

A transform changes the model in place and leaves in `Build` what later ones need. A new one is a
function here or in a module of its own, and a row of `TRANSFORMS`, which holds the order's reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.build.sequence import find_sequence
from colotrain.engine.comms import exchange
from colotrain.engine.comms.agreement import check_filled_alike
from colotrain.engine.comms.groups import Groups
from colotrain.engine.model.blocks import checkpoint_blocks_, compile_blocks_
from colotrain.engine.model.changed_inputs import CHANGING
from colotrain.engine.model.freezing import freeze_, names_of
from colotrain.engine.model.model_checks import check_dtypes
from colotrain.engine.model.precision import cast_dtype
from colotrain.engine.offload.group_bytes import estimate_non_model_bytes, measure_bytes
from colotrain.engine.offload.tiers import Tiers
from colotrain.engine.optim.parameter_settings import norms_and_biases
from colotrain.engine.optim.shard_optimizer import state_per_row
from colotrain.engine.pipeline.stage import Stage, keep_stage_
from colotrain.engine.sharding.context_parallel import divide_among_ranks_
from colotrain.engine.sharding.counted_waits import count_waits_
from colotrain.engine.sharding.expert_parallel import divide_experts_among_ranks_
from colotrain.engine.sharding.fsdp_internals import HAS_SEVERAL_MODULES
from colotrain.engine.sharding.grouping import UNPACKED, find_groups, is_gathered
from colotrain.engine.sharding.sharded_model import (
    ShardedModel,
    materialise_,
    shard_,
)
from colotrain.engine.sharding.shared_parameters import SharedParameters, share_parameters
from colotrain.engine.sharding.tensor_parallel import TensorGroup, divide_parameters_among_ranks_
from colotrain.engine.sharding.transport import Transport, install
from colotrain.errors import UsageError
from colotrain.models.loading import begin_training_
from colotrain.records import from_plain, to_plain
from colotrain.rundir import RunDir
from colotrain.spec.axes import PP
from colotrain.spec.plan import RunPlan
from colotrain.spec.plugins import stays_gathered
from colotrain.spec.sequence import BlockSequence

AHEAD_BYTES = 256 << 20
"""Bytes of whole parameters per core that a rank beside a GPU may draw ahead: a matrix of 8 B."""


@dataclass(slots=True, kw_only=True)
class Build:
    """A model that is being built: what transforms read, and what they find for later ones."""

    plan: RunPlan
    rundir: RunDir
    comms: Groups
    model: nn.Module
    trial: dict[str, Tensor] | None
    """The first micro-batch, on rank 0: others' forwards may behave differently."""
    samples: Callable[[], dict[str, Tensor]] | None = None
    """On rank 0: reads samples for forwards that look at values."""
    tell: Callable[[str], None]
    """Writes a note for the user."""
    beat: Callable[[], None] = lambda: None
    """Tells the launcher that this rank is at work, after each parameter that got its values."""
    step: int = 0
    """Step of the state that the run goes on from."""
    given: Set[str] = frozenset()
    """Parameters and buffers that may be left without values: that state has them."""

    frozen: dict[str, str] = field(init=False)
    """Name of each frozen parameter → why it is frozen."""
    undecayed: Set[str] = field(init=False)
    aliases: Mapping[str, tuple[str, ...]] = field(init=False)
    """Each name of a tied parameter → all of its names."""
    tensor: TensorGroup = field(default_factory=TensorGroup)
    groups: list[tuple[str, list[nn.Module]]] = field(init=False)
    stage: Stage = field(default_factory=Stage)
    tiers: Tiers | None = None
    sharded: ShardedModel = field(init=False)
    transport: Transport | None = None
    shared_parameters: SharedParameters | None = None


@dataclass(frozen=True, slots=True)
class Transform:
    """A row of the list: what it applies to the model, and when. All ranks must call `apply`."""

    name: str
    apply: Callable[[Build], None]
    after: frozenset[str] = frozenset()
    """Names of the transforms that must come before it."""
    why: str = ""
    """The reason for that."""
    applies: Callable[[RunPlan], bool] = lambda plan: True


def in_order(*transforms: Transform) -> tuple[Transform, ...]:
    """Return `transforms`, after checking that each follows those that it names, with a reason."""
    before: set[str] = set()
    for transform in transforms:
        assert transform.after <= before, f"{transform.name} comes too early"
        assert bool(transform.after) == bool(transform.why), transform.name
        before.add(transform.name)
    assert len(before) == len(transforms), "two transforms have one name"
    return transforms


def transform_(build: Build) -> None:
    """Apply to the model of `build` all transforms that its plan asks for. All ranks must call."""
    for transform in TRANSFORMS:
        if transform.applies(build.plan):
            transform.apply(build)


def freeze(build: Build) -> None:
    build.frozen = freeze_(build.model, build.plan.freeze, step=build.step)


def begin_training(build: Build) -> None:
    begin_training_(build.model)


def find_undecayed(build: Build) -> None:
    build.undecayed = norms_and_biases(build.model)
    tied = (names for names in names_of(build.model).values() if len(names) > 1)
    build.aliases = {name: tuple(names) for names in tied for name in names}


def divide_parameters(build: Build) -> None:
    build.tensor = divide_parameters_among_ranks_(build.model, build.plan, build.comms)


def divide_experts(build: Build) -> None:
    build.tensor = divide_experts_among_ranks_(build.model, build.plan, build.comms)


def agree_on_groups(build: Build) -> None:
    """Take the groups that rank 0 finds, with its micro-batch if the model is not colotrain's."""
    model, plan, found = build.model, build.plan, None
    if dist.get_rank() == 0:
        if plan.plugin.chunk_bytes is not None and not HAS_SEVERAL_MODULES:
            build.tell(UNPACKED)
        groups = find_groups(
            model,
            chunk_bytes=plan.plugin.chunk_bytes,
            batch=None if plan.model.is_shipped else build.trial,
            samples=build.samples,
            kind=lambda name: stays_gathered(name, plan.plugin),
            split=plan.plugin.split_blocks,
            tell=build.tell if is_gathered(plan) else None,
        )
        names = {id(module): name for name, module in module_tree.named_modules(model)}
        inside = [(name, [names[id(m)] for m in modules]) for name, modules in groups]
        found = inside, [n for n, m in module_tree.named_modules(model) if m in CHANGING]
    inside, changing = exchange.broadcast(found)
    CHANGING.update(model.get_submodule(name) for name in changing)
    build.groups = [(name, [model.get_submodule(m) for m in members]) for name, members in inside]
    check_dtypes(model, build.groups, plan.model, plan.freeze)


def keep_stage(build: Build) -> None:
    """Leave this rank's stage of the model, whose blocks rank 0 finds with its micro-batch."""
    model, plan, mesh = build.model, build.plan, build.plan.mesh
    found: Any = None if build.trial is None else to_plain(find_sequence(model, build.trial))
    sequence = from_plain(BlockSequence, exchange.broadcast(found))
    if sequence.against or sum(mesh.pp_split) != len(sequence.blocks):
        problem = sequence.against or f"it has {len(sequence.blocks)} blocks, not {mesh.pp_split}"
        raise UsageError(f"mesh.pp={mesh.pp}: {plan.model.value}: {problem}", "set mesh.pp=1")
    build.stage = keep_stage_(
        model,
        sequence,
        mesh.pp_split,
        build.comms.ranks.coords(build.comms.rank)[PP],
        chunks=mesh.pp_chunks,
        compute_dtype=cast_dtype(plan.train.precision),
    )


def divide_sequences(build: Build) -> None:
    divide_among_ranks_(build.model, build.plan, build.comms)


def recompute(build: Build) -> None:
    checkpoint_blocks_(build.model, build.plan.train.activation_checkpointing)


def compile_blocks(build: Build) -> None:
    own = {module for module, _ in build.stage.stand_ins.values()}
    compile_blocks_(build.model, own if build.stage.count > 1 else None)


def shard(build: Build) -> None:
    """Shard the groups, and let ranks of one host exchange through shared memory."""
    model, plan, stage, comms = build.model, build.plan, build.stage, build.comms
    build.groups = stage.own_groups(model, build.groups)
    if plan.mesh.pp > 1:
        stage.connect_(comms)
    if build.tensor.shard.size > 1:
        build.tensor.connect_(comms[build.tensor.axis], comms.device)
    if plan.plugin.budget is not None:
        sizes = measure_bytes(model, build.groups, plan, state_per_row(plan.optim))
        build.tiers = Tiers(plan, build.rundir, sizes, estimate_non_model_bytes(plan, sizes))
    offloads = build.tiers.policy.offloads if build.tiers else lambda index: False
    build.sharded = shard_(
        model,
        plan,
        comms,
        build.groups,
        offloads=offloads,
        tensor=build.tensor,
        stage=stage,
        frozen=build.frozen,
    )
    stage.install_(model)
    build.transport = install(build.sharded)
    if build.transport is not None or plan.plugin.dp_shard == 1:
        build.shared_parameters = share_parameters(build.sharded)


def offload(build: Build) -> None:
    assert build.tiers is not None
    build.tiers.attach(build.sharded, build.shared_parameters)


def fill(build: Build) -> None:
    """Give the parameters storage in their tiers, and values."""
    plan, tiers, shared_parameters = build.plan, build.tiers, build.shared_parameters

    def allocate(fresh: bool) -> None:
        if shared_parameters is not None:
            shared_parameters.allocate(fresh)
        if tiers is not None:
            tiers.move_parameters(fresh)
        if shared_parameters is not None:
            shared_parameters.populate()

    def release(tensor: Tensor) -> None:
        build.beat()
        if tiers is not None:
            tiers.release(tensor)

    uses_disk = tiers is not None and tiers.placement.uses_disk
    has_room = plan.cluster.device != "cpu" and not uses_disk  # the host holds less than later
    materialise_(
        build.sharded,
        device=plan.cluster.device,
        seed=plan.train.seed,
        allocate=allocate,
        release=release,
        given=build.given,
        ahead_bytes=AHEAD_BYTES * plan.cluster.threads_per_rank if has_room else 0,
    )
    check_filled_alike(build.model)


def count_waits(build: Build) -> None:
    if build.transport is None and build.comms.data_mesh.size() > 1:
        count_waits_(build.sharded)


def recomputes(how: str) -> Callable[[RunPlan], bool]:
    return lambda plan: plan.train.activation_checkpointing == how


TRANSFORMS = in_order(
    Transform("freeze", freeze),
    Transform("begin training", begin_training),
    Transform("find undecayed", find_undecayed),
    Transform(
        "divide parameters",
        divide_parameters,
        after=frozenset({"freeze", "find undecayed"}),
        why="modules have other classes then, and parts of their parameters",
        applies=lambda plan: plan.mesh.tp > 1,
    ),
    Transform(
        "divide experts",
        divide_experts,
        after=frozenset({"freeze", "find undecayed"}),
        why="parameters are parts of their own then",
        applies=lambda plan: plan.mesh.ep > 1,
    ),
    Transform(
        "agree on groups",
        agree_on_groups,
        after=frozenset({"freeze", "begin training", "divide parameters", "divide experts"}),
        why="a group is of one kind of parameters, found by a forward as in training, and has the "
        "bytes of this rank's parts",
    ),
    Transform(
        "keep stage",
        keep_stage,
        after=frozenset({"agree on groups"}),
        why="the forward that finds groups needs all blocks",
        applies=lambda plan: plan.mesh.pp > 1,
    ),
    Transform(
        "divide sequences",
        divide_sequences,
        after=frozenset({"agree on groups", "keep stage"}),
        why="no forward may run on a single rank afterwards",
        applies=lambda plan: plan.mesh.cp > 1,
    ),
    Transform(
        "recompute selectively",
        recompute,
        after=frozenset({"keep stage"}),
        why="blocks of other stages are not there any more",
        applies=recomputes("selective"),
    ),
    Transform(
        "compile",
        compile_blocks,
        after=frozenset({"divide sequences", "recompute selectively"}),
        why="the compiler must see which outputs are kept",
        applies=lambda plan: plan.train.compile,
    ),
    Transform(
        "recompute fully",
        recompute,
        after=frozenset({"compile"}),
        why="backward runs the compiled forward of a block again",
        applies=recomputes("full"),
    ),
    Transform(
        "shard",
        shard,
        after=frozenset(
            {"agree on groups", "keep stage", "recompute selectively", "compile", "recompute fully"}
        ),
        why="what replaces a block's forward is inside the hooks that gather and free",
    ),
    Transform(
        "offload",
        offload,
        after=frozenset({"shard"}),
        why="tiers hold a rank's shards",
        applies=lambda plan: plan.plugin.budget is not None,
    ),
    Transform(
        "fill",
        fill,
        after=frozenset({"shard", "offload"}),
        why="no rank ever has a whole model, and storage is in its tier from the beginning",
    ),
    Transform(
        "count waits",
        count_waits,
        after=frozenset({"fill"}),
        why="what a run waits for others is counted from its first step",
        applies=lambda plan: plan.cluster.device == "cpu",
    ),
)
"""All transforms, in their order."""
