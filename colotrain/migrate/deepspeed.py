"""DeepSpeed's JSON configuration (its keys: deepspeed.ai/docs/config-json)."""

from __future__ import annotations

import re
from typing import Any

from colotrain.migrate.findings import (
    Answer,
    Flat,
    Rule,
    Rules,
    asked,
    clip,
    decay,
    decided,
    disk,
    is_on,
    none,
    number,
    numbers,
    taken,
    whole,
)
from colotrain.spec.optimizers import OPTIMIZERS

SIGNS = frozenset(
    {
        "zero_optimization",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "fp16",
        "bf16",
        "scheduler",
    }
)
STAGES = {0: "zero1", 1: "zero1", 2: "zero2", 3: "zero3"}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
FINAL_RATIO = {"linear": 0.0, "cosine": 0.0001, "constant": 1.0}
"""Schedule → default final learning rate in DeepSpeed, as a share of the peak."""
WARMUP_STEPS, WARMUP_MAX_LR = 1000, 0.001
"""Defaults of DeepSpeed's schedules. WarmupDecayLR uses this rate, not the optimizer's."""
OFFLOAD = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
PRECISIONS = ("fp16.enabled", "bf16.enabled", "bfloat16.enabled")
LOG = "warm-up is linear here; DeepSpeed's is logarithmic unless warmup_type is linear"
BUFFERS = "buffers and prefetching follow from the groups of the model"
IMPLEMENTATION = r"deepspeedcpu|fused|torch|cpu|paged|bnb|apex|hf|npu|xla|\d+bit|_"
OWNED = "colotrain owns accumulation and divides the loss in one place"


def optimizer_name(value: str) -> Answer:
    """The optimizer of a common name, whichever library implements it."""
    name = plain_name(value)
    if name in ("adamw", "adam"):
        note = "weight decay is decoupled" if name == "adam" else ""
        return Answer(outcome="taken", note=note, settings={"optim.name": "adamw"})
    if name in OPTIMIZERS:
        return Answer(outcome="taken", settings={"optim.name": name})
    return Answer(outcome="none", note=f"{value} is not there: adamw is used instead")


def plain_name(value: str) -> str:
    """Shorten a name of an implementation: `torch.optim.AdamW` and `paged_adamw_8bit` to `adamw`,
    DeepSpeedCPUAdam to `adam`."""
    return re.sub(IMPLEMENTATION, "", value.rpartition(".")[2].lower())


def _optimizer(value: Any, _: Flat) -> Answer:
    return optimizer_name(str(value))


def _by_trainer(key: str, default: Any, rule: Rule) -> Rule:
    """The rule, but for `auto`, which transformers' Trainer replaces by its own argument."""

    def replaced(value: Any, flat: Flat) -> Answer:
        if value != "auto":
            return rule(value, flat)
        note = f"auto: {default}, which transformers has by default"
        return Answer(outcome="decided", note=note, settings={key: default})

    return replaced


def _lr(value: Any, flat: Flat) -> Answer:
    if value == "auto":
        note = "auto: set optim.lr to the learning rate among your Trainer's arguments"
        return Answer(outcome="asked", note=note)
    peak = flat.get("scheduler.params.warmup_max_lr")
    overridden = flat.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR")
    if overridden and peak not in (None, "auto", value):
        note = f"overridden by the schedule's warmup_max_lr={peak}, as in DeepSpeed"
        return Answer(outcome="decided", note=note)
    return taken("optim.lr", number)(value, flat)


def _decoupling(value: Any, flat: Flat) -> Answer:
    """Translate `adam_w_mode`; without it DeepSpeed adds weight decay to the gradients."""
    if is_on(value) or not number(flat.get("optimizer.params.weight_decay") or 0.0):
        return Answer(outcome="decided", note="weight decay is always decoupled")
    note = "weight decay added to the gradients (L2) is not there: AdamW's is decoupled"
    return Answer(outcome="none", note=note)


def _momentum(value: Any, flat: Flat) -> Answer:
    if str(flat.get("optimizer.type", "")).lower() == "sgd":
        return taken("optim.momentum", number)(value, flat)
    return Answer(outcome="none", note="only SGD has a momentum")


def _clipping(value: Any, flat: Flat) -> Answer:
    if value is None:
        return Answer(outcome="taken", note="off", settings={"train.grad_clip": None})
    return _by_trainer("train.grad_clip", 1.0, taken("train.grad_clip", clip))(value, flat)


def _schedule(value: Any, flat: Flat) -> Answer:
    name = SCHEDULES.get(str(value))
    if name is None:
        return Answer(outcome="none", note=f"{value} is not there: see optim.schedule.name")
    settings = {"optim.schedule.name": name, "optim.schedule.min_lr_ratio": FINAL_RATIO[name]}
    if flat.get("scheduler.params.warmup_num_steps") is None:
        settings["optim.schedule.warmup_steps"] = WARMUP_STEPS
    if name == "linear" and flat.get("scheduler.params.warmup_max_lr") is None:
        settings["optim.lr"] = WARMUP_MAX_LR
    is_linear = flat.get("scheduler.params.warmup_type") == "linear"
    return Answer(outcome="taken", note="" if is_linear else LOG, settings=settings)


