"""Rules that tools for fine-tuning share: models, data, adapters, optimizers, schedules."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colotrain.migrate.accelerate import RULES as ACCELERATE
from colotrain.migrate.deepspeed import STAGES, optimizer_name
from colotrain.migrate.findings import (
    Answer,
    Flat,
    Rule,
    Rules,
    asked,
    clip,
    decided,
    is_on,
    none,
    number,
    refused,
    taken,
    where,
    whole,
)
from colotrain.spec.hub import is_hub_name
from colotrain.spec.objectives import OBJECTIVES
from colotrain.spec.observing import TRACKERS
from colotrain.spec.optimizers import OPTIMIZERS

TRANSFORMERS: dict[str, Any] = {
    "train.grad_clip": 1.0,
    "train.seed": 42,
    "train.tf32": False,
    "optim.name": "adamw",
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.0,
    "optim.schedule.min_lr_ratio": 0.0,
    "accumulate.steps": 1,
    "data.loss_on": "answers",
    "data.packing": "none",
    "data.validation_fraction": 0.0,
}
"""Defaults of tools that train with transformers' Trainer; min_lr_ratio is that of its cosine."""
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "get_cosine_schedule_with_warmup": "cosine",
}
LINEAR_LAYERS = ["all-linear"]
"""Adapter's targets: all linear layers but the head."""
PROJECTIONS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""torchtune's names of layers → those of transformers."""
BUILDERS = ("json", "csv", "text", "parquet", "arrow")
"""Names of kinds of files that stand where a dataset's name would."""
QUANTIZED = (
    "bases are packed as nf4 or int8 here (model.quantize): take this key out to train the same "
    "adapters on the weights as they are"
)
NF4 = "4-bit NormalFloat in blocks of 64; their scales stay in float32, which there are packed, too"
IMAGES = "models of pictures, sound or video are not read from such a file: name model and data"
OBJECTIVE = (
    "settings of this objective are not translated: take the key out, and set train.objective in "
    f"the recipe ({', '.join(OBJECTIVES)}, or null for the model's loss)"
)
MEAN_OF_PAIRS = (
    "the mean over the pairs of the global batch, where theirs is of a micro-batch's tokens"
)
KL = "the KL is that of the whole global batch, where theirs is of a micro-batch"
PAIRS = "pairs have prompt, chosen and rejected: set data.columns for other names"
RATED = "records have prompt, completion and label: set data.columns for other names"
TRACKER = f"trackers are {', '.join(TRACKERS[:-1])} and {TRACKERS[-1]}"
CHECKPOINT = "another tool's checkpoint is not continued: name its weights as the model"
KERNELS = "attention and other kernels are chosen for the model; results are the same"
TEMPLATE = (
    "conversations are rendered by the template of the tokenizer's folder: set data.chat_template "
    "if that is not the one"
)
ALPACA = (
    "prompts have Alpaca's text there; here they have the tokenizer's chat template, or headings "
    "where it has none: set data.chat_template to a Jinja file for another"
)
SLICE = "all records are read: cut the files to a part of them"
ONE_AHEAD = (
    "a warm-up is one step ahead here (there it begins with a step at 0), and the last step has "
    "the final learning rate"
)


BESIDE_TRAINING: dict[str, Rule] = {
    "output_dir": decided("runs are under ./runs, by name"),
    "trust_remote_code": decided("code of a model's folder is never run"),
    "hub_*": none("an export is a directory: upload it yourself"),
}
LATER = asked("set data.validation_path to these files")


def packed(value: Any, flat: Flat) -> Answer:
    """Translate a switch of a base in 4-bit NormalFloat, as QLoRA has it."""
    if not is_on(value):
        return Answer(outcome="decided", note="off")
    return Answer(outcome="taken", note=NF4, settings={"model.quantize": "nf4"})


def model(value: Any, _: Flat) -> Answer:
    if is_hub_name(value):
        return Answer(outcome="taken", settings={"model.hf": str(value)})
    return _folder(str(value), {"model.hf": str(value)}, "")


def adapter_folder(value: Any, _: Flat) -> Answer:
    settings = {"adapter.name": "lora", "adapter.path": str(value)}
    return _folder(str(value), settings, "")


def dataset(value: Any, _: Flat) -> Answer:
    if str(value) in BUILDERS:
        return Answer(outcome="decided", note="the kind of files is seen in them")
    return _folder(str(value), {"data.path": [str(value)]}, "--repo-type dataset ")


def _folder(name: str, settings: dict[str, Any], kind: str) -> Answer:
    """Take a folder that exists; ask for one that must be downloaded or corrected first."""
    if Path(name).expanduser().exists():
        return Answer(outcome="taken", settings=settings)
    key = next(key for key in settings if key != "adapter.name")
    note = f"there is no such folder: set {key}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        word = shlex.quote(name)
        note = f"download it (`hf download {kind}{word} --local-dir {word}`), or set {key}"
    return Answer(outcome="asked", note=note, settings=settings)


