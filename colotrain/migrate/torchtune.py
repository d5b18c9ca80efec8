"""torchtune's YAML configurations of recipes, with dotted names of components."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from colotrain.migrate import finetuning as tuning
from colotrain.migrate.accelerate import replicas
from colotrain.migrate.defaults import silent
from colotrain.migrate.findings import (
    Answer,
    Flat,
    Rule,
    asked,
    decay,
    decided,
    is_on,
    none,
    number,
    numbers,
    refused,
    taken,
    unless_null,
    where,
    whole,
)

SIGNS = frozenset(
    {
        "checkpointer",
        "tokenizer",
        "dataset",
        "loss",
        "metric_logger",
        "profiler",
        "dtype",
        "log_peak_memory_stats",
    }
)
SOURCES: dict[str, tuple[str, str]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "all"),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "all"),
    "chat_dataset": ("", "answers"),
    "instruct_dataset": ("", "answers"),
    "preference_dataset": ("", "answers"),
    "text_completion_dataset": ("", "answers"),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "answers"),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", "answers"),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", "answers"),
}
"""Builder of a dataset → its source by default, and what the loss counts by default."""
PROMPTS = {
    "alpaca_dataset": tuning.ALPACA,
    "alpaca_cleaned_dataset": tuning.ALPACA,
    "text_completion_dataset": "",
}
"""Builder of a dataset → what its prompts are, where the chat template does not make them."""
PAIRS = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
"""Columns of stack_exchange_paired_dataset by their meaning."""
LORA_KEYS = {
    "rank": "model.lora_rank",
    "alpha": "model.lora_alpha",
    "dropout": "model.lora_dropout",
    "decomposed": "model.use_dora",
}
MLP = ["gate_proj", "up_proj", "down_proj"]
NOT_FUSED = "layers of this model are fused in its folder: set adapter.targets"
NOT_TRAINED = "this file does not train: give one of a recipe for fine-tuning"
SEQ_LEN = 2048
"""Tokens per sample where torchtune has no limit."""


def component(value: Any) -> str:
    """Last part of a dotted name."""
    return str(value).rpartition(".")[2]


def _has_adapter(flat: Flat) -> bool:
    return component(flat.get("model._component_")).startswith(("lora_", "qlora_"))


def _model(value: Any, _: Flat) -> Answer:
    name = component(value)
    if "vision" in str(value) or "llama4" in name:
        return Answer(outcome="refused", note=tuning.IMAGES)
    if name.startswith("qlora_"):
        settings = {"adapter.name": "lora", "model.quantize": "nf4"}
        return Answer(outcome="taken", note=tuning.NF4, settings=settings)
    if name.startswith("lora_"):
        return Answer(outcome="taken", settings={"adapter.name": "lora"})
    return Answer(outcome="decided", note="the folder of the checkpoint says what the model is")


def _resolved(value: Any, flat: Flat) -> str:
    """The value with references to other keys of the file put in."""
    text = str(value)
    for key, other in flat.items():
        text = text.replace(f"${{{key}}}", str(other))
    return text


def _folder(value: Any, flat: Flat) -> Answer:
    return tuning.model(_resolved(value, flat), flat)


def _teacher(value: Any, flat: Flat) -> Answer:
    settings = {"train.objective": "distill", "train.distill.teacher": _resolved(value, flat)}
    return Answer(outcome="taken", settings=settings)


def _distilled(value: Any, _: Flat) -> Answer:
    if component(value) not in ("ForwardKLLoss", "ForwardKLWithChunkedOutputLoss"):
        return Answer(outcome="refused", note="a teacher's loss is forward KL (train.distill)")
    note = "of the most probable tokens (train.distill.top_k) and all others together"
    return Answer(outcome="taken", note=note, settings={"train.distill.temperature": 1.0})


def _loss(value: Any, _: Flat) -> Answer:
    name = component(value)
    if name == "DPOLoss":
        return Answer(outcome="taken", settings={"train.objective": "dpo"})
    if "CrossEntropy" in name or name == "CEWithChunkedOutputLoss":
        return Answer(outcome="decided", note="cross-entropy, in chunks of tokens")
    return Answer(outcome="refused", note=tuning.OBJECTIVE)


def _dataset(value: Any, flat: Flat) -> Answer:
    """Translate the builder of a dataset; Alpaca's has the prompt in the loss by default."""
    name = component(value)
    if name not in SOURCES:
        note = f"set data.path and data.columns to what {name} reads"
        return Answer(outcome="asked", note=note)
    source, counted = SOURCES[name]
    is_named = any(key.startswith("dataset.column_map.") for key in flat)
    settings: dict[str, Any] = {}
    if flat.get("dataset.train_on_input") is None:
        settings["data.loss_on"] = counted
    if name == "stack_exchange_paired_dataset" and not is_named:
        settings |= {f"data.columns.{meaning}": column for meaning, column in PAIRS.items()}
    note, found = PROMPTS.get(name, tuning.TEMPLATE), Answer(outcome="taken")
    if source and flat.get("dataset.source") is None:
        found = tuning.dataset(source, flat)
    outcome = "asked" if note == tuning.ALPACA else found.outcome
    notes = "; ".join(filter(None, (found.note, note)))
    return replace(found, outcome=outcome, note=notes, settings=settings | found.settings)


