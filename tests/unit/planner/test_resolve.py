"""Resolving: what follows from what was written, and every problem with it at once."""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from colotrain import host
from colotrain.config.sizes import parse_size
from colotrain.doctor.finding import Environment
from colotrain.doctor.machine import check_memory
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.planner import budget as budget_module
from colotrain.planner import machine as machine_module
from colotrain.planner.layout import Layout
from colotrain.planner.machine import Machine, this_machine
from colotrain.planner.model_states import model_state_bytes
from colotrain.rundir import OFFLOAD
from colotrain.spec.batch import Sizes, solve
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.plan import BatchPlan, FreezePlan, ModelPlan, OptimPlan, RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.spec.quantities import format_size
from colotrain.spec.survey import ParameterInfo, Survey
from colotrain.verify.cases import Case
from tests.unit.known_surveys import resolve


def plan_of(config: dict[str, Any], **about: Any) -> RunPlan:
    return resolve(config, **about)[0]


LAPTOP = Machine(
    device="cpu", num_devices=0, num_cores=2, host_memory_bytes=16 << 30, device_memory_bytes=0
)
SERVER = Machine(
    device="cuda",
    num_devices=8,
    num_cores=64,
    host_memory_bytes=1 << 40,
    device_memory_bytes=80 << 30,
)
SHAPES = {
    "embed.weight": (256, 64),
    **{
        f"blocks.{i}.{layer}": (64, 64) for i in range(4) for layer in ("attn.weight", "mlp.weight")
    },
    "head.weight": (256, 64),
}
TOTAL = 2 * 256 * 64 + 8 * 64 * 64


def survey(model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
    """A model of four blocks, as the real survey would describe it."""

    def matching(glob: str) -> list[str]:
        return [name for name in SHAPES if fnmatchcase(name, glob)]

    spared = {name for glob in freeze.except_ for name in matching(glob)}
    reasons = {n: glob for glob in freeze.patterns for n in matching(glob) if n not in spared}
    globs = (
        *freeze.patterns,
        *freeze.except_,
        *(g for gs in freeze.unfreeze.values() for g in gs),
    )
    return Survey(
        parameters=tuple(
            ParameterInfo(
                name=name,
                shape=shape,
                numel=shape[0] * shape[1],
                itemsize=4,
                frozen_by=reasons.get(name),
                group=".".join(name.split(".")[:2]) if name.startswith("blocks.") else "",
            )
            for name, shape in SHAPES.items()
        ),
        matched={glob: len(matching(glob)) for glob in globs},
        flops_per_token=6.0 * seq_len,
        vocab_size=256,
    )


BASE: dict[str, Any] = {
    "recipe": "llm-tiny",
    "model": {"target": "package.module:Model", "args": {"vocab_size": 256}},
    "data": {"corpus": "stdlib", "seq_len": 128},
    "train": {"global_batch": 64, "micro_batch": 4},
    "plugin": {"name": "zero2"},
}


def with_values(*pairs: tuple[str, Any], base: dict[str, Any] | None = None) -> dict[str, Any]:
    """BASE with dotted keys set."""
    config = copy.deepcopy(BASE if base is None else base)
    for key, value in pairs:
        *sections, name = key.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return config


def plan(*pairs: tuple[str, Any], machine: Machine = LAPTOP) -> RunPlan:
    return plan_of(with_values(*pairs), survey=survey, machine=machine)


def lines(config: dict[str, Any], *, machine: Machine = LAPTOP, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        plan_of(config, machine=machine, **{"survey": survey, **more})
    assert error.value.exit_code == 2
    found = error.value.lines()
    assert all("\n" not in line and ": expected " in line for line in found)
    return [line.removeprefix("error: ") for line in found]


def one_line(*pairs: tuple[str, Any], machine: Machine = LAPTOP) -> str:
    (line,) = lines(with_values(*pairs), machine=machine)
    return line


# Batch arithmetic


def sizes(g: int | None, m: int | None, a: int | None, procs: int | None, **more: int) -> Sizes:
    return Sizes(
        global_batch=g,
        micro_batch=m,
        accumulation_steps=a,
        procs_per_node=procs,
        **{"nodes": 1, "default_procs": 2, "most_procs": 4, **more},
    )


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        (sizes(64, 4, 8, 2), (64, 4, 8, 2)),
        (sizes(64, 4, None, 2), (64, 4, 8, 2)),
        (sizes(64, None, 8, 2), (64, 4, 8, 2)),
        (sizes(None, 4, 8, 2), (64, 4, 8, 2)),
        (sizes(64, 4, 8, None), (64, 4, 8, 2)),
        (sizes(64, 4, 4, None), (64, 4, 4, 4)),
        (sizes(64, None, None, 2), (64, 32, 1, 2)),
        (sizes(None, 4, None, 2), (8, 4, 1, 2)),
        (sizes(64, 4, None, None), (64, 4, 8, 2)),
        (sizes(32, 8, None, None, default_procs=8), (32, 8, 1, 4)),
        (sizes(32, 8, None, None, default_procs=3), (32, 8, 2, 2)),
        (sizes(64, 4, None, 2, nodes=2), (64, 4, 4, 4)),
        (sizes(64, 4, 2, None, nodes=2), (64, 4, 2, 8)),
    ],
)
def test_any_one_size_may_be_left_out(given: Sizes, solved: tuple[int, ...]) -> None:
    found = solve(given)
    assert isinstance(found, BatchPlan), str(found)
    sizes = (found.micro_batch, found.accumulation_steps, found.data_parallel)
    assert (found.global_batch, *sizes) == solved
    assert found.global_batch == math.prod(sizes)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            sizes(63, 4, 8, 2),
            "train.global_batch=63: expected 64 = micro_batch 4 × accumulation 8 × world size 2; "
            "set train.global_batch=64, or leave one of the four out",
        ),
        (
            sizes(63, 4, None, 2),
            "train.global_batch=63: expected a multiple of 8 = micro_batch 4 × world size 2; "
            "set train.global_batch=56 or train.global_batch=64",
        ),
        (sizes(3, 4, None, 2), "set train.global_batch=8"),
        (sizes(63, None, 8, 2), "a multiple of 16 = accumulation 8 × world size 2"),
        (sizes(63, None, None, 2), "a multiple of 2 = accumulation 1 × world size 2"),
        (sizes(63, 4, 8, None), "a multiple of 32 = micro_batch 4 × accumulation 8"),
        (sizes(64, 4, 1, None), "a world size of at most 4 here, not 16 = global_batch 64 / ("),
        (sizes(12, 4, 1, None, nodes=2), "a world size that 2 nodes share evenly, not 3"),
        (sizes(None, None, 8, 2), "train.micro_batch: expected a size (or train.global_batch)"),
    ],
)
def test_sizes_that_do_not_agree_show_the_product(given: Sizes, line: str) -> None:
    found = solve(given)
    assert isinstance(found, Problem)
    assert line in str(found)