def data_files(value: Any, flat: Flat) -> Answer:
    files = [str(file) for file in (value if isinstance(value, list) else [value])]
    if any(key.endswith(".path") and kind in BUILDERS for key, kind in flat.items()):
        return Answer(outcome="taken", settings={"data.path": files})
    note = "the whole folder is read: set data.path to these files in it"
    return Answer(outcome="asked", note=note)


def split(value: Any, _: Flat) -> Answer:
    if "[" in str(value):
        return Answer(outcome="asked", note=SLICE)
    return Answer(outcome="decided", note="names of files say which split they are")


def column(meaning: str, keys: str) -> Rule:
    """Rule for a column's name, which must be the same at all `keys`, a regular expression."""

    def rule(value: Any, flat: Flat) -> Answer:
        names = {name for key, name in flat.items() if re.fullmatch(keys, key)}
        if len(names) > 1:
            note = f"data.columns has one name for all files: rename {meaning} in some of them"
            return Answer(outcome="asked", note=note)
        return taken(f"data.columns.{meaning}", str)(value, flat)

    return rule


def packing(isolated: Callable[[Flat], bool] = lambda flat: True) -> Rule:
    def rule(value: Any, flat: Flat) -> Answer:
        settings: dict[str, Any] = {"data.packing": "whole" if is_on(value) else "none"}
        if is_on(value) and isolated(flat):
            settings |= {"data.isolate": True}
        return Answer(outcome="taken", settings=settings)

    return rule


def loss_on(choice: str) -> Rule:
    """Rule for a switch under which the loss counts `choice`, and otherwise all answers."""
    return taken("data.loss_on", lambda value: choice if is_on(value) else "answers")


def optimizer(value: Any, _: Flat) -> Answer:
    """The optimizer of a name, which may ask for a state of few bits."""
    answer = optimizer_name(str(value))
    if answer.outcome != "taken":
        *others, last = OPTIMIZERS
        note = f"the optimizers are {', '.join(others)} and {last}, not {value}"
        return Answer(outcome="refused", note=note)
    note, settings = answer.note, answer.settings
    if re.search(r"8bit", str(value)) and settings == {"optim.name": "adamw"}:
        settings = {"optim.name": "adamw8bit"}
        note = "a block of its state lies within a row here (docs/optimizers.md)"
    elif re.search(r"[48]bit", str(value)):
        note = "its state is of the weights' precision here, not of few bits"
    return Answer(outcome="taken", note=note, settings=settings)


def schedule(value: Any, _: Flat) -> Answer:
    name = SCHEDULES.get(str(value).rpartition(".")[2])
    if name is None:
        note = f"{value} is not there: see optim.schedule.name"
        return Answer(outcome="refused", note=note)
    settings: dict[str, Any] = {"optim.schedule.name": name}
    if str(value) == "constant":
        return Answer(outcome="taken", settings=settings | {"optim.schedule.warmup_steps": 0})
    return Answer(outcome="taken", note=ONE_AHEAD, settings=settings)


def warmup(value: Any, _: Flat) -> Answer:
    """Translate a warm-up in steps, or, below 1, as a share of the run."""
    share = number(value)
    if 0 < share < 1:
        return Answer(outcome="taken", settings={"optim.schedule.warmup_ratio": share})
    return taken("optim.schedule.warmup_steps", whole)(value, {})


def warmup_ratio(value: Any, flat: Flat) -> Answer:
    if flat.get("warmup_steps"):
        return Answer(outcome="decided", note="warmup_steps counts")
    return taken("optim.schedule.warmup_ratio", number)(value, flat)


def beta(index: int, other: str) -> Rule:
    """Rule for one of AdamW's betas, where `other` is the key of the other one."""

    def rule(value: Any, flat: Flat) -> Answer:
        usual = TRANSFORMERS["optim.betas"]
        betas = [number(flat.get(other) or usual[1 - index])] * 2
        betas[index] = number(value)
        return Answer(outcome="taken", settings={"optim.betas": betas})

    return rule


def interval(key: str) -> Rule:
    """Rule for a number of steps between two events; below 1 it is a share of the run."""

    def rule(value: Any, flat: Flat) -> Answer:
        if 0 < number(value) < 1:
            return Answer(outcome="asked", note=f"a share of the run: set {key} in steps or epochs")
        return taken(key, whole)(value, flat)

    return rule


def per_epoch(key: str) -> Rule:
    """Rule for a number of events in each epoch."""

    def rule(value: Any, flat: Flat) -> Answer:
        if not number(value):
            return Answer(outcome="taken", settings={key: None})
        return taken(key, lambda count: f"{1 / number(count):.6g}ep")(value, flat)

    return rule