def _seq_len(value: Any, _: Flat) -> Answer:
    if value is not None:
        return taken("data.seq_len", whole)(value, {})
    note = f"no limit there; here samples are cut at {SEQ_LEN} tokens: set data.seq_len"
    return Answer(outcome="asked", note=note, settings={"data.seq_len": SEQ_LEN})


def _targets(value: Any, flat: Flat) -> Answer:
    if "phi" in str(flat.get("model._component_")):
        return Answer(outcome="asked", note=NOT_FUSED)
    return tuning.targets(value, flat)


def _also(*layers: str) -> Rule:
    """Rule for a switch that gives more layers an adapter."""

    def rule(value: Any, flat: Flat) -> Answer:
        if not is_on(value):
            return Answer(outcome="decided", note="off")
        return _targets(list(layers), flat)

    return where(_has_adapter, "no adapter is asked for", rule)


def _steps(value: Any, flat: Flat) -> Answer:
    steps = whole(value) * whole(flat.get("epochs") or 1)
    note = "of all epochs, if each has as many"
    return Answer(outcome="taken", note=note, settings={"train.max_steps": steps})


def _precision(value: Any, _: Flat) -> Answer:
    """Translate the type of the weights, in which torchtune also computes."""
    names = {"bf16": ("bf16", "bfloat16"), "fp32": ("fp32", "float32")}
    if value not in names:
        return Answer(outcome="refused", note="weights are bf16 or fp32")
    precision, dtype = names[value]
    return Answer(
        outcome="taken", settings={"train.precision": precision, "model.args.dtype": dtype}
    )


def _device(value: Any, _: Flat) -> Answer:
    device = "cpu" if value == "cpu" else "auto"
    return Answer(outcome="taken", settings={"cluster.device": device})


def _logger(value: Any, flat: Flat) -> Answer:
    names = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}
    if component(value) in ("DiskLogger", "StdoutLogger"):
        return Answer(outcome="decided", note="every event is JSON in the run's folder")
    return tuning.tracker(names.get(component(value), str(value)), flat)


def _evaluations(value: Any, flat: Flat) -> Answer:
    return Answer(
        outcome="taken", settings={"train.eval_every": whole(value), "train.eval_steps": "all"}
    )


def _offloaded(value: Any, _: Flat) -> Answer:
    if not is_on(value):
        return Answer(outcome="decided", note="off")
    note = "gemini places each group on a tier, from plugin.budget"
    return Answer(outcome="taken", note=note, settings={"plugin.name": "gemini"})


def _seed(value: Any, _: Flat) -> Answer:
    return taken("train.seed", whole)(value, {})


