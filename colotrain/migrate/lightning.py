"""Lightning's YAML configuration, as LightningCLI reads and writes it."""

from __future__ import annotations

from typing import Any

from colotrain.migrate import deepspeed
from colotrain.migrate.findings import (
    Answer,
    Flat,
    Rules,
    decay,
    decided,
    disk,
    is_on,
    none,
    number,
    numbers,
    offload,
    taken,
    whole,
)
from colotrain.migrate.lightning_callbacks import CHECKPOINTS, SHOWN, callback, kept

SIGNS = frozenset({"trainer", "seed_everything", "lr_scheduler", "ckpt_path"})
STRATEGIES = {
    "auto": "auto",
    "ddp": "zero1",
    "single_device": "zero1",
    "fsdp": "zero3",
    "modelparallel": "zero3",
    "deepspeed": "zero2",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_3": "zero3",
    "ddpstrategy": "zero1",
    "fsdpstrategy": "zero3",
    "modelparallelstrategy": "zero3",
    "deepspeedstrategy": "zero2",
    "singledevicestrategy": "zero1",
}
SHARDING = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "zero1",
    "HYBRID_SHARD": "fsdp-hybrid",
}
SCHEDULES = {
    "CosineAnnealingLR": "cosine",
    "LinearLR": "linear",
    "ConstantLR": "constant",
}
CODE = "your own class is not called by colotrain: name a function that builds it"
FINAL_RATIO = {"cosine": 0.0, "linear": 1.0}
"""Schedule → default final learning rate in torch, as a share of the peak."""
LOGGERS = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}


def _strategy(value: Any, flat: Flat) -> Answer:
    name = str(value).rpartition(".")[2].lower()
    offload = name.endswith("_offload") or name.startswith("fsdp_cpu")
    plugin = STRATEGIES.get(name.removesuffix("_offload"))
    if name.startswith("ddp"):
        plugin = "zero1"
    if offload:
        plugin = "gemini"
    if plugin is None:
        return Answer(outcome="none", note=f"there is no strategy {value}")
    stage = flat.get("trainer.strategy.init_args.stage")
    if "deepspeed" in name and stage is not None:
        return Answer(outcome="decided", note="the stage says which plugin it is")
    sharding = flat.get("trainer.strategy.init_args.sharding_strategy")
    if "fsdp" in name and sharding is not None:
        return Answer(outcome="decided", note="the sharding strategy says which plugin it is")
    note = "the nearest: only optimizer states are sharded" if plugin == "zero1" else ""
    return Answer(outcome="taken", note=note, settings={"plugin.name": plugin})


def _stage(value: Any, flat: Flat) -> Answer:
    offloads = ("offload_optimizer", "offload_parameters")
    on = any(is_on(flat.get(f"trainer.strategy.init_args.{name}")) for name in offloads)
    return deepspeed.RULES["zero_optimization.stage"](
        value, {deepspeed.OFFLOAD[0]: "cpu"} if on else {}
    )


def _sharding(value: Any, flat: Flat) -> Answer:
    name = SHARDING.get(str(value))
    if name is None:
        return Answer(outcome="none", note=f"there is no strategy {value}")
    if is_on(flat.get("trainer.strategy.init_args.cpu_offload")):
        name = "gemini"
    return Answer(outcome="taken", settings={"plugin.name": name})


def _accelerator(value: Any, _: Flat) -> Answer:
    if str(value) not in ("auto", "cpu", "gpu", "cuda"):
        return Answer(outcome="none", note=f"{value} is not there: cpu and cuda are")
    device = "cpu" if value == "cpu" else "auto"
    note = (
        "" if value == "cpu" else "GPUs are used where there are any (cluster.device=cuda insists)"
    )
    return Answer(outcome="taken", settings={"cluster.device": device}, note=note)