def _warmup(value: Any, _: Flat) -> Answer:
    if value == "linear":
        return Answer(outcome="decided", note="warm-up is linear")
    return Answer(outcome="none", note=LOG)


def _stage(value: Any, flat: Flat) -> Answer:
    try:
        stage = whole(value)
        plugin = STAGES[stage]
    except (TypeError, ValueError, KeyError):
        return Answer(outcome="none", note=f"there is no stage {value}")
    if any(flat.get(key) not in (None, "none", "auto") for key in OFFLOAD):
        note = "gemini shards as stage 3 and places states on device, host or disk"
        return Answer(outcome="taken", note=note, settings={"plugin.name": "gemini"})
    note = "the nearest: zero1 shards optimizer states, with the same results" if not stage else ""
    return Answer(outcome="taken", note=note, settings={"plugin.name": plugin})


def _offload(value: Any, flat: Flat) -> Answer:
    if value in (None, "none"):
        return Answer(outcome="decided", note="nothing is offloaded unless the plugin is gemini")
    note = "gemini places each group on a tier, from plugin.budget"
    return Answer(outcome="taken", note=note, settings={"plugin.name": "gemini"})


def _precision(name: str) -> Rule:
    def rule(value: Any, flat: Flat) -> Answer:
        if value == "auto":
            return Answer(outcome="decided", note="auto: train.precision keeps its default")
        on = [key for key in PRECISIONS if is_on(flat.get(key))]
        if is_on(value) and len(on) > 1:
            note = f"{' and '.join(on)} are both on: set train.precision to one of them"
            return Answer(outcome="asked", note=note)
        if is_on(value):
            return Answer(outcome="taken", settings={"train.precision": name})
        settings = {} if on else {"train.precision": "fp32"}
        return Answer(outcome="taken", settings=settings, note="off")

    return rule


def _tracker(name: str) -> Rule:
    def rule(value: Any, _: Flat) -> Answer:
        settings = {"observe.trackers": [name]} if is_on(value) else {}
        return Answer(outcome="taken", settings=settings, note="" if settings else "off")

    return rule


def _hybrid(value: Any, flat: Flat) -> Answer:
    if whole(value) <= 1:
        return Answer(outcome="decided", note="off")
    settings = {"plugin.name": "fsdp-hybrid", "plugin.shard_size": whole(value)}
    return Answer(outcome="taken", settings=settings, note="shards inside groups of ranks")


def _buffers(*names: str) -> dict[str, Rule]:
    return {f"zero_optimization.{name}": decided(BUFFERS) for name in names}


def _universal(_: Any, __: Flat) -> Answer:
    return Answer(outcome="decided", note="any checkpoint resumes under any plugin and world size")