@pytest.mark.parametrize(
    "key", ["train.global_batch", "train.micro_batch", "accumulate.steps", "cluster.procs_per_node"]
)
@pytest.mark.parametrize("value", [0, -4])
def test_sizes_below_one_are_problems(key: str, value: int) -> None:
    assert one_line((key, value)) == f"{key}={value}: expected 1 or more; correct {key}"


def test_the_batch_counts_tokens_and_samples_for_data_that_has_none() -> None:
    batch = plan().batch
    assert (batch.data_parallel, batch.accumulation_steps, batch.owner) == (2, 8, "colotrain")
    assert batch.tokens_per_step == 64 * 128
    own = plan(("data", {"target": "a.b:c"})).batch
    assert own.tokens_per_step == 64


# Ranks and memory


def test_a_cpu_machine_gets_a_rank_per_core_up_to_eight() -> None:
    cluster = plan().cluster
    assert (cluster.device, cluster.procs_per_node, cluster.threads_per_rank) == ("cpu", 2, 1)
    assert cluster.memory_bytes == 8 << 30
    large = plan(machine=Machine(**{**_fields(LAPTOP), "num_cores": 32})).cluster
    assert (large.procs_per_node, large.threads_per_rank) == (8, 4)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, (0, "")),
        ({"OMP_NUM_THREADS": "4"}, (4, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "2,1", "MKL_NUM_THREADS": "7"}, (7, "MKL_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "2,1", "MKL_NUM_THREADS": "0"}, (2, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "many"}, (0, "")),
        ({"OMP_NUM_THREADS": "9" * 30}, (0, "")),
    ],
)
def test_threads_are_those_of_the_environment_or_a_share_of_the_cores(
    variables: dict[str, str], threads: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert host.chosen_threads() == threads
    given = dict(zip(("threads", "threads_set_by"), threads, strict=True))
    cluster = plan(machine=replace(LAPTOP, num_cores=32, **given)).cluster
    assert cluster.threads_per_rank == (threads[0] or 4)
    assert cluster.threads_set_by == threads[1]


def test_threads_are_those_that_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    asked = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert host.chosen_threads()[0] == int(done.stdout)


def test_threads_of_the_environment_that_are_not_the_share_are_told() -> None:
    site = replace(LAPTOP, num_cores=32, threads=1, threads_set_by="OMP_NUM_THREADS")
    (warning,) = plan(machine=site).warnings
    assert "OMP_NUM_THREADS=1" in warning
    assert "its share of the 32 cores is 4" in warning
    assert "env -u OMP_NUM_THREADS colotrain" in warning
    assert plan(machine=replace(site, threads=4)).warnings == ()


def test_a_gpu_machine_gets_a_rank_per_gpu() -> None:
    cluster = plan(machine=SERVER).cluster
    assert (cluster.device, cluster.procs_per_node, cluster.threads_per_rank) == ("cuda", 8, 8)
    assert cluster.memory_bytes == 80 << 30


def test_leaving_ranks_idle_is_announced() -> None:
    made = plan(("train.global_batch", 32), ("train.micro_batch", 8), machine=SERVER)
    assert made.world_size == 4
    assert made.warnings == ("cluster.procs_per_node=4: 8 are there, but do not divide the batch",)


def test_more_ranks_than_cores_are_allowed_and_announced() -> None:
    made = plan(("cluster.procs_per_node", 4))
    assert (made.world_size, made.cluster.threads_per_rank) == (4, 1)
    assert "share 2 cores" in made.warnings[0]


@pytest.mark.parametrize(
    ("memory", "num_bytes"), [("4GiB", 4 << 30), (0.5, 4 << 30), (123456789, 123456789)]
)
def test_memory_is_a_size_or_a_share_of_what_is_there(memory: Any, num_bytes: int) -> None:
    assert plan(("cluster.memory", memory)).cluster.memory_bytes == num_bytes


def test_a_gpu_that_is_not_there_can_be_planned_for_with_its_ranks_and_memory() -> None:
    line = one_line(("cluster.device", "cuda"), ("cluster.memory", "80GiB"))
    assert line.startswith("cluster.device=cuda: expected a GPU that torch can use; set cluster.")
    pairs = (("cluster.device", "cuda"), ("cluster.memory", "80GiB"), ("cluster.procs_per_node", 4))
    made = plan(*pairs)
    assert (made.cluster.device, made.world_size) == ("cuda", 4)
    assert "this machine has 0 GPUs" in made.warnings[0]


# Plugins


@pytest.mark.parametrize("name", ROWS)
def test_a_plugin_is_its_row(name: str) -> None:
    made = plan(("plugin.name", name)).plugin
    row = ROWS[name]
    assert (made.name, made.reason) == (name, "asked for")
    assert (made.parameters_live, made.gradients) == (row.parameters_live, row.gradients)
    assert made.mesh == ((1, 2) if row.hybrid else (2,))
    assert made.chunk_bytes == (1 << 20 if row.packed else None)


@pytest.mark.parametrize(
    ("pairs", "mesh"),
    [
        ((("plugin.shard_size", 1),), (2, 1)),
        ((("plugin.shard_size", 2),), (1, 2)),
        ((("cluster.nodes", 2),), (2, 2)),
        ((("cluster.nodes", 2), ("cluster.procs_per_node", 4), ("plugin.shard_size", 2)), (4, 2)),
    ],
)
def test_fsdp_hybrid_shards_in_a_node_and_replicates_between(pairs: Any, mesh: Any) -> None:
    made = plan(("plugin.name", "fsdp-hybrid"), *pairs)
    assert made.plugin.mesh == mesh
    assert mesh[0] * mesh[1] == made.world_size


def test_reshard_says_how_long_whole_parameters_live() -> None:
    hybrid = ("plugin.name", "fsdp-hybrid")
    assert plan(hybrid, ("plugin.reshard", False)).plugin.parameters_live == "step"
    assert plan(("plugin.reshard", True)).plugin.parameters_live == "use"


def test_a_row_may_differ_per_module() -> None:
    overrides = {"blocks.0-1": {"reshard": False}, "blocks.3": {"reshard": True}}
    made = plan(("plugin.name", "zero3"), ("plugin.overrides", overrides)).plugin
    assert made.reshard_overrides == {"blocks.0-1": False, "blocks.3": True}
    made = plan(("plugin.overrides", {"blocks": {"reshard": True}})).plugin
    assert made.reshard_overrides == {"blocks": True}


@pytest.mark.parametrize(
    ("pairs", "line"),
    [
        (
            {"plugin.name": "zero9"},
            "plugin.name=zero9: expected one of zero1, zero2, zero3, fsdp-h",
        ),
        ({"plugin.shard_size": 2}, "plugin.shard_size=2: expected nothing but under plugin=fsdp-h"),
        ({"plugin.name": "auto", "plugin.shard_size": 2}, "nothing but under plugin=fsdp-hybrid"),
        (
            {"plugin.name": "fsdp-hybrid", "plugin.shard_size": 3},
            "plugin.shard_size=3: expected a divisor of the world size 2; one of 1, 2",
        ),
        (
            {"plugin.chunk_size": "4MiB"},
            "plugin.chunk_size=4MiB: expected nothing but under plugin",
        ),
        ({"plugin.name": "gemini", "plugin.chunk_size": "4Mibs"}, "as in plugin.chunk_size=512MiB"),
        (
            {"plugin.overrides": {"blocks.0": {"x": 1, "reshard": True}}},
            "blocks.0.x: expected resh",
        ),
        ({"plugin.overrides": {"blocks.0": {"reshard": 1}}}, "reshard=1: expected true or false"),
        ({"plugin.overrides": {"blocks.3-1": {"reshard": True}}}, "a range from low to high"),
        ({"plugin.overrides": {"blocks.0-999999999": {"reshard": True}}}, "a range from low to"),
        (
            {"plugin.overrides": {"block.0": {"reshard": True}}},
            "plugin.overrides.block.0: expected a block of the model, like blocks.0 or blocks.0-3; "
            "did you mean blocks.0",
        ),
        ({"plugin.overrides": {"blocks.0.attn": {"reshard": True}}}, "expected a block of the mod"),
        (
            {"plugin.name": "zero3", "plugin.budget.host": "4GiB"},
            "plugin.budget.host=4GiB: expected nothing but under plugin=gemini; remove it",
        ),
        (
            {"plugin.name": "zero2", "plugin.disk_path": "/tmp"},
            "plugin.disk_path=/tmp: expected nothing but under plugin=gemini",
        ),
        (
            {"plugin.name": "gemini", "plugin.budget.device": "4GiB"},
            "expected auto: on CPU the device's memory is the host's; set plugin.budget.host",
        ),
        ({"plugin.name": "gemini", "plugin.budget.host": "much"}, "as in plugin.budget.host=512M"),
        (
            {"plugin.name": "gemini", "plugin.budget.disk": "4GiB", "plugin.disk_path": "none"},
            "plugin.budget.disk=4GiB: expected auto without plugin.disk_path; name a folder",
        ),
        ({"plugin.name": "gemini", "plugin.disk_path": __file__}, "expected a folder; name a fold"),
        (
            {"plugin.name": "gemini", "plugin.disk_path": "/dev/shm/colotrain"},
            "expected a file system on disk (/dev/shm is tmpfs, which is memory itself)",
        ),
        (
            {"plugin.name": "gemini", "plugin.disk_path": "/proc/colotrain"},
            "expected a folder that can be written (/proc: ",
        ),
        (
            {"plugin.name": "gemini", "plugin.budget.host": 1000},
            "for the largest group at work; raise plugin.budget.host, or lower plugin.chunk_size",
        ),
    ],
)
def test_a_wrong_plugin_setting_is_one_line(pairs: dict[str, Any], line: str) -> None:
    assert line in one_line(*pairs.items())


def test_chunk_sizes_are_read() -> None:
    gemini = ("plugin.name", "gemini")
    assert plan(gemini, ("plugin.chunk_size", "1.5MB")).plugin.chunk_bytes == 1_500_000


def test_auto_takes_the_first_that_fits_and_says_so() -> None:
    auto, half = ("plugin.name", "auto"), ("train.precision", "bf16")
    made = plan(auto, half)
    assert made.plugin.name == "zero1"
    assert "the first that fits" in made.plugin.reason
    peaks = {name: plan(("plugin.name", name), half).peak for name in ROWS}
    need = {name: peak.high for name, peak in peaks.items()}
    assert need["zero1"] > need["zero2"] > need["zero3"] == need["gemini"]
    for name in ("zero2", "zero3"):
        made = plan(auto, half, ("cluster.memory", need[name]))
        assert made.plugin.name == name
        assert "zero1 needs" in made.plugin.reason
        assert made.memory.total <= made.cluster.memory_bytes
    made = plan(auto, half, ("cluster.memory", 1000), ("plugin.disk_path", "none"))
    assert made.plugin.name == "gemini"
    assert "none fits" in made.plugin.reason


def test_auto_takes_what_needs_least_where_nothing_surely_fits() -> None:
    half, no_disk = ("train.precision", "bf16"), ("plugin.disk_path", "none")
    peak = plan(("plugin.name", "zero3"), half).peak
    made = plan(("plugin.name", "auto"), half, no_disk, ("cluster.memory", peak.exact))
    assert made.plugin.name == "zero3"
    assert "none surely fits" in made.plugin.reason
    (warning,) = [line for line in made.warnings if line.startswith("memory: zero3 needs")]
    assert "may not fit" in warning


def test_gemini_takes_a_disk_tier_in_the_run_s_folder_only_where_memory_might_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gemini = ("plugin.name", "gemini")
    assert plan(gemini).plugin.budget is None
    scarce = ("cluster.memory", plan(gemini).peak.exact)
    budget = plan(gemini, scarce).plugin.budget
    assert budget is not None
    assert budget.disk_path == OFFLOAD
    assert 0 < budget.disk_bytes < shutil.disk_usage(tmp_path).free
    assert budget.host_bytes < scarce[1]
    assert [w for w in plan(gemini, scarce).warnings if "plugin.disk_path=none forbids" in w]
    for forbidden in ("none", None):
        assert plan(gemini, scarce, ("plugin.disk_path", forbidden)).plugin.budget is None
    limit = ("plugin.budget.host", "400MiB")
    assert plan(gemini, limit).plugin.budget.disk_path == OFFLOAD
    with monkeypatch.context() as patched:  # a disk that cannot hold what memory does not
        patched.setattr(budget_module, "_free_bytes", lambda place: budget_module.LEAST_SPACE_BYTES)
        patched.setattr(budget_module, "AUTOMATIC_DISK_SHARE", 1e-4)
        assert plan(gemini, scarce).plugin.budget is None
    monkeypatch.setattr(budget_module, "file_system", lambda place: "nfs4")
    assert plan(gemini, scarce).plugin.budget is None


def test_with_parameters_in_common_zero3_saves_nothing_over_zero2() -> None:
    need = {name: plan(("plugin.name", name)).memory for name in ROWS}
    assert need["zero1"].total > need["zero2"].total == need["zero3"].total
    assert {breakdown.gathered for breakdown in need.values()} == {0}


# Memory


def test_model_state_is_counted_in_bytes_per_rank() -> None:
    optim = OptimPlan(
        name="adamw",
        lr=1.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        schedule="constant",
        warmup_steps=0,
        final_ratio=1.0,
    )
    looked = survey(ModelPlan(target=""), FreezePlan(patterns=("embed*",)), 1)
    whole, trained = TOTAL * 4, (TOTAL - 256 * 64) * 4

    def state(name: str) -> MemoryBreakdown:
        row = ROWS[name]
        live, gradients = row.parameters_live, row.gradients
        layout = Layout(parameters_live=live, gradients=gradients, shard=2, optim=optim)
        return model_state_bytes(layout, looked)

    zero1 = state("zero1")
    assert (zero1.parameters, zero1.gradients) == (whole // 2, trained)
    counters = 4 * sum(p.frozen_by is None for p in looked.parameters)
    assert (zero1.optimizer, zero1.gathered) == (trained + counters, whole)
    zero3 = state("zero3")
    outside, block = 2 * 256 * 64 * 4, 2 * 64 * 64 * 4
    assert (zero3.gradients, zero3.gathered) == (trained // 2, outside + 2 * block)


def test_frozen_parameters_need_no_gradient_and_no_optimizer_until_they_train() -> None:
    free = plan().memory
    patterns = ("freeze.patterns", ["blocks.*"])
    frozen = plan(patterns).memory
    assert frozen.parameters == free.parameters
    assert frozen.gradients < free.gradients
    assert frozen.optimizer < free.optimizer
    assert plan(patterns, ("freeze.unfreeze", {5: ["blocks.*"]})).memory == free


def test_sgd_without_momentum_keeps_no_state() -> None:
    sgd = ("optim.name", "sgd")
    assert plan(sgd, ("optim.betas", [0.0])).memory.optimizer == 0
    one, two = plan(sgd, ("optim.betas", [0.9])).memory, plan().memory
    assert one.optimizer == one.parameters
    assert two.optimizer - 2 * one.optimizer == 4 * len(SHAPES)  # counters of steps


# Freezing


def test_freezing_is_counted() -> None:
    made = plan(
        ("freeze.patterns", ["embed*", "blocks.0.*"]),
        ("freeze.except", ["blocks.0.mlp*"]),
        ("freeze.unfreeze", {5: ["embed*"]}),
    )
    assert made.freeze.matched == {"embed*": 1, "blocks.0.*": 2, "blocks.0.mlp*": 1}
    assert made.freeze.unfreeze == {5: ("embed*",)}
    assert made.parameters.total == TOTAL
    assert made.parameters.frozen == 256 * 64 + 64 * 64
    assert made.parameters.trainable + made.parameters.frozen == TOTAL


@pytest.mark.parametrize(
    ("pairs", "line"),
    [
        (
            {"freeze.patterns": ["embd*"]},
            "freeze.patterns=embd*: expected a glob that matches a parameter's name; "
            "did you mean embed.* or embed.weight?",
        ),
        ({"freeze.except": ["nope"]}, "name; known: blocks.*, embed.*, head.*"),
        (
            {"freeze.unfreeze": {5: ["nope"]}},
            "freeze.unfreeze.5=nope: expected a glob that matches",
        ),
        (
            {"freeze.patterns": ["embed*"], "freeze.unfreeze": {5: ["head*"]}},
            "freeze.unfreeze.5=head*: expected a glob that matches a parameter which is frozen "
            "before; known: embed.*",
        ),
        ({"freeze.unfreeze": {0: ["embed*"]}}, "freeze.unfreeze=0: expected steps from 1 on"),
        ({"freeze.patterns": ["*"]}, "freeze.patterns=*: expected at least one parameter that"),
    ],
)
def test_wrong_freezing_is_one_line(pairs: dict[str, Any], line: str) -> None:
    assert line in one_line(*pairs.items())


def test_a_step_of_the_schedule_after_the_run_is_announced() -> None:
    frozen = {"patterns": ["embed*"], "unfreeze": {500: ["embed*"]}}
    assert "never happens" in plan(*((f"freeze.{k}", v) for k, v in frozen.items())).warnings[0]


# Model and data


def test_with_nothing_to_run_the_recipes_are_listed() -> None:
    (line,) = lines({})
    assert line.startswith("recipe: expected a recipe (recipe=NAME), or model.target; for example ")
    assert "llm-tiny" in line


@pytest.mark.parametrize(
    ("pairs", "line"),
    [
        ({"model.target": None}, "model.target: expected a model; set model.target, or build on"),
        ({"model.target": None, "model.hf": "x"}, "model.hf=x: expected a model directory that"),
        ({"model.target": "a.b.c"}, "model.target=a.b.c: expected `package.module:callable`; did"),
        (
            {"data.corpus": None},
            "data: expected data.corpus, data.path, data.mixture or",
        ),
        ({"data.target": "a:b"}, "data: expected one source of data (there is data.corpus=stdlib"),
        ({"data.args": {"x": 1}}, "expected nothing without data.target"),
        ({"data.path": "/no/such", "data.corpus": None}, "data.path=/no/such: expected a folder"),
        ({"data.tokenizer": "bites"}, "data.tokenizer=bites: expected bytes, bpe-SIZE or a toke"),
        (
            {"data.tokenizer": "bpe-1024"},
            "data.tokenizer=bpe-1024: expected at most model.args.vocab_size=256 tokens, not 1024; "
            "set model.args.vocab_size=1024",
        ),
        ({"train.on_gradients": "x"}, "train.on_gradients=x: expected `package.module:callable`"),
        ({"checkpoint.resume": "nope"}, "checkpoint.resume=nope: expected auto, none, or the fol"),
        (
            {"observe.trackers": ["wandbb"]},
            "observe.trackers=wandbb: expected one of tensorboard, wandb, mlflow; "
            "did you mean wandb?",
        ),
        ({"elastic.min_nodes": 2}, "elastic.min_nodes=2: expected from 1 to cluster.nodes, 1"),
        ({"cluster.node_rank": 1}, "cluster.node_rank=1: expected from 0 to 0, one of 1 nodes"),
        (
            {"cluster.rdzv_endpoint": "host"},
            "cluster.rdzv_endpoint=host: expected HOST:PORT of node 0",
        ),
        (
            {"cluster.rdzv_endpoint": "h:99999"},
            "cluster.rdzv_endpoint=h:99999: expected HOST:PORT of node 0",
        ),
        ({"cluster.device": "tpu"}, "cluster.device=tpu: expected auto, cpu or cuda"),
        ({"cluster.memory": "lots"}, "cluster.memory=lots: expected auto, bytes, a size like"),
        ({"train.seed": -1}, "train.seed=-1: expected 0 or more"),
        ({"train.max_steps": 0}, "train.max_steps=0: expected 1 or more"),
        ({"train.grad_clip": 0}, "expected a number above 0; or null for no clipping"),
        ({"optim.lr": float("nan")}, "optim.lr=nan: expected a finite number"),
        ({"optim.lr": 0}, "expected a number above 0"),
        ({"optim.betas": [0.9]}, "optim.betas=[0.9]: expected two numbers"),
        ({"optim.betas": [0.9, 1.0]}, "expected numbers from 0 up to, but not, 1"),
        ({"optim.name": "sgd", "optim.betas": []}, "expected SGD's momentum"),
        ({"optim.schedule.min_lr_ratio": 2}, "expected a number from 0 to 1"),
        ({"data.validation_fraction": 1}, "expected a number from 0 up to, but not, 1"),
        ({"train.precision": "fp8"}, "train.precision=fp8: expected one of fp32, bf16, fp16"),
        ({"checkpoint.asink": True}, "checkpoint.asink=true: expected a known key"),
    ],
)
def test_a_wrong_setting_is_one_line(pairs: dict[str, Any], line: str) -> None:
    assert line in one_line(*pairs.items())


def test_a_tokenizer_is_not_asked_for_data_of_ones_own_or_token_files(tmp_path: Path) -> None:
    tokens = tmp_path / "train.bin"
    tokens.write_bytes(b"\0\0")
    wide = ("data.tokenizer", "bpe-1024")
    plan(("data", {"target": "a.b:c", "tokenizer": "bpe-1024"}))
    plan(("data.corpus", None), ("data.path", str(tokens)), wide)


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a")
    (tmp_path / "runs/old").mkdir(parents=True)
    made = plan(("data", {"path": ["texts", "texts/*.txt"]}), ("checkpoint.resume", "old"))
    assert made.data.paths == (str(tmp_path / "texts"), str(tmp_path / "texts/*.txt"))
    assert made.checkpoint.resume == str(tmp_path / "runs/old")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ColotrainError("it refused them", "correct model.args"),
            "model.target=package.module:Model: expected a model that can be built (it refused "
            "them); correct model.args",
        ),
        (
            ConfigError([Problem(key="model.target", expected="a module that can be found")]),
            "model.target: expected a module that can be found",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_a_problem(error: Exception, line: str) -> None:
    def broken(model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
        raise error

    assert lines(with_values(), survey=broken) == [line]


def test_a_model_without_parameters_is_a_problem() -> None:
    def empty(model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
        return Survey(parameters=(), matched={}, flops_per_token=0.0)

    (line,) = lines(with_values(), survey=empty)
    assert "a model that has parameters" in line


def test_what_verify_tries_of_a_recipe_that_rolls_back_needs_no_checkpoints() -> None:
    config = with_values(("train.on_nonfinite", "rollback"), ("checkpoint.every", 10))
    case = Case(plugin="zero2", world_size=2, accumulation_steps=1, freeze=None)
    tried = case.apply(config, global_batch=2, steps=3)
    assert plan_of(tried, survey=survey, machine=LAPTOP).train.on_nonfinite == "stop"


@pytest.mark.parametrize("learned", [True, False])
def test_samples_longer_than_the_models_positions_are_told(learned: bool) -> None:
    def short(model: ModelPlan, freeze: FreezePlan, seq_len: int) -> Survey:
        made = survey(model, freeze, seq_len)
        return dataclasses.replace(made, num_positions=128, learned_positions=learned)

    def warnings(*pairs: tuple[str, Any]) -> list[str]:
        made = plan_of(with_values(*pairs), survey=short, machine=LAPTOP)
        return [text for text in made.warnings if "max_position_embeddings" in text]

    long = ("data.seq_len", 129)
    assert not warnings()
    if learned:  # there is no row for the last token
        (line,) = lines(with_values(long), survey=short)
        assert line == (
            "data.seq_len=129: expected at most 128, the model's max_position_embeddings; "
            "set data.seq_len=128"
        )
    else:
        assert warnings(long)[0].startswith("data.seq_len=129: the model is made for 128 tokens")


# Intervals, names, the whole


@pytest.mark.parametrize(
    ("every", "enabled", "steps", "seconds"),
    [("auto", True, 0, 180), (None, True, 0, 0), (0, False, 0, 0), (50, True, 50, 0)],
)
def test_checkpoints_are_saved_by_time_at_the_end_never_or_at_an_interval(
    every: int | str | None, enabled: bool, steps: int, seconds: float
) -> None:
    made = plan(("checkpoint.every", every), ("checkpoint.minutes", 3.0)).checkpoint
    assert (made.enabled, made.every, made.every_s) == (enabled, steps, seconds)
    assert plan().checkpoint.every_s == 600


def test_null_turns_intervals_off() -> None:
    made = plan(("train.eval_every", None), ("observe.grads_every", None))
    assert (made.train.eval_every, made.observe.grads_every) == (0, 0)


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        ({}, None, "llm-tiny-zero2-2"),
        ({"recipe": "exp/my file.yaml"}, None, "my-file-zero2-2"),
        ({"recipe": None}, None, "Model-zero2-2"),
        ({"name": "my run/1"}, None, "my-run-1"),
        ({"name": "mine"}, "yours", "yours"),
    ],
)
def test_a_run_has_a_name_that_can_be_a_folder(
    config: dict[str, Any], name: str | None, expected: str
) -> None:
    made = plan_of(BASE | config, survey=survey, machine=LAPTOP, name=name)
    assert made.name.startswith(expected)


def test_the_plan_survives_its_file() -> None:
    made = plan(("freeze.patterns", ["embed*"]), ("freeze.unfreeze", {5: ["embed*"]}))
    assert RunPlan.from_json(made.to_json()) == made


def test_a_warm_up_longer_than_the_run_is_announced() -> None:
    steps = plan().train.max_steps
    longer, as_long = (
        plan(("optim.schedule.warmup_steps", n)).warnings for n in (steps + 1, steps)
    )
    assert "reaches its peak" in longer[0]
    assert not any("reaches its peak" in text for text in as_long)  # the last step has it


@pytest.mark.parametrize("value", [0, None])
def test_an_interval_of_zero_or_null_is_off(value: int | None) -> None:
    keys = ("observe.log_every", "observe.grads_every", "train.eval_every", "elastic.check_every")
    made = plan(*((key, value) for key in keys))
    assert (made.observe.log_every, made.observe.grads_every) == (0, 0)
    assert (made.train.eval_every, made.elastic.check_every) == (0, 0)


def test_all_problems_are_reported_at_once() -> None:
    wrong = {
        "train.max_steps": "abc",
        "train.seed": -1,
        "train.global_batch": 63,
        "plugin.name": "zero9",
        "freeze.patterns": ["nope"],
        "data.tokenizer": "bites",
        "trian": {"x": 1},
        "cluster.memory": "lots",
        "observe.log_every": -1,
    }
    assert len(lines(with_values(*wrong.items()))) == len(wrong)


def test_what_was_found_before_is_reported_too_and_hides_what_follows_from_it() -> None:
    found = [Problem(key="recipe", value="nope", expected="a known recipe")]
    config = {"recipe": "nope", "train": {"max_steps": 0}}
    assert lines(config, found=found) == [
        "recipe=nope: expected a known recipe",
        "train.max_steps=0: expected 1 or more; correct train.max_steps",
    ]


@pytest.mark.parametrize(
    ("config", "number"),
    [
        ({"train": {"max_steps": "abc"}}, 2),
        ({"model": 3}, 1),
        ({"modle": {"target": "a:b"}}, 1),
        ({"model": {"target": "a:b"}, "data": {"corpus": "stdlb"}, "train": {"micro_batch": 1}}, 1),
    ],
)
def test_what_is_missing_is_reported_unless_a_mistake_explains_it(
    config: dict[str, Any], number: int
) -> None:
    assert len(lines(config)) == number


# Sizes and machines


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (1048576, 1 << 20),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("10gib", 10 << 30),
        ("1.5GB", 1_500_000_000),
        ("2 TiB", 2 << 40),
        (0.5, 500),
        ("0.25", 250),
        (1.0, 1000),
        (1, 1),
    ],
)
def test_sizes_are_bytes_texts_or_shares(written: Any, num_bytes: int) -> None:
    assert parse_size(written, whole=1000) == num_bytes


@pytest.mark.parametrize("written", ["", "lots", "10XB", "-1", -1, 0, True, "nan", "1e3", "1 2MB"])
def test_what_is_no_size_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(written, whole=1000)


def test_a_share_of_nothing_known_is_refused() -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_size(0.5)


def test_sizes_are_shown_with_three_figures() -> None:
    assert [format_size(n) for n in (0, 1536, 123456789)] == ["0 B", "1.5 KiB", "118 MiB"]


def test_this_machine_has_cores_and_memory() -> None:
    found = this_machine()
    assert found.num_cores >= 1
    assert found.host_memory_bytes > 1 << 28
    assert (found.device == "cuda") == (found.num_devices > 0)


@pytest.mark.parametrize(
    ("visible", "kept"),
    [
        (None, [10, 20, 30]),
        ("", []),
        ("-1", []),
        ("2,0", [30, 10]),
        ("0,9,1", [10]),
        ("GPU-b", [20]),
        ("MIG-x", [0]),
    ],
)
def test_only_visible_gpus_count(visible: str | None, kept: list[int]) -> None:
    gpus = [("0", "GPU-a1", 10), ("1", "GPU-b2", 20), ("2", "GPU-c3", 30)]
    assert machine_module._visible(gpus, visible) == kept


Files = Callable[[dict[str, str]], None]


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """A control group with these files, of which this process is a member."""

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        real = host.text_of
        own = "".join(f"{line}\n" for line in ("0::/job", "3:cpu,cpuacct:/job", "4:memory:/job"))

        def text(file: Path) -> str:
            return own if file == Path("/proc/self/cgroup") else real(file)

        monkeypatch.setattr(host, "CGROUP", tmp_path)
        monkeypatch.setattr(host, "text_of", text)

    return write


@pytest.mark.parametrize(
    "files",
    [
        {"job/cpu.max": "100000 100000\n", "job/memory.max": "1000000\n", "memory.max": "max\n"},
        {"cpu.max": "50000 100000\n", "memory.max": "1000000\n"},
        {
            "cpu/job/cpu.cfs_quota_us": "150000\n",
            "cpu/job/cpu.cfs_period_us": "100000\n",
            "memory/job/memory.limit_in_bytes": "1000000\n",
        },
    ],
)
def test_the_limits_of_a_container_are_honoured(container: Files, files: dict[str, str]) -> None:
    container(files)
    found = this_machine()
    assert (found.num_cores, found.host_memory_bytes) == (1, 1_000_000)


@pytest.mark.parametrize(
    "files",
    [
        {"job/memory.max": "104857600\n", "job/memory.stat": "anon 31457280\nshmem 10485760\n"},
        {
            "memory/job/memory.limit_in_bytes": "104857600\n",
            "memory/job/memory.stat": "total_rss 31457280\ntotal_shmem 10485760\n",
        },
    ],
)
def test_the_doctor_tells_the_memory_of_the_control_group(
    container: Files, files: dict[str, str]
) -> None:
    container(files)
    (finding,) = check_memory(Environment(runs=Path("runs"), cache=Path("cache")))
    assert (finding.status, finding.text) == ("fail", "60.0 MiB of 100.0 MiB are free")


def test_no_limits_are_no_limits(container: Files) -> None:
    free = this_machine()
    container({"job/cpu.max": "max 100000\n", "job/memory.max": "max\n"})
    assert this_machine() == free


def _fields(machine: Machine) -> dict[str, Any]:
    return {name: getattr(machine, name) for name in machine.__slots__}


def test_a_budget_below_what_a_rank_needs_and_a_folder_that_is_not_there_are_told(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "nvme" / "scratch"
    gemini = (("plugin.name", "gemini"), ("plugin.disk_path", str(folder)))
    warned = plan(*gemini, ("plugin.budget.host", "100MiB")).warnings
    assert any("100 MiB are less than the" in text and "exceeded" in text for text in warned)
    made = (
        f"plugin.disk_path={folder}: is not there yet, and would be made on the disk of {tmp_path}"
    )
    assert made in warned
    folder.mkdir(parents=True)
    warned = plan(*gemini, ("plugin.budget.host", "4GiB")).warnings
    assert not any("plugin." in text for text in warned)


def test_libraries_that_ranks_import_are_counted() -> None:
    def with_library(*about: Any) -> Survey:
        return dataclasses.replace(survey(*about), libraries=("transformers",))

    without = plan().memory.baseline
    assert plan_of(BASE, survey=with_library, machine=LAPTOP).memory.baseline > without
    assert plan(("train.compile", True)).memory.baseline > without