def _devices(value: Any, _: Flat) -> Answer:
    if value in ("auto", -1, "-1", None):
        return Answer(outcome="decided", note="one rank per GPU, or per core on CPU")
    if isinstance(value, list):
        note = "as many ranks; choose the GPUs with CUDA_VISIBLE_DEVICES"
        settings = {"cluster.procs_per_node": len(value)}
        return Answer(outcome="taken", note=note, settings=settings)
    return taken("cluster.procs_per_node", whole)(value, {})


def _precision(value: Any, _: Flat) -> Answer:
    names = {"32": "fp32", "16": "fp16", "bf16": "bf16"}
    name = names.get(str(value).removesuffix("-true").removesuffix("-mixed"))
    if name is None:
        return Answer(outcome="none", note=f"{value} is not there: fp32, fp16 and bf16 are")
    note = "weights stay in the model's own precision" if str(value).endswith("true") else ""
    return Answer(outcome="taken", settings={"train.precision": name}, note=note)


def _steps(value: Any, _: Flat) -> Answer:
    if value in (-1, None):
        return Answer(outcome="decided", note="no limit: set train.max_steps")
    return taken("train.max_steps", whole)(value, {})


def _val_interval(value: Any, flat: Flat) -> Answer:
    if isinstance(value, float) and value <= 1:
        return taken("train.eval_every", lambda share: f"{share:g}ep")(value, flat)
    steps = whole(flat.get("trainer.accumulate_grad_batches") or 1)
    note = "batches become optimizer steps"
    settings = {"train.eval_every": max(1, whole(value) // steps)}
    return Answer(outcome="taken", note=note, settings=settings)


def _val_batches(value: Any, _: Flat) -> Answer:
    if isinstance(value, float) and value == 0:  # a share, but of nothing
        return taken("train.eval_steps", whole)(0, {})
    if isinstance(value, float) and value == 1:
        return taken("train.eval_steps", lambda _: "all")(value, {})
    if isinstance(value, float) and value < 1:
        return Answer(outcome="none", note="a number of global batches: set train.eval_steps")
    return taken("train.eval_steps", whole, "counted in global batches")(value, {})


def _clip_algorithm(value: Any, _: Flat) -> Answer:
    if str(value) == "norm":
        return Answer(outcome="taken", note="the only one there is")
    return Answer(outcome="none", note="gradients are clipped by their global norm")


def _logger(value: Any, _: Flat) -> Answer:
    if isinstance(value, bool):
        return Answer(outcome="decided", note="every event is JSON in the run's folder")
    tracker = LOGGERS.get(str(value).rpartition(".")[2])
    if tracker is None:
        return Answer(outcome="none", note="trackers are tensorboard and wandb")
    return Answer(outcome="taken", settings={"observe.trackers": [tracker]})


def _optimizer(value: Any, _: Flat) -> Answer:
    return deepspeed.optimizer_name(str(value))


def _scheduler(value: Any, _: Flat) -> Answer:
    name = str(value).rpartition(".")[2]
    found = SCHEDULES.get(name)
    if found is None:
        return Answer(outcome="none", note=f"{name} is not there: see optim.schedule.name")
    settings: dict[str, Any] = {"optim.schedule.name": found, "optim.schedule.warmup_steps": 0}
    if found in FINAL_RATIO:
        settings["optim.schedule.min_lr_ratio"] = FINAL_RATIO[found]
    return Answer(outcome="taken", settings=settings)


def _epochs(value: Any, flat: Flat) -> Answer:
    if flat.get("trainer.max_steps") not in (-1, None):
        return Answer(outcome="none", note="the length of a run is train.max_steps")
    if value in (-1, None):
        return Answer(outcome="asked", note="no limit: set train.epochs or train.max_steps")
    return taken("train.epochs", whole)(value, flat)


def _recomputed(value: Any, _: Flat) -> Answer:
    if value is None or value == []:
        return Answer(outcome="decided", note="nothing is recomputed unless you say so")
    settings = {"train.activation_checkpointing": "full"}
    note = "each of the model's repeated blocks; selective keeps more"
    return Answer(outcome="taken", note=note, settings=settings)


def _length(value: Any, flat: Flat) -> Answer:
    """Length of the schedule: in colotrain that of the run, in steps, which the trainer has.

    Lightning steps a schedule once per epoch unless the model's code says otherwise.
    """
    steps = flat.get("trainer.max_steps")
    if str(flat.get("lr_scheduler.class_path")).endswith("ConstantLR"):
        return Answer(outcome="none", note="the learning rate is the same from the first step on")
    if steps in (-1, None) and value == flat.get("trainer.max_epochs"):
        return Answer(outcome="decided", note="the schedule ends with the run")
    if steps in (-1, None):
        note = f"set train.max_steps, where the schedule ends: Lightning counts {value} epochs"
        return Answer(outcome="asked", note=note)
    if whole(steps) != whole(value):
        return Answer(outcome="none", note="the schedule ends with the run, at trainer.max_steps")
    return taken("train.max_steps", whole, "the schedule ends the run")(value, flat)


def _lowest(value: Any, flat: Flat) -> Answer:
    """Convert the final learning rate to a share of the peak."""
    lr = flat.get("optimizer.init_args.lr")
    if not lr:
        return Answer(outcome="none", note="set optim.schedule.min_lr_ratio, a share of optim.lr")
    ratio = number(value) / number(lr)
    return Answer(outcome="taken", settings={"optim.schedule.min_lr_ratio": ratio})


def _momentum(value: Any, flat: Flat) -> Answer:
    if str(flat.get("optimizer.class_path", "")).lower().endswith("sgd"):
        return taken("optim.momentum", number)(value, flat)
    return Answer(outcome="none", note="only SGD has a momentum")


def _checkpoints(value: Any, _: Flat) -> Answer:
    if value is None or is_on(value):
        return Answer(outcome="decided", note=CHECKPOINTS)
    return Answer(outcome="taken", note="none is saved", settings={"checkpoint.every": 0})


def _seed(value: Any, _: Flat) -> Answer:
    if isinstance(value, bool):
        return Answer(outcome="decided", note="train.seed keeps its default")
    return taken("train.seed", whole)(value, {})


RULES: Rules = {
    "seed_everything": _seed,
    "ckpt_path": taken("checkpoint.resume", str, "a run or a checkpoint folder of colotrain's"),
    "trainer.accelerator": _accelerator,
    "trainer.strategy": _strategy,
    "trainer.strategy.class_path": _strategy,
    "trainer.strategy.init_args.stage": _stage,
    "trainer.strategy.init_args.sharding_strategy": _sharding,
    "trainer.strategy.init_args.cpu_offload": offload,
    "trainer.strategy.init_args.offload_optimizer": offload,
    "trainer.strategy.init_args.offload_parameters": offload,
    "trainer.strategy.init_args.activation_checkpointing*": _recomputed,
    "trainer.strategy.init_args.nvme_path": disk("trainer.strategy.init_args.offload_*_device"),
    "trainer.strategy.init_args.auto_wrap_policy*": decided("groups are found in the model"),
    "trainer.strategy.init_args.state_dict_type": decided("checkpoints are sharded"),
    "trainer.strategy.init_args.find_unused_parameters": decided(
        "parameters without a path from the loss are detected and not updated"
    ),
    "trainer.strategy.init_args.*": decided("buffers and buckets follow from the model's groups"),
    "trainer.devices": _devices,
    "trainer.num_nodes": taken("cluster.nodes", whole),
    "trainer.precision": _precision,
    "trainer.max_steps": _steps,
    "trainer.max_epochs": _epochs,
    "trainer.min_epochs": none("the length of a run is train.max_steps"),
    "trainer.min_steps": none("the length of a run is train.max_steps"),
    "trainer.max_time": none("the length of a run is train.max_steps"),
    "trainer.accumulate_grad_batches": taken("accumulate.steps", whole),
    "trainer.gradient_clip_val": deepspeed.RULES["gradient_clipping"],
    "trainer.gradient_clip_algorithm": _clip_algorithm,
    "trainer.val_check_interval": _val_interval,
    "trainer.check_val_every_n_epoch": taken("train.eval_every", lambda n: f"{n}ep"),
    "trainer.limit_val_batches": _val_batches,
    "trainer.limit_*_batches": none("the length of a run is train.max_steps"),
    "trainer.num_sanity_val_steps": decided("the first evaluation is before the first step"),
    "trainer.log_every_n_steps": taken("observe.log_every", whole),
    "trainer.logger": _logger,
    "trainer.logger.class_path": _logger,
    "trainer.logger[*].class_path": _logger,
    "trainer.logger*": decided("records go into the run's folder"),
    "trainer.callbacks": decided("none were asked for"),
    "trainer.callbacks.class_path": callback,
    "trainer.callbacks[*].class_path": callback,
    "trainer.callbacks[*].init_args.every_n_train_steps": taken("checkpoint.every", whole),
    "trainer.callbacks*.init_args.save_top_k": kept,
    "trainer.callbacks*": none("an argument of the callback above"),
    "trainer.enable_checkpointing": _checkpoints,
    "trainer.enable_progress_bar": decided(SHOWN),
    "trainer.enable_model_summary": decided("`colotrain plan` shows it"),
    "trainer.deterministic": decided("the same plan gives the same run"),
    "trainer.benchmark": none("cuDNN's search is left as torch has it"),
    "trainer.inference_mode": decided("evaluation records no gradients"),
    "trainer.use_distributed_sampler": decided("sample order does not depend on the ranks"),
    "trainer.sync_batchnorm": none("convert the model yourself"),
    "trainer.detect_anomaly": decided("a value that is not finite is traced to its module"),
    "trainer.profiler*": none("a step's parts are timed in every run"),
    "trainer.plugins*": none("ranks and precision are set by cluster and train"),
    "trainer.reload_dataloaders_every_n_epochs": none("data are read by position"),
    "trainer.default_root_dir": decided("runs are under ./runs, by name"),
    "trainer.fast_dev_run": none("set train.max_steps=1"),
    "trainer.overfit_batches": none("name a small file in data.path"),
    "trainer.barebones": none("observing never blocks training"),
    "model.class_path": none(f"{CODE} (model.target)"),
    "model.init_args.*": none("arguments of your model go to model.args"),
    "model.*": none(f"{CODE} (model.target)"),
    "data.class_path": none(f"{CODE} (data.target), or give the files (data.path)"),
    "data.init_args.batch_size": taken("train.micro_batch", whole, "samples of one rank at once"),
    "data.init_args.num_workers": taken("data.num_workers", whole),
    "data.init_args.*": none("arguments of your data go to data.args"),
    "data.batch_size": taken("train.micro_batch", whole, "samples of one rank at once"),
    "data.*": none(f"{CODE} (data.target), or give the files (data.path)"),
    "optimizer.class_path": _optimizer,
    "optimizer.init_args.lr": taken("optim.lr", number),
    "optimizer.init_args.betas": taken("optim.betas", numbers),
    "optimizer.init_args.eps": taken("optim.eps", number),
    "optimizer.init_args.weight_decay": decay,
    "optimizer.init_args.momentum": _momentum,
    "optimizer.init_args.fused": decided("torch's fused implementation is used"),
    "optimizer.init_args.foreach": decided("torch's fused implementation is used"),
    "optimizer.init_args.*": none("an argument of an optimizer that colotrain does not have"),
    "lr_scheduler.class_path": _scheduler,
    "lr_scheduler.init_args.T_max": _length,
    "lr_scheduler.init_args.total_iters": _length,
    "lr_scheduler.init_args.eta_min": _lowest,
    "lr_scheduler.init_args.end_factor": taken("optim.schedule.min_lr_ratio", number),
    "lr_scheduler.init_args.*": none("an argument of a schedule that colotrain does not have"),
}
