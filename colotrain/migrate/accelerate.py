"""Accelerate's YAML configuration, as `accelerate config` writes it."""

from __future__ import annotations

from typing import Any

from colotrain.migrate import deepspeed
from colotrain.migrate.findings import (
    Answer,
    Flat,
    Rule,
    Rules,
    decided,
    disk,
    is_on,
    none,
    offload,
    taken,
    whole,
)

SIGNS = frozenset({"compute_environment", "distributed_type", "num_machines", "fsdp_config"})
SHARDING = {
    "1": "zero3",
    "FULL_SHARD": "zero3",
    "2": "zero2",
    "SHARD_GRAD_OP": "zero2",
    "3": "zero1",
    "NO_SHARD": "zero1",
    "4": "fsdp-hybrid",
    "HYBRID_SHARD": "fsdp-hybrid",
    "5": "fsdp-hybrid",
    "HYBRID_SHARD_ZERO2": "fsdp-hybrid",
}
SILENT: dict[str, tuple[str, tuple[str, ...]]] = {
    "FSDP": (
        "zero3",
        ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"),
    ),
    "DEEPSPEED": (
        "zero2",
        ("deepspeed_config.zero_stage", "deepspeed_config.deepspeed_config_file"),
    ),
}
"""Engine → its sharding by default, and the keys that say another."""
SHARDS = "parallelism_config.parallelism_config_dp_shard_size"
PLACES = "where ranks find one another is the launcher's to say"
WRAPPING = "groups are found in the model: its repeated blocks"
STATE = "checkpoints are sharded and resume anywhere"


def _distributed(value: Any, flat: Flat) -> Answer:
    name = str(value).upper()
    if name in SILENT:
        plugin, keys = SILENT[name]
        if any(flat.get(key) is not None for key in keys):
            return Answer(outcome="decided", note="its section says how the model is sharded")
        note = "as it is sharded there by default"
        return Answer(outcome="taken", note=note, settings={"plugin.name": plugin})
    if name == "NO":
        settings = {"plugin.name": "zero1", "cluster.procs_per_node": 1}
        return Answer(outcome="taken", note="one process", settings=settings)
    if name in ("MULTI_GPU", "MULTI_CPU"):
        note = "parameters and gradients stay whole, as in DDP; optimizer states are sharded"
        return Answer(outcome="taken", note=note, settings={"plugin.name": "zero1"})
    return Answer(outcome="none", note=f"{value} is not there")