SECTIONS = ("policy_model", "reward_and_value_model", "value_checkpointer", "reward_checkpointer")
REINFORCED = (
    *(f"{section}.*" for section in SECTIONS),
    *("ref_policy_checkpointer.*", "reward_functions*", "grpo_samples", "ppo_*", "kl_coeff"),
    *("orchestration.*", "inference.*", "training.*", "postprocessing.*", "whiten_rewards"),
    *("forward_batch_size", "penalise_no_eos", "gamma", "lmbda", "min_response_length"),
    *("reward_penalty", "max_generated_tokens", "num_steps"),
)
UNTRAINED = ("tasks", "prompt.*", "max_new_tokens", "max_seq_length")
RULES = unless_null(
    {
        **dict.fromkeys(REINFORCED, refused("reinforcement learning is not there")),
        **dict.fromkeys(UNTRAINED, refused(NOT_TRAINED)),
        "model._component_": _model,
        **tuning.lora(_has_adapter, LORA_KEYS),
        "model.lora_attn_modules": where(_has_adapter, "no adapter is asked for", _targets),
        "model.apply_lora_to_mlp": _also(*MLP),
        "model.apply_lora_to_output": _also("lm_head"),
        "model.quantize_base": tuning.packed,
        "model.*_trainable": refused(tuning.IMAGES),
        "model.image_size": refused(tuning.IMAGES),
        "model.*": decided("the folder of the checkpoint says what the model is"),
        "tokenizer.image_size": refused(tuning.IMAGES),
        "tokenizer.max_num_tiles": refused(tuning.IMAGES),
        "tokenizer.prompt_template": asked("set data.chat_template to a Jinja file"),
        "tokenizer.*": decided("tokenizer.json of the model's folder is read"),
        "checkpointer.checkpoint_dir": _folder,
        "checkpointer.adapter_checkpoint": refused(tuning.CHECKPOINT),
        "checkpointer.recipe_checkpoint": refused(tuning.CHECKPOINT),
        "checkpointer.keep_last_n_checkpoints": taken("checkpoint.keep", whole),
        "checkpointer.*": decided("the folder is a model directory of transformers"),
        "base_model_path": decided("other keys name it"),
        "resume_from_checkpoint": refused(tuning.CHECKPOINT),
        "save_adapter_weights_only": taken(
            "checkpoint.content", lambda value: "trained" if is_on(value) else "all"
        ),
        "save_every_n_epochs": taken("checkpoint.every", lambda value: f"{whole(value)}ep"),
        "save_every_n_steps": taken("checkpoint.every", whole),
        "ref_checkpointer.checkpoint_dir": lambda value, flat: (
            decided("the reference of DPO is the model as the run begins")(value, flat)
            if _resolved(value, flat) == _resolved(flat.get("checkpointer.checkpoint_dir"), flat)
            else refused("the reference of DPO is the model as the run begins")(value, flat)
        ),
        "ref_checkpointer.*": decided("the reference of DPO is the model as the run begins"),
        "teacher_checkpointer.checkpoint_dir": _teacher,
        "teacher_checkpointer.*": decided("the folder is a model directory of transformers"),
        "teacher_model.*": decided("the folder of the teacher says what it is"),
        "kd_loss._component_": _distilled,
        "kd_ratio": taken("train.distill.alpha", number),
        "loss._component_": _loss,
        "loss.beta": taken("train.dpo.beta", number),
        "loss.label_smoothing": refused(tuning.OBJECTIVE),
        "loss.*": refused(tuning.OBJECTIVE),
        "temperature": decided("for generated texts alone"),
        "top_k": decided("for generated texts alone"),
        "limit": decided("for evaluation alone"),
        "stop_token_ids": decided("for reinforcement learning alone"),
        "quantizer*": refused("training for quantized weights is not there"),
        "dataset._component_": _dataset,
        "dataset.source": tuning.dataset,
        "dataset.data_files": tuning.data_files,
        "dataset.split": tuning.split,
        "dataset.packed": tuning.packing(),
        "dataset.train_on_input": tuning.loss_on("all"),
        "dataset.column": tuning.column("text", r"dataset\.column"),
        "dataset.conversation_column": tuning.column("messages", r"dataset\.conversation_column"),
        "dataset.column_map.*": asked("set data.columns to these names"),
        "dataset.conversation_style": decided("the shape of messages is seen in the records"),
        "dataset.add_eos": lambda value, flat: (
            decided("texts end with the tokenizer's end of text")(value, flat)
            if is_on(value)
            else asked("texts end with the tokenizer's end of text: give records of tokens")(
                value, flat
            )
        ),
        "dataset.new_system_prompt": asked("put the system message into the records"),
        "dataset.*": asked("an argument of the dataset's builder: see data"),
        "dataset_val.*": where(
            lambda flat: flat.get("run_val_every_n_steps") is not None,
            "nothing is evaluated without run_val_every_n_steps",
            tuning.LATER,
        ),
        "datasets*": refused(tuning.IMAGES),
        "collate_fn": refused(tuning.IMAGES),
        "dataloader.*": refused(tuning.IMAGES),
        "batch_size_val": decided("evaluations take micro-batches of the same size"),
        "run_val_every_n_steps": _evaluations,
        "shuffle": taken("data.shuffle", is_on),
        "seed": _seed,
        "batch_size": taken("train.micro_batch", whole),
        "gradient_accumulation_steps": taken("accumulate.steps", whole),
        "epochs": where(
            lambda flat: flat.get("max_steps_per_epoch") is None,
            "max_steps_per_epoch counts",
            taken("train.epochs", whole),
        ),
        "max_steps_per_epoch": _steps,
        "optimizer._component_": tuning.optimizer,
        "optimizer.lr": taken("optim.lr", number),
        "optimizer.betas": taken("optim.betas", numbers),
        "optimizer.eps": taken("optim.eps", number),
        "optimizer.weight_decay": decay,
        "optimizer.fused": decided("torch's fused implementation is used"),
        "optimizer.*": refused("an argument of an optimizer that colotrain does not have"),
        "optimizer_in_bwd": decided("a step updates all parameters at its end, with one result"),
        "lr_scheduler._component_": tuning.schedule,
        "lr_scheduler.num_warmup_steps": taken("optim.schedule.warmup_steps", whole),
        "lr_scheduler.num_cycles": refused("a cosine is half a period"),
        "clip_grad_norm": taken("train.grad_clip", number),
        "compile": taken("train.compile", is_on),
        "device": _device,
        "dtype": _precision,
        "enable_activation_checkpointing": tuning.recompute,
        "ac_mode": lambda value, flat: (
            taken("train.activation_checkpointing", str)(value, flat)
            if value == "selective"
            else decided("see enable_activation_checkpointing")(value, flat)
        ),
        "ac_option": none("selective keeps the outputs of products and attention, in every block"),
        "enable_activation_offloading": decided("activation checkpointing saves memory here"),
        "fsdp_cpu_offload": _offloaded,
        "fsdp.cpu_offload": _offloaded,
        "tensor_parallel_dim": taken("mesh.tp", whole),
        "tensor_parallel_plan.*": decided("layers of a known model are divided by its plan"),
        "context_parallel_dim": taken("mesh.cp", whole),
        "data_parallel_shard_dim": decided("the ranks beside the other axes"),
        "data_parallel_replicate_dim": replicas("data_parallel_shard_dim"),
        "metric_logger._component_": _logger,
        "metric_logger.*": decided("records go into the run's folder"),
        "log_every_n_steps": taken("observe.log_every", whole),
        "log_*": decided("memory by category is in the run's records"),
        "profiler.*": where(
            lambda flat: is_on(flat.get("profiler.enabled")),
            "off",
            none("set train.profile.steps to the steps that are traced"),
        ),
        "name": taken("name", str),
        **dict.fromkeys(
            (
                *("custom_sharded_layers", "low_cpu_ram", "memory_efficient_fsdp_wrap"),
                *("use_distributed_state_dict", "use_flex", "debug_*", "enable_kv_cache"),
            ),
            decided(tuning.KERNELS),
        ),
        **tuning.BESIDE_TRAINING,
    }
)
RULES = {"tokenizer.max_seq_len": _seq_len, **RULES}


def defaults(given: Flat) -> dict[str, Any]:
    """Settings of torchtune where a file does not have a key."""
    found = silent("optimizer._component_", "optimizer", is_torch=True)(given) | {
        "optim.schedule.min_lr_ratio": 0.0,
        "accumulate.steps": 1,
        "train.last_batch": "drop",
        "train.eval_steps": 0,
        "data.packing": "none",
        "data.validation_fraction": 0.0,
        "checkpoint.every": "1ep",
    }
    if "tokenizer.max_seq_len" not in given:
        found["data.seq_len"] = SEQ_LEN
    if _has_adapter(given):
        found |= {"adapter.rank": 8, "adapter.alpha": 16, "adapter.dropout": 0.0}
    return found