RULES: Rules = {
    "train_batch_size": taken("train.global_batch", whole),
    "train_micro_batch_size_per_gpu": taken("train.micro_batch", whole),
    "gradient_accumulation_steps": taken("accumulate.steps", whole),
    "gradient_clipping": _clipping,
    "steps_per_print": taken("observe.log_every", whole),
    "optimizer.type": _optimizer,
    "optimizer.params.lr": _lr,
    "optimizer.params.betas": _by_trainer(
        "optim.betas", [0.9, 0.999], taken("optim.betas", numbers)
    ),
    "optimizer.params.eps": _by_trainer("optim.eps", 1e-8, taken("optim.eps", number)),
    "optimizer.params.weight_decay": _by_trainer("optim.weight_decay", 0.0, decay),
    "optimizer.params.momentum": _momentum,
    "optimizer.params.torch_adam": decided("torch's fused implementation is used"),
    "optimizer.params.adam_w_mode": _decoupling,
    "optimizer.params.*": none("an argument of an optimizer that colotrain does not have"),
    "optimizer.legacy_fusion": decided("torch's fused implementation is used"),
    "scheduler.type": _schedule,
    "scheduler.params.warmup_num_steps": taken("optim.schedule.warmup_steps", whole),
    "scheduler.params.total_num_steps": taken("train.max_steps", whole),
    "scheduler.params.warmup_max_lr": taken("optim.lr", number),
    "scheduler.params.cos_min_ratio": taken("optim.schedule.min_lr_ratio", number),
    "scheduler.params.warmup_min_lr": decided("warm-up begins at 0"),
    "scheduler.params.warmup_min_ratio": decided("warm-up begins at 0"),
    "scheduler.params.warmup_type": _warmup,
    "scheduler.params.last_batch_iteration": decided("a resumed run knows its step"),
    "scheduler.params.*": none("an argument of a schedule that colotrain does not have"),
    "fp16.enabled": _precision("fp16"),
    "bf16.enabled": _precision("bf16"),
    "bfloat16.enabled": _precision("bf16"),
    "fp16.*": decided("the loss scale of fp16 is dynamic; a step that overflows is skipped"),
    "bf16.*": decided("weights and optimizer state stay in the model's own precision"),
    "amp.*": none("set train.precision instead of Apex"),
    "zero_optimization": decided("off: the plugin is plugin=auto, or the one you name"),
    "zero_optimization.stage": _stage,
    "zero_optimization.offload_optimizer.device": _offload,
    "zero_optimization.offload_param.device": _offload,
    "zero_optimization.cpu_offload": none("superseded in DeepSpeed: choose plugin gemini"),
    "zero_optimization.offload_*.nvme_path": disk("zero_optimization.offload_*.device"),
    "zero_optimization.offload_*": decided(BUFFERS),
    "zero_optimization.mics_shard_size": _hybrid,
    "zero_optimization.zero_hpz_partition_size": _hybrid,
    "zero_optimization.mics_hierarchical_params_gather": decided(
        "hybrid meshes reduce inside first"
    ),
    "zero_optimization.zero_quantized_*": none("communication is never quantized"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": decided(
        "checkpoints are sharded; `colotrain export` writes whole weights"
    ),
    "zero_optimization.stage3_*": decided(BUFFERS),
    "zero_optimization.elastic_checkpoint": _universal,
    "zero_optimization.ignore_unused_parameters": decided(
        "parameters without a path from the loss are detected and not updated"
    ),
    **_buffers(
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "reduce_scatter",
        "reduce_bucket_size",
        "contiguous_gradients",
        "sub_group_size",
        "round_robin_gradients",
        "use_multi_rank_bucket_allreduce",
        "prefetch_bucket_size",
        "memory_efficient_linear",
        "load_from_fp32_weights",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
    ),
    "prescale_gradients": decided(OWNED),
    "gradient_predivide_factor": decided(OWNED),
    "communication_data_type": decided("gradients are reduced in their own precision"),
    "fp32_allreduce": decided("gradients are reduced in their own precision"),
    "data_types.grad_accum_dtype": decided("gradients accumulate in the parameters' precision"),
    "sparse_gradients": none("gradients are dense"),
    "disable_allgather": decided(BUFFERS),
    "activation_checkpointing.*": asked(
        "your code says what is recomputed: set train.activation_checkpointing=full or none"
    ),
    "tensorboard.enabled": _tracker("tensorboard"),
    "wandb.enabled": _tracker("wandb"),
    "tensorboard.*": decided("records go into the run's folder"),
    "wandb.*": decided("set W&B's own variables (WANDB_PROJECT and so on)"),
    "comet.*": none("trackers are tensorboard and wandb; every event is JSON in the run's folder"),
    "csv_monitor.*": decided("every event is JSON in the run's folder"),
    "monitor_config.*": decided("every event is JSON in the run's folder"),
    "comms_config.*": decided("`colotrain plan` tells the traffic"),
    "comms_logger.*": decided("`colotrain plan` tells the traffic"),
    "flops_profiler.*": none("MFU is measured in every run"),
    "wall_clock_breakdown": decided("every step's parts are timed"),
    "memory_breakdown": decided("memory by category is in the run's records"),
    "dump_state": decided("`plan.json` has every setting"),
    "checkpoint.load_universal": _universal,
    "checkpoint.*": decided("checkpoints are written aside and renamed when they are whole"),
    "elasticity.*": none("see the keys elastic.* and cluster.*"),
    "autotuning.*": none("`colotrain plan` estimates; plugin=auto takes the first that fits"),
    "zero_allow_untested_optimizer": decided("every optimizer works with every plugin"),
    "zero_force_ds_cpu_optimizer": decided("gemini's optimizer streams through the tiers"),
    "aio.*": decided("gemini maps files into memory"),
    "curriculum_learning.*": none("sequence length is fixed"),
    "data_efficiency.*": none("the order of samples is a function of seed and position"),
    "compression_training.*": none("compression is not there"),
    "sparse_attention.*": none("attention is the model's own"),
    "pipeline.*": none("see the key mesh.pp"),
    "tensor_parallel.*": none("see the key mesh.tp"),
    "sequence_parallel_size": none("see the keys mesh.cp and mesh.sequence_parallel"),
    "hybrid_engine.*": none("inference is not there"),
    "eigenvalue.*": none("it is not there"),
    "progressive_layer_drop.*": none("it is not there"),
    "quantize_training.*": none("it is not there"),
    "compile.enabled": taken("train.compile", is_on),
    "compile.deepcompile": taken("train.compile", is_on),
    "compile.disable": taken("train.compile", lambda value: not is_on(value)),
    "compile.*": decided("torch.compile of each block, with its defaults"),
    "seed": taken("train.seed", whole),
}
