"""Checks beyond the schema's types: ranges, conflicting settings, unavailable settings.

They do not examine the machine or the model, but look whether files that settings name exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from colotrain.config.adapter import check_adapter
from colotrain.config.data import check_data
from colotrain.config.observing import check_observing
from colotrain.config.schema import Config, Optim, Schedule
from colotrain.config.shipped import recipe_names
from colotrain.config.stores import check_address
from colotrain.dotted import FORM
from colotrain.errors import Problem, suggest
from colotrain.records import to_plain
from colotrain.rundir import RUNS
from colotrain.schedulers import slurm_settings
from colotrain.schedulers.registry import SCHEDULERS
from colotrain.spec import objectives
from colotrain.spec.hub import is_hub_name
from colotrain.spec.observing import TRACKERS
from colotrain.spec.optimizers import OPTIMIZERS, optimizer_of
from colotrain.spec.ranges import ABOVE_ZERO, SHARE, Range, at_least
from colotrain.spec.rules import check_rules

RANGES: dict[str, Range] = {
    "data.seq_len": at_least(1),
    "data.workers": at_least(1),
    "data.num_workers": at_least(0),
    "data.validation_fraction": Range(
        "a number from 0 up to, but not, 1", lambda value: 0 <= value < 1
    ),
    "train.max_steps": at_least(1),
    "train.epochs": ABOVE_ZERO,
    "train.global_batch": at_least(1),
    "train.micro_batch": at_least(1),
    "train.seed": at_least(0),
    "train.grad_clip": ABOVE_ZERO,
    "train.eval_every": at_least(0),
    "train.eval_steps": at_least(0),
    "train.max_rollbacks": at_least(1),
    "train.stop_early.patience": at_least(1),
    "train.stop_early.min_delta": at_least(0),
    **objectives.RANGES,
    "optim.lr": ABOVE_ZERO,
    "optim.eps": ABOVE_ZERO,
    "optim.weight_decay": at_least(0),
    "optim.schedule.warmup_steps": at_least(0),
    "optim.schedule.warmup_ratio": SHARE,
    "optim.schedule.min_lr_ratio": SHARE,
    "accumulate.steps": at_least(1),
    "mesh.pp": at_least(1),
    "mesh.cp": at_least(1),
    "mesh.tp": at_least(1),
    "mesh.ep": at_least(1),
    "plugin.shard_size": at_least(1),
    "cluster.nodes": at_least(1),
    "cluster.procs_per_node": at_least(1),
    **slurm_settings.RANGES,
    "elastic.max_restarts": at_least(0),
    "elastic.check_every": at_least(0),
    "elastic.spare_nodes": at_least(0),
    "elastic.hang_timeout_s": ABOVE_ZERO,
    "elastic.grace_s": ABOVE_ZERO,
    "elastic.replace_slow_after_s": ABOVE_ZERO,
    "checkpoint.every": at_least(0),
    "checkpoint.minutes": ABOVE_ZERO,
    "checkpoint.keep": at_least(1),
    "observe.log_every": at_least(0),
    "observe.grads_every": at_least(0),
    "observe.metrics_port": at_least(1),
    "observe.samples.max_tokens": at_least(1),
    "observe.samples.every": at_least(1),
}
"""Key → the numbers that it may have."""
OR_NONE = {"train.grad_clip": "null for no clipping"}
CODE = (
    "model.target",
    "data.target",
    "data.collate",
    "data.sampler",
    "train.loss",
    "train.metrics",
    "train.on_gradients",
)
"""Settings that are dotted paths, or null."""
SCHEDULES = ("cosine", "linear", "constant", "wsd")


def check(settings: Config, *, is_whole: bool) -> Iterator[Problem]:
    """Yield all problems that can be found without the machine and the model.

    `is_whole` is False if parts are missing because of problems that are already reported; missing
    settings are then not reported again.
    """
    values = values_of(settings)
    for key, value in values.items():
        yield from _check_range(key, value)
    yield from _check_model(settings, is_whole=is_whole)
    has_model = settings.model.target is not None or settings.model.hf is not None
    yield from check_data(settings.data, is_whole=is_whole and has_model)
    yield from check_adapter(settings.adapter)
    yield from _check_optim(settings)
    yield from _check_nodes(settings)
    for scheduler in SCHEDULERS.values():
        yield from scheduler.check(getattr(settings.cluster, scheduler.name))
    for key in CODE:
        yield from _check_dotted(key, values[key])
    yield from check_address(settings.runs_dir)
    yield from _check_resume(settings.checkpoint.resume)
    yield from _check_rollback(settings)
    yield from check_rules(values)
    prompts = settings.observe.samples.prompts
    if not all(isinstance(prompt, str) and prompt for prompt in prompts):
        key, expected = "observe.samples.prompts", "texts of at least one character"
        yield Problem(key=key, value=prompts, expected=expected)
    yield from check_observing(settings)
    for name in settings.observe.trackers:
        if name not in TRACKERS:
            expected, key = f"one of {', '.join(TRACKERS)}", "observe.trackers"
            yield Problem(key=key, value=name, expected=expected, fix=suggest(name, TRACKERS))
    for step in settings.freeze.unfreeze:
        if step < 1:
            fix = "name parameters that train from the start in freeze.except"
            yield Problem(key="freeze.unfreeze", value=step, expected="steps from 1 on", fix=fix)


def values_of(settings: Config) -> dict[str, Any]:
    """Return all settings, from dotted key to value."""
    return dict(_leaves(to_plain(settings)))


def numbers_of_plan(plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the numbers of a plan that no settings can have; a file of it may be changed."""
    for key, value in _leaves(plain):
        if key != "data.workers":  # of which a plan has 0 for one per core
            yield from _check_range(key, value)


