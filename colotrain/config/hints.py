"""Hints for settings of other tools: their keys and values, with colotrain's equivalents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from colotrain.errors import Problem

EPOCHS = "write train.epochs"
BATCH = "write train.global_batch (samples per step over all ranks) or train.micro_batch (per rank)"
BEST = "write checkpoint.best.metric, and checkpoint.best.mode=max or min"
EVALUATION = "write train.eval_every, in steps or in epochs as 0.5ep"
OFFLOAD = "take plugin=gemini, which offloads what exceeds plugin.budget"
KEYS = {
    "lr": "write optim.lr",
    "learning_rate": "write optim.lr",
    "weight_decay": "write optim.weight_decay",
    "betas": "write optim.betas",
    "optimizer": "write optim.name",
    "lr_scheduler": "write optim.schedule.name",
    "lr_scheduler_type": "write optim.schedule.name",
    "scheduler": "write optim.schedule.name",
    "warmup": "write optim.schedule.warmup_steps, or optim.schedule.warmup_ratio for a share",
    "warmup_steps": "write optim.schedule.warmup_steps",
    "warmup_ratio": "write optim.schedule.warmup_ratio",
    "batch_size": BATCH,
    "train_batch_size": "write train.global_batch (samples per step over all ranks)",
    "per_device_train_batch_size": "write train.micro_batch (samples per rank at once)",
    "train_micro_batch_size_per_gpu": "write train.micro_batch (samples per rank at once)",
    "micro_batch_size": "write train.micro_batch (samples per rank at once)",
    "accumulate_grad_batches": "write accumulate.steps",
    "gradient_accumulation_steps": "write accumulate.steps",
    "gradient_clip_val": "write train.grad_clip",
    "gradient_clipping": "write train.grad_clip",
    "max_grad_norm": "write train.grad_clip",
    "gradient_checkpointing": "write train.activation_checkpointing=full",
    "num_workers": "write data.num_workers",
    "dataloader_num_workers": "write data.num_workers",
    "epochs": EPOCHS,
    "max_epochs": EPOCHS,
    "num_epochs": EPOCHS,
    "num_train_epochs": EPOCHS,
    "steps": "write train.max_steps",
    "num_steps": "write train.max_steps",
    "max_length": "write data.seq_len",
    "max_seq_length": "write data.seq_len",
    "block_size": "write data.seq_len",
    "dataset": "write data.path, or data.target for a dataset of your own",
    "model_name": "write model.hf=DIRECTORY, or model.target",
    "model_name_or_path": "write model.hf=DIRECTORY",
    "name_or_path": "write model.hf=DIRECTORY",
    "pretrained": "write model.hf=DIRECTORY",
    "devices": "write cluster.procs_per_node",
    "num_nodes": "write cluster.nodes",
    "nnodes": "write cluster.nodes",
    "nproc_per_node": "write cluster.procs_per_node",
    "gpus": "write cluster.procs_per_node",
    "offload": OFFLOAD,
    "cpu_offload": OFFLOAD,
    "offload_optimizer": OFFLOAD,
    "offload_param": OFFLOAD,
    "strategy": "write plugin=zero3 (fully sharded) and the like",
    "mixed_precision": "write train.precision=bf16",
    "fp16": "write train.precision=fp16",
    "bf16": "write train.precision=bf16",
    "monitor": BEST,
    "metric_for_best_model": BEST,
    "greater_is_better": "write checkpoint.best.mode=max or min",
    "save_total_limit": "write checkpoint.keep",
    "save_top_k": "write checkpoint.keep",
    "drop_last": "write train.last_batch=drop",
    "dataloader_drop_last": "write train.last_batch=drop",
    "val_check_interval": EVALUATION,
    "check_val_every_n_epoch": EVALUATION,
    "save_steps": "write checkpoint.every",
    "eval_steps": "write train.eval_every (steps between evaluations)",
    "logging_steps": "write observe.log_every",
    "report_to": "write observe.trackers",
    "output_dir": "write name (the run's folder is runs/NAME)",
    "resume_from_checkpoint": "write checkpoint.resume",
}
"""Last part of an unknown key → what to write."""
SHARDED = "plugin=zero3 shards all (FULL_SHARD), zero2 gradients and optimizer (SHARD_GRAD_OP)"
PLUGINS = {
    "fsdp": SHARDED,
    "fsdp2": SHARDED,
    "full_shard": "take plugin=zero3",
    "shard_grad_op": "take plugin=zero2",
    "hsdp": "take plugin=fsdp-hybrid",
    "hybrid_shard": "take plugin=fsdp-hybrid",
    "ddp": "take plugin=zero1: the gradients of DDP, with the optimizer's state shared out",
    "dp": "take plugin=zero1",
    "deepspeed": "take plugin=zero1, zero2, zero3, or gemini for offloading",
    "zero": "take plugin=zero1, zero2 or zero3",
    "deepspeed_stage_1": "take plugin=zero1",
    "deepspeed_stage_2": "take plugin=zero2",
    "deepspeed_stage_3": "take plugin=zero3",
    "zero_offload": "take plugin=gemini",
    "zero_infinity": "take plugin=gemini",
    "colossalai": "take plugin=gemini",
}
VALUES = {
    "plugin": PLUGINS,
    "plugin.name": PLUGINS,
    "train.precision": {
        **dict.fromkeys(("bf16-mixed", "bfloat16", "bf16-true"), "write train.precision=bf16"),
        **dict.fromkeys(("16-mixed", "float16", "half", "16"), "write train.precision=fp16"),
        **dict.fromkeys(("32", "32-true", "float32"), "write train.precision=fp32"),
    },
    "optim.name": {
        "adam": "take optim.name=adamw with optim.weight_decay=0",
        "adamw_torch": "take optim.name=adamw",
        "fusedadam": "take optim.name=adamw",
    },
    "train.activation_checkpointing": {
        "true": "take full",
    },
}
"""Key → lower-case value → what to write instead."""


def hinted(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems without duplicates; settings of other tools get a hint as their fix."""
    found = [dataclasses.replace(p, fix=_hint(p) or p.fix) for p in problems]
    return list({str(problem): problem for problem in found}.values())


def _hint(problem: Problem) -> str | None:
    key, value = problem.key, str(problem.value)
    if problem.expected == "a known key":
        return KEYS.get(key.rpartition(".")[2])
    return VALUES.get(key, {}).get(value.lower().replace(" ", "_"))