def strategy(key: str) -> Rule:
    """Rule for when an event happens: `epoch`, `no`, or `steps`, which have a key of their own."""

    def rule(value: Any, _: Flat) -> Answer:
        choices: dict[str, dict[str, Any]] = {"epoch": {key: "1ep"}, "no": {key: None}, "steps": {}}
        settings = choices.get(str(value))
        if settings is None:
            return Answer(outcome="none", note=f"{value} is not there: see {key}")
        return Answer(outcome="taken", settings=settings, note="" if settings else "see its steps")

    return rule


def held_out(value: Any, _: Flat) -> Answer:
    """Translate the share of the records that are kept for validation."""
    share = number(value)
    if share > 1:
        return Answer(outcome="asked", note="a number of records: set data.validation_fraction")
    settings = {"data.validation_fraction": share, "train.eval_steps": "all" if share else 0}
    return Answer(outcome="taken", settings=settings)


def recompute(value: Any, _: Flat) -> Answer:
    kind = "full" if value not in (False, "false", "no") else "none"
    return Answer(outcome="taken", settings={"train.activation_checkpointing": kind})


def tracker(value: Any, _: Flat) -> Answer:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    known = [name for name in names if name in TRACKERS]
    if known:
        return Answer(outcome="taken", settings={"observe.trackers": known})
    if names == ["none"]:
        return Answer(outcome="decided", note="every event is JSON in the run's folder")
    return Answer(outcome="none", note=TRACKER)


def switched_tracker(name: str) -> Rule:
    def rule(value: Any, flat: Flat) -> Answer:
        return tracker(name if is_on(value) else "none", flat)

    return rule


def deepspeed_file(value: Any, _: Flat) -> Answer:
    """Translate the name of a DeepSpeed file, whose own settings another import reads."""
    name = Path(str(value)).stem.lower()
    stage = re.search(r"z(?:ero)?_?([0-3])", name)
    if stage is None:
        return Answer(outcome="asked", note="set plugin.name: import that file by itself")
    plugin = "gemini" if "offload" in name else STAGES[int(stage[1])]
    note = "as that file's name says; import it by itself for what else it has"
    return Answer(outcome="taken", note=note, settings={"plugin.name": plugin})


def fsdp_rules() -> Rules:
    """Accelerate's rules for its section of FSDP, with and without `fsdp_` before the names."""
    long, short = "fsdp_config.fsdp_", "fsdp_config."

    def renamed(rule: Rule) -> Rule:
        def with_long_names(value: Any, flat: Flat) -> Answer:
            names = {re.sub(r"^fsdp_config\.(fsdp_)?", long, key): v for key, v in flat.items()}
            return rule(value, names)

        return with_long_names

    rules = {key: renamed(rule) for key, rule in ACCELERATE.items() if key.startswith(long)}
    return {
        **rules,
        **{key.replace(long, short): rule for key, rule in rules.items()},
        "fsdp_config.*limit_all_gathers": decided("groups are gathered one ahead"),
    }


def is_sharded(flat: Flat) -> bool:
    """Whether FSDP or DeepSpeed shards, which both keep weights in fp32 beside half precision."""
    return bool(flat.get("deepspeed") or flat.get("fsdp")) or any(
        key.startswith("fsdp_config.") and value is not None for key, value in flat.items()
    )


Has = Callable[[Flat], bool]


def lora(has: Has, names: Mapping[str, str]) -> dict[str, Rule]:
    """The rules for LoRA's keys; `names` gives each meaning's key in the tool's files.

    `has` tells whether a file asks for an adapter at all: without one these keys have no effect.
    """
    meanings = {
        "rank": taken("adapter.rank", whole),
        "alpha": taken("adapter.alpha", number),
        "dropout": taken("adapter.dropout", number),
        "targets": targets,
        "rank_stabilised": taken("adapter.rslora", is_on),
        "decomposed": _decomposed,
        "ratio_of_b": _rate_of_b,
        "whole_modules": _whole_modules,
    }
    absent = "no adapter is asked for"
    return {key: where(has, absent, meanings[meaning]) for meaning, key in names.items()}


def _decomposed(value: Any, _: Flat) -> Answer:
    if not is_on(value):
        return Answer(outcome="decided", note="off")
    return Answer(outcome="taken", settings={"adapter.name": "dora"})


def targets(value: Any, _: Flat) -> Answer:
    """Translate names of layers: a list, a text with commas, `all`, or a regular expression."""
    if str(value) in ("all", "all-linear"):
        return Answer(outcome="taken", settings={"adapter.targets": LINEAR_LAYERS})
    names = value if isinstance(value, list) else str(value).split(",")
    if any(re.search(r"[\\()|+*$^]", str(name)) for name in names):
        return Answer(outcome="asked", note="a regular expression: set adapter.targets to globs")
    layers = [str(name).strip() for name in names]
    settings = {"adapter.targets": [PROJECTIONS.get(layer, layer) for layer in layers]}
    return Answer(outcome="taken", settings=settings)