def _processes(value: Any, flat: Flat) -> Answer:
    """Divide the number of all processes by the number of machines."""
    if str(flat.get("distributed_type")).upper() == "NO":
        return Answer(outcome="decided", note="distributed_type NO starts one process")
    machines = whole(flat.get("num_machines") or 1)
    if whole(value) % machines:
        return Answer(outcome="none", note=f"{value} does not divide over {machines} machines")
    return Answer(outcome="taken", settings={"cluster.procs_per_node": whole(value) // machines})


def replicas(shards: str) -> Rule:
    """Rule for the number of copies of the model, beside the ranks of each copy at `shards`."""

    def rule(value: Any, flat: Flat) -> Answer:
        if whole(value) <= 1:
            return Answer(outcome="decided", note="one copy of the model")
        size = {"plugin.shard_size": whole(flat[shards])} if flat.get(shards) else {}
        return Answer(outcome="taken", settings={"plugin.name": "fsdp-hybrid"} | size)

    return rule


def _sequence_ranks(value: Any, _: Flat) -> Answer:
    note = "the ranks of mesh.cp divide each sample's tokens"
    return taken("mesh.cp", whole, note)(value, {})


def _precision(value: Any, _: Flat) -> Answer:
    names = {"no": "fp32", "False": "fp32", "fp16": "fp16", "bf16": "bf16"}
    name = names.get(str(value))
    if name is None:
        return Answer(outcome="none", note=f"{value} is not there: fp32, fp16 and bf16 are")
    return Answer(outcome="taken", settings={"train.precision": name})


def _cpu(value: Any, _: Flat) -> Answer:
    device = "cpu" if is_on(value) else "auto"
    return Answer(outcome="taken", settings={"cluster.device": device})


def _sharding(value: Any, flat: Flat) -> Answer:
    name = SHARDING.get(str(value))
    if name is None:
        return Answer(outcome="none", note=f"there is no strategy {value}")
    if is_on(flat.get("fsdp_config.fsdp_offload_params")):
        name = "gemini"
    settings: dict[str, Any] = {"plugin.name": name}
    if str(value) in ("5", "HYBRID_SHARD_ZERO2"):
        settings["plugin.reshard"] = False
    return Answer(outcome="taken", settings=settings)


def _reshard(value: Any, flat: Flat) -> Answer:
    """Translate FSDP2's boolean, or the name of an FSDP1 strategy."""
    if str(value) in SHARDING:
        return _sharding(value, flat)
    if "fsdp_config.fsdp_sharding_strategy" in flat:
        return Answer(outcome="decided", note="the sharding strategy says it already")
    name = "zero3" if is_on(value) else "zero2"
    if is_on(flat.get("fsdp_config.fsdp_offload_params")):
        name = "gemini"
    return Answer(outcome="taken", settings={"plugin.name": name})


def _checkpointing(value: Any, _: Flat) -> Answer:
    kind = "full" if is_on(value) else "none"
    return Answer(outcome="taken", settings={"train.activation_checkpointing": kind})


def _compile(value: Any, _: Flat) -> Answer:
    if str(value).upper() in ("NO", "EAGER"):
        return Answer(outcome="taken", settings={"train.compile": False})
    note = "" if str(value).upper() == "INDUCTOR" else "with torch's default backend"
    return Answer(outcome="taken", note=note, settings={"train.compile": True})


def _renamed(key: str, rename: dict[str, str]) -> Rule:
    """DeepSpeed's rule for `key`, applied to a file with Accelerate's names for the keys."""

    def rule(value: Any, flat: Flat) -> Answer:
        known = {theirs: flat[ours] for ours, theirs in rename.items() if ours in flat}
        return deepspeed.RULES[key](value, known)

    return rule


STAGE = {
    "deepspeed_config.offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "deepspeed_config.offload_param_device": "zero_optimization.offload_param.device",
}

RULES: Rules = {
    "compute_environment": decided("the launcher looks at the machine it is started on"),
    "distributed_type": _distributed,
    "num_processes": _processes,
    "num_machines": taken("cluster.nodes", whole),
    "mixed_precision": _precision,
    "use_cpu": _cpu,
    "gradient_accumulation_steps": taken("accumulate.steps", whole),
    "machine_rank": decided(PLACES),
    "main_process_ip": decided(PLACES),
    "main_process_port": decided(PLACES),
    "rdzv_backend": decided(PLACES),
    "same_network": decided(PLACES),
    "main_training_function": decided("model.target and data.target name your code"),
    "gpu_ids": none("set CUDA_VISIBLE_DEVICES"),
    "debug": decided("every collective is bounded in time and checked"),
    "enable_cpu_affinity": none("ranks share the cores evenly; they are not pinned"),
    "downcast_bf16": none("there is no TPU"),
    "tpu_*": none("there is no TPU"),
    "commands": none("there is no TPU"),
    "command_file": none("there is no TPU"),
    "dynamo_config.dynamo_backend": _compile,
    "dynamo_backend": _compile,
    "dynamo_config.*": decided("torch.compile of each block, with its defaults"),
    "fp8_config.*": none("precision is fp32, bf16 or fp16"),
    "mpirun_config.*": none("ranks are started by colotrain itself"),
    "ipex_config.*": none("it is not there"),
    "megatron_lm_config.*": none("see the keys mesh.tp and mesh.pp"),
    **{
        f"parallelism_config.parallelism_config_{name}": rule
        for name, rule in (
            ("tp_size", taken("mesh.tp", whole)),
            ("cp_size", taken("mesh.cp", whole)),
            ("sp_size", _sequence_ranks),
            ("dp_shard_size", decided("the ranks beside the other axes")),
            ("dp_replicate_size", replicas(SHARDS)),
            ("*", decided("the transport of keys and values follows from the mesh")),
        )
    },
    "fsdp_config.fsdp_version": decided("every plugin is built on FSDP2"),
    "fsdp_config.fsdp_sharding_strategy": _sharding,
    "fsdp_config.fsdp_reshard_after_forward": _reshard,
    "fsdp_config.fsdp_offload_params": offload,
    "fsdp_config.fsdp_activation_checkpointing": _checkpointing,
    "fsdp_config.fsdp_auto_wrap_policy": decided(WRAPPING),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": decided(WRAPPING),
    "fsdp_config.fsdp_min_num_params": decided(WRAPPING),
    "fsdp_config.fsdp_backward_prefetch*": decided("groups are prefetched in the order of use"),
    "fsdp_config.fsdp_forward_prefetch": decided("groups are prefetched in the order of use"),
    "fsdp_config.fsdp_state_dict_type": decided(STATE),
    "fsdp_config.fsdp_use_orig_params": decided("parameters keep their names, always"),
    "fsdp_config.fsdp_sync_module_states": decided("initial values do not depend on the rank"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": decided("no rank ever holds the whole model"),
    "deepspeed_config.zero_stage": _renamed("zero_optimization.stage", STAGE),
    "deepspeed_config.gradient_accumulation_steps": taken("accumulate.steps", whole),
    "deepspeed_config.gradient_clipping": deepspeed.RULES["gradient_clipping"],
    "deepspeed_config.offload_optimizer_device": _renamed(
        "zero_optimization.offload_optimizer.device", {}
    ),
    "deepspeed_config.offload_param_device": _renamed("zero_optimization.offload_param.device", {}),
    "deepspeed_config.offload_*_nvme_path": disk("deepspeed_config.offload_*_device"),
    "deepspeed_config.deepspeed_config_file": none(
        "import that file by itself: its settings are not in this one"
    ),
    "deepspeed_config.zero3_init_flag": decided("models are built without storage and sharded"),
    "deepspeed_config.zero3_save_16bit_model": decided("`colotrain export` writes whole weights"),
    "deepspeed_config.deepspeed_hostfile": decided(PLACES),
    "deepspeed_config.deepspeed_multinode_launcher": decided(PLACES),
    "deepspeed_config.deepspeed_moe_layer_cls_names": decided(WRAPPING),
}