def _leaves(plain: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")


def _check_range(key: str, value: Any) -> Iterator[Problem]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    fix = f"or {OR_NONE[key]}" if key in OR_NONE else ""
    expected = None
    if isinstance(value, int) and abs(value) >= 1 << 63:
        expected = "an integer of 64 bits"  # it could not be computed with
    elif not math.isfinite(value):
        expected = "a finite number"
    elif key in RANGES and not RANGES[key].contains(value):
        expected = RANGES[key].expected
    if expected is not None:
        yield Problem(key=key, value=value, expected=expected, fix=fix or f"correct {key}")


def _check_model(settings: Config, *, is_whole: bool) -> Iterator[Problem]:
    model = settings.model
    folder = Path(model.hf or "").expanduser()
    if model.hf is not None and not folder.is_dir() and not is_hub_name(model.hf):
        expected, fix = "a model directory that exists", f"correct the path (now in {Path.cwd()})"
        yield Problem(key="model.hf", value=model.hf, expected=expected, fix=fix)
    if model.target is not None or model.hf is not None or not is_whole:
        return
    if settings.recipe is None:
        fix = f"for example recipe=llm-tiny; recipes: {', '.join(recipe_names())}"
        yield Problem(key="recipe", expected="a recipe (recipe=NAME), or model.target", fix=fix)
    else:
        fix = "set model.target, or build on a recipe that does: `defaults: [llm-tiny, _self_]`"
        yield Problem(key="model.target", expected="a model", fix=fix)


def _check_optim(settings: Config) -> Iterator[Problem]:
    optim, key, betas = settings.optim, "optim.betas", list(settings.optim.betas)
    if not all(0 <= beta < 1 for beta in betas):
        fix = "for example optim.betas=[0.9,0.95]"
        yield Problem(key=key, value=betas, expected="numbers from 0 up to, but not, 1", fix=fix)
    known = optimizer_of(optim.name)
    if optim.momentum is not None and known.momentum_beta is None:
        others = (name for name, o in OPTIMIZERS.items() if o.momentum_beta is not None)
        expected = f"nothing but for {' and '.join(others)}"
        fix = f"optim.name={optim.name} has optim.betas" if known.num_betas else "leave it out"
        yield Problem(key="optim.momentum", value=optim.momentum, expected=expected, fix=fix)
    elif optim.momentum is not None and not 0 <= optim.momentum < 1:
        expected, fix = "a number from 0 up to, but not, 1", "for example optim.momentum=0.9"
        yield Problem(key="optim.momentum", value=optim.momentum, expected=expected, fix=fix)
    if known.num_betas and len(betas) not in known.num_betas:
        fix = f"for example optim.betas={known.betas_example}"
        yield Problem(key=key, value=betas, expected=known.betas_are, fix=fix)
    if known.averages and betas and betas[0] == 0:
        expected = "a first number above 0: the mean is told by it from the last step"
        yield Problem(key=key, value=betas, expected=expected, fix="for example [0.9,0.95]")
    if ":" in optim.name:
        yield from _check_dotted("optim.name", optim.name)
    elif optim.name not in OPTIMIZERS:
        expected = f"one of {', '.join(OPTIMIZERS)}, or `package.module:Class`"
        fix = suggest(optim.name, OPTIMIZERS)
        yield Problem(key="optim.name", value=optim.name, expected=expected, fix=fix)
    if optim.args and ":" not in optim.name:
        expected = "nothing but for an optimizer of your own"
        yield Problem(key="optim.args", value=optim.args, expected=expected, fix="remove it")
    for index, rule in enumerate(optim.rules):
        for name, value in (("lr_scale", rule.lr_scale), ("weight_decay", rule.weight_decay)):
            if value is not None and not 0 <= value < math.inf:
                where = f"optim.rules[{index}].{name}"
                yield Problem(key=where, value=value, expected="0 or more", fix="correct it")
    yield from _check_schedule(optim)
    decay = optim.schedule.decay_steps
    if decay is not None and (optim.schedule.name != "wsd" or decay < 1):
        expected = "1 or more" if decay < 1 else "nothing but under optim.schedule.name=wsd"
        where = "optim.schedule.decay_steps"
        yield Problem(key=where, value=decay, expected=expected, fix="remove it")


def _check_schedule(optim: Optim) -> Iterator[Problem]:
    schedule, key = optim.schedule, "optim.schedule.name"
    if ":" not in schedule.name:
        if schedule.name not in SCHEDULES:
            expected = f"one of {', '.join(SCHEDULES)}, or `package.module:callable`"
            fix = suggest(schedule.name, SCHEDULES)
            yield Problem(key=key, value=schedule.name, expected=expected, fix=fix)
        return
    yield from _check_dotted(key, schedule.name)
    for name in ("warmup_steps", "warmup_ratio", "min_lr_ratio"):
        value = getattr(schedule, name)
        if value != getattr(Schedule(), name):
            expected = "nothing but for a schedule of colotrain's: the function decides"
            where = f"optim.schedule.{name}"
            yield Problem(key=where, value=value, expected=expected, fix="remove it")


def _check_nodes(settings: Config) -> Iterator[Problem]:
    cluster, elastic = settings.cluster, settings.elastic
    nodes, least, most = cluster.nodes, elastic.min_nodes, elastic.max_nodes
    if least is not None and not 1 <= least <= nodes:
        expected = f"from 1 to cluster.nodes, {nodes}"
        yield Problem(key="elastic.min_nodes", value=least, expected=expected, fix="or remove it")
    if most is not None and most < nodes:
        expected = f"at least cluster.nodes, {nodes}"
        yield Problem(key="elastic.max_nodes", value=most, expected=expected, fix="or remove it")
    most = max(nodes, most or 0)
    if elastic.spare_nodes > 0 and most == 1:
        yield Problem(
            key="elastic.spare_nodes",
            value=elastic.spare_nodes,
            expected="0 in a run on one node: node 0 leads the run and cannot be replaced",
            fix="set cluster.nodes or elastic.max_nodes to 2 or more",
        )
    yield from _check_replace_slow(settings)
    most += max(0, elastic.spare_nodes)
    if cluster.node_rank is not None and not 0 <= cluster.node_rank < most:
        expected = f"from 0 to {most - 1}, one of {most} nodes"
        yield Problem(
            key="cluster.node_rank",
            value=cluster.node_rank,
            expected=expected,
            fix="give each node a number of its own",
        )
    yield from check_head(cluster.rdzv_endpoint)


def _check_replace_slow(settings: Config) -> Iterator[Problem]:
    """Yield a problem if no node of the run could ever be left."""
    nodes, elastic = settings.cluster.nodes, settings.elastic
    most, least = max(nodes, elastic.max_nodes or 0), elastic.min_nodes or nodes
    if not elastic.replace_slow:
        return
    expected, fix = "", "remove it"
    if most == 1:
        expected = "false in a run on one node: there is no other to go on with"
    elif most == least and elastic.spare_nodes < 1:
        expected = f"false in a run that needs all its {nodes} nodes and has no spare ones"
        fix = f"set elastic.spare_nodes=1 and start one node more, or elastic.min_nodes={nodes - 1}"
    elif elastic.max_restarts == 0:
        expected = "false with elastic.max_restarts=0, which bounds how many nodes are left"
        fix = "raise elastic.max_restarts"
    if expected:
        yield Problem(key="elastic.replace_slow", value=True, expected=expected, fix=fix)


def check_head(head: str | None) -> Iterator[Problem]:
    """Yield a problem unless the address of node 0 is valid."""
    if head is not None and split_address(head) is None:
        fix = "for example cluster.rdzv_endpoint=node0:29500, the same on every node"
        expected = "HOST:PORT of node 0, with a port from 1 to 65535"
        yield Problem(key="cluster.rdzv_endpoint", value=head, expected=expected, fix=fix)


def split_address(text: str) -> tuple[str, int] | None:
    """Return host and port of `HOST:PORT` or `[HOST]:PORT`, or None for other text."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([\w.-]+)):(\d{1,5})", text)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        return None
    return found[1] or found[2], int(found[3])


def _check_dotted(key: str, value: str | None) -> Iterator[Problem]:
    if value is None:
        return
    module, colon, names = value.partition(":")
    if not colon or not all(n.isidentifier() for n in (*module.split("."), *names.split("."))):
        fix = "write the module, a colon, and the name of the function in it"
        if "." in value and ":" not in value:
            fix = "did you mean {}:{}?".format(*value.rsplit(".", 1))
        yield Problem(key=key, value=value, expected=FORM, fix=fix)


def _check_resume(resume: str) -> Iterator[Problem]:
    if resume not in ("auto", "none") and not find_resume(resume):
        expected = "auto, none, or the folder of a run or checkpoint"
        fix = f"correct the path (now in {Path.cwd()})"
        yield Problem(key="checkpoint.resume", value=resume, expected=expected, fix=fix)


def _check_rollback(settings: Config) -> Iterator[Problem]:
    if settings.train.on_nonfinite == "rollback" and not settings.checkpoint.every:
        key, value = "checkpoint.every", settings.checkpoint.every
        expected = "steps between checkpoints, for train.on_nonfinite=rollback to go back to"
        yield Problem(key=key, value=value, expected=expected, fix="for example 100")


def find_resume(resume: str) -> Path | None:
    """Return the folder of a run or checkpoint, given as a path or as a name under ./runs."""
    for folder in (Path(resume).expanduser(), RUNS / resume):
        if resume and folder.is_dir():
            return folder.absolute()
    return None