def linear_layers(value: Any, _: Flat) -> Answer:
    settings = {"adapter.targets": LINEAR_LAYERS} if is_on(value) else {}
    return Answer(outcome="taken", settings=settings, note="" if settings else "off")


def _rate_of_b(value: Any, _: Flat) -> Answer:
    rules = [{"match": "*lora_B*", "lr_scale": number(value)}]
    return Answer(outcome="taken", settings={"optim.rules": rules})


def _whole_modules(value: Any, _: Flat) -> Answer:
    names = value if isinstance(value, list) else str(value).split(",")
    settings = {"freeze.except": [f"*{str(name).strip()}*" for name in names]}
    note = "these modules train whole, beside the adapters"
    return Answer(outcome="taken", note=note, settings=settings)


def fsdp(value: Any, _: Flat) -> Answer:
    if not value:
        return Answer(outcome="decided", note="off")
    plugin = "gemini" if "offload" in value else "zero3"
    return Answer(outcome="taken", settings={"plugin.name": plugin})


def _tf32(value: Any, _: Flat) -> Answer:
    """Translate the switch; `auto` turns it on wherever GPUs have it, as it does here."""
    return Answer(outcome="taken", settings={"train.tf32": is_on(value) or value == "auto"})


def warms_up(scheduler: str) -> Callable[[Flat], bool]:
    """Whether the schedule at that key begins with a warm-up: `constant` has none."""
    return lambda flat: flat.get(scheduler) != "constant"


def trainer(scheduler: str) -> dict[str, Rule]:
    """The rules for arguments of transformers' Trainer; `scheduler` is the key of its schedule."""
    warms = warms_up(scheduler)
    return {
        "gradient_accumulation_steps": taken("accumulate.steps", whole),
        "learning_rate": taken("optim.lr", number),
        "adam_beta1": beta(0, "adam_beta2"),
        "adam_beta2": beta(1, "adam_beta1"),
        "adam_epsilon": taken("optim.eps", number),
        "weight_decay": taken("optim.weight_decay", number),
        "max_grad_norm": taken("train.grad_clip", clip),
        scheduler: schedule,
        "lr_scheduler_kwargs.min_lr_rate": taken("optim.schedule.min_lr_ratio", number),
        "lr_scheduler_kwargs*": refused("see optim.schedule for what a schedule may have"),
        "warmup_steps": where(warms, "a constant schedule has no warm-up", warmup),
        "warmup_ratio": where(warms, "a constant schedule has no warm-up", warmup_ratio),
        "optim_args*": refused("arguments of an optimizer are those of optim"),
        "optim_target_modules": refused("an optimizer for some layers is not there"),
        "neftune_noise_alpha": refused("noise in embeddings is not there"),
        "label_smoothing_factor": refused("smoothed labels are not there: see train.loss"),
        "seed": taken("train.seed", whole),
        "tf32": _tf32,
        "gradient_checkpointing": recompute,
        "gradient_checkpointing_kwargs*": decided("recomputation is non-reentrant, always"),
        "torch_compile": taken("train.compile", is_on),
        "torch_compile_*": decided("torch.compile of each block, with its defaults"),
        "group_by_length": none("the order of samples is a function of seed and position"),
        "dataloader_drop_last": taken("train.last_batch", lambda v: "drop" if is_on(v) else "fill"),
        "dataloader_*": decided("samples of files are read where they lie"),
        "remove_unused_columns": decided("columns without a meaning are listed, and not read"),
        "save_steps": interval("checkpoint.every"),
        "save_strategy": strategy("checkpoint.every"),
        "save_total_limit": taken("checkpoint.keep", whole),
        "save_*": decided("checkpoints have all that a resume needs; exports are safetensors"),
        "eval_steps": interval("train.eval_every"),
        "eval_strategy": strategy("train.eval_every"),
        "evaluation_strategy": strategy("train.eval_every"),
        "load_best_model_at_end": none("see checkpoint.best, and export --step"),
        "metric_for_best_model": none("see checkpoint.best.metric"),
        "greater_is_better": none("see checkpoint.best.mode"),
        "logging_steps": taken("observe.log_every", whole),
        "resume_from_checkpoint": refused(CHECKPOINT),
        "deepspeed": deepspeed_file,
        "fsdp": fsdp,
        "fsdp_transformer_layer_cls_to_wrap": decided("groups are found in the model"),
        "fsdp_config": decided("off"),
        **fsdp_rules(),
        "ddp_*": decided("ranks are watched, and parameters without a gradient detected"),
        "ray_*": none("see `colotrain submit`"),
        **BESIDE_TRAINING,
    }
