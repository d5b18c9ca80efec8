"""LLaMA-Factory's YAML or JSON configuration, as `llamafactory-cli train` reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from colotrain.migrate import finetuning as tuning
from colotrain.migrate.findings import (
    Answer,
    Flat,
    asked,
    decided,
    is_on,
    is_positive,
    none,
    number,
    refused,
    taken,
    unless_null,
    where,
    whole,
)
from colotrain.rundir import read_json

SIGNS = frozenset(
    {
        "stage",
        "finetuning_type",
        "cutoff_len",
        "template",
        "dataset",
        "lora_target",
        "train_dataset",
        "peft_config",
        "export_dir",
    }
)
REGISTRY = "dataset_info.json"
COLUMNS = {
    "prompt": "question",
    "query": "context",
    "response": "answer",
    "kto_tag": "label",
    **{name: name for name in ("messages", "system", "history", "tools", "chosen", "rejected")},
}
"""Meaning in the registry of datasets → meaning in data.columns."""
USUAL = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "conversations",
}
"""Meaning → name of the column that is read without being named."""
LORA_KEYS = {
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target",
    "whole_modules": "additional_target",
    "rank_stabilised": "use_rslora",
    "decomposed": "use_dora",
    "ratio_of_b": "loraplus_lr_ratio",
}
V1_KEYS = (
    *("model_class", "peft_config.*", "dist_config.*", "kernel_config.*", "optim_config.*"),
    *("quant_config*", "init_config.*", "sample_backend", "batching_strategy", "cp_*"),
    *("mixed_precision", "use_packed_sequences", "micro_batch_size", "max_new_tokens"),
)
V1 = "the format of LLaMA-Factory's v1 is not read: give a file of `llamafactory-cli train`"
NOT_TRAINED = "this file does not train: give the one of `llamafactory-cli train`"
ENGINE = "this engine is not there: take the key out"
METHODS = (
    *("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_llama_pro", "use_dft_loss"),
    *("use_asft_loss", "use_eaft_loss", "mixture_of_depths", "shift_attn"),
)
"""Switches of methods that colotrain does not have; their other keys begin alike."""


REFUSED = refused(tuning.QUANTIZED)


def _is_stage(*names: str) -> Callable[[Flat], bool]:
    return lambda flat: (flat.get("stage") or "sft") in names


def _has_adapter(flat: Flat) -> bool:
    return flat.get("finetuning_type") in (None, "lora")


PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"train.dpo.beta": 0.1},
    "kto": {
        "train.kto.beta": 0.1,
        "train.kto.desirable_weight": 1.0,
        "train.kto.undesirable_weight": 1.0,
    },
    "orpo": {"train.orpo.beta": 0.1},
    "simpo": {"train.simpo.beta": 0.1, "train.simpo.gamma": 0.5},
    "reward": {"train.reward.center_coefficient": 0.0},
}
"""Objective → settings of LLaMA-Factory where a file says nothing."""
LOSSES = {"sigmoid": "dpo", "orpo": "orpo", "simpo": "simpo"}
"""`pref_loss` → objective."""
NOTES = {
    "kto": tuning.KL,
    "reward": "the new head has neither a bias, which no difference of rewards has, nor dropout",
}


def _objective(flat: Flat) -> str | None:
    """The objective on preferences that a file asks for."""
    stages = {"kto": "kto", "rm": "reward", "dpo": LOSSES.get(flat.get("pref_loss") or "sigmoid")}
    return stages.get(str(flat.get("stage")))


def _is(*names: str) -> Callable[[Flat], bool]:
    return lambda flat: _objective(flat) in names


def _stage(value: Any, flat: Flat) -> Answer:
    settings: dict[str, dict[str, Any]] = {
        "sft": {},
        "pt": {"data.packing": "stream", "data.loss_on": "all"},
    }
    if value in settings:
        note = "" if settings[value] else "records with answers"
        return Answer(outcome="taken", note=note, settings=settings[value])
    objective = _objective(flat)
    if objective is None:
        return Answer(outcome="refused", note=tuning.OBJECTIVE)
    more = {"train.orpo.nll_of_prompts": False} if objective == "orpo" else {}
    note, settings_of = NOTES.get(objective, ""), {"train.objective": objective, **more}
    return Answer(outcome="taken", note=note, settings=settings_of)


def _beta(value: Any, flat: Flat) -> Answer:
    name = _objective(flat)
    if name in (None, "reward"):
        return Answer(outcome="decided", note="for stage: dpo and kto alone")
    return taken(f"train.{name}.beta", number)(value, flat)


def _loss(value: Any, flat: Flat) -> Answer:
    name = LOSSES.get(str(value))
    if name is None:
        return Answer(outcome="refused", note=tuning.OBJECTIVE)
    return Answer(outcome="decided", note=f"that of train.objective={name}")


def _tuned(value: Any, _: Flat) -> Answer:
    if value == "lora":
        return Answer(outcome="taken", settings={"adapter.name": "lora"})
    if value == "full":
        return Answer(outcome="taken", note="all weights")
    if value == "freeze":
        note = "name the layers that do not train by freeze.patterns, and take full"
        return Answer(outcome="refused", note=note)
    return Answer(outcome="refused", note=f"{value} is not there: lora is")


def _datasets(value: Any, flat: Flat) -> Answer:
    """Translate names of the registry, which is read where the current folder has it."""
    names = [name.strip() for name in str(value).split(",") if name.strip()]
    folder = Path(str(flat.get("dataset_dir") or "data"))
    try:
        registry = read_json(folder / REGISTRY)
        entries = [registry[name] for name in names]
        paths = [_path(folder, entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        note = f"names in {folder / REGISTRY}, which is not here: set data.path to their files"
        return Answer(outcome="asked", note=note)
    columns = [_columns(entry, flat) for entry in entries]
    settings = {"data.path": paths, **columns[0]}
    if any(other != columns[0] for other in columns):
        note = "their records have other columns: rename them (data.columns is for all files)"
        return Answer(outcome="asked", note=note, settings=settings)
    if any(entry.get("columns", {}).get("images") for entry in entries):
        return Answer(outcome="refused", note=tuning.IMAGES)
    note = f"from {folder / REGISTRY}"
    if any(entry.get("formatting", "alpaca") == "alpaca" for entry in entries):
        note += "; an input beside an instruction follows it after an empty line here"
    return Answer(outcome="taken", note=note, settings=settings)


def _path(folder: Path, entry: dict[str, Any]) -> str:
    return str(folder / entry["file_name"]) if "file_name" in entry else str(entry["hf_hub_url"])


def _columns(entry: dict[str, Any], flat: Flat) -> dict[str, Any]:
    """The columns of a dataset by meaning, without those that have their usual name."""
    named = dict(entry.get("columns") or {})
    if flat.get("stage") == "pt":
        return {"data.columns.text": named["prompt"]} if named.get("prompt") != "text" else {}
    return {
        f"data.columns.{meaning}": named[name]
        for name, meaning in COLUMNS.items()
        if name in named and named[name] not in (USUAL.get(name, meaning), meaning)
    }


def _half(name: str) -> Any:
    def rule(value: Any, flat: Flat) -> Answer:
        if is_on(value):
            return Answer(outcome="taken", settings={"train.precision": name})
        other = is_on(flat.get("fp16" if name == "bf16" else "bf16")) or flat.get("pure_bf16")
        settings = {} if other else {"train.precision": "fp32"}
        return Answer(outcome="taken", note="off", settings=settings)

    return rule


def _pure(value: Any, _: Flat) -> Answer:
    if not is_on(value):
        return Answer(outcome="decided", note="off")
    settings = {"train.precision": "bf16", "model.args.dtype": "bfloat16"}
    return Answer(outcome="taken", settings=settings)


def _muon(value: Any, _: Flat) -> Answer:
    if not is_on(value):
        return Answer(outcome="decided", note="off")
    return Answer(outcome="taken", settings={"optim.name": "muon"})


def _recompute(value: Any, flat: Flat) -> Answer:
    return tuning.recompute(not is_on(value), flat)


RULES = unless_null(
    {
        "model": refused(V1),
        **dict.fromkeys(V1_KEYS, decided("a key of the format of v1")),
        "model_name_or_path": tuning.model,
        "adapter_name_or_path": tuning.adapter_folder,
        "new_special_tokens_config": asked("set model.tokens to its tokens"),
        "add_tokens": taken("model.tokens", lambda value: str(value).split(",")),
        "add_special_tokens": taken("model.tokens", lambda value: str(value).split(",")),
        "resize_vocab": decided("an embedding grows by the tokens that it lacks"),
        "rope_scaling": asked("set it in model.args"),
        "train_from_scratch": refused("take model.target: a folder's weights are read"),
        "quantization_bit": lambda value, flat: (
            tuning.packed(value == 4, flat) if value in (4, None) else REFUSED(value, flat)
        ),
        "quantization_method": lambda value, flat: (
            decided("what packs a base in 4 bits") if value == "bnb" else REFUSED
        )(value, flat),
        "quantization_type": lambda value, flat: (
            decided("the only one") if value == "nf4" else REFUSED
        )(value, flat),
        "quantization_*": REFUSED,
        "double_quantization": decided("scales stay in float32"),
        "fp8*": refused("precision is fp32, bf16 or fp16"),
        "image_*": decided("for models of pictures alone"),
        "video_*": decided("for models of videos alone"),
        "freeze_vision_tower": refused(tuning.IMAGES),
        "freeze_multi_modal_projector": refused(tuning.IMAGES),
        "freeze_language_model": refused(tuning.IMAGES),
        "stage": _stage,
        "do_train": where(
            lambda flat: not is_on(flat.get("do_train")),
            "training is what a run does",
            lambda value, flat: Answer(outcome="refused", note=NOT_TRAINED),
        ),
        "do_predict": refused(NOT_TRAINED),
        "predict_with_generate": refused(NOT_TRAINED),
        "export_*": refused(NOT_TRAINED),
        "infer_backend": where(
            lambda flat: not flat.get("do_train"), "for inference alone", refused(NOT_TRAINED)
        ),
        "do_eval": decided("see train.eval_every"),
        "finetuning_type": _tuned,
        **tuning.lora(_has_adapter, LORA_KEYS),
        "create_new_adapter": asked("merge the adapter first (`colotrain export`)"),
        "freeze_*": decided("for finetuning_type: freeze alone"),
        **dict.fromkeys(METHODS, refused("this method is not there: take the key out")),
        "pissa_init": refused("take the key out, and set adapter.init=pissa in the recipe"),
        **{
            f"{name}_*": decided("an argument of a method that is refused or off")
            for name in ("galore", "apollo", "badam", "asft", "eaft", "pissa", "oft", "loraplus")
        },
        "use_muon": _muon,
        "pref_beta": _beta,
        "pref_loss": where(_is_stage("dpo"), "for stage: dpo alone", _loss),
        "simpo_gamma": where(
            _is("simpo"), "for pref_loss: simpo alone", taken("train.simpo.gamma", number)
        ),
        "pref_ftx": refused(tuning.OBJECTIVE),
        "dpo_label_smoothing": refused(tuning.OBJECTIVE),
        "ld_alpha": refused(tuning.OBJECTIVE),
        "pref_bco_weight": refused(tuning.OBJECTIVE),
        "ppo_*": decided("for stage: ppo alone"),
        "early_stopping_steps": none("see train.stop_early"),
        "use_fast_tokenizer": decided("tokenizer.json of the folder is read"),
        "split_special_tokens": none("special tokens of a text are tokens"),
        "model_revision": taken("model.revision", str),
        "cache_dir": decided("folders are read where they lie"),
        "upcast_*": decided("weights and norms are computed as train.precision says"),
        "ref_model*": refused("the reference of DPO is the model as the run begins"),
        "reward_model*": refused(tuning.OBJECTIVE),
        "kto_chosen_weight": where(
            _is("kto"), "for stage: kto alone", taken("train.kto.desirable_weight", number)
        ),
        "kto_rejected_weight": where(
            _is("kto"), "for stage: kto alone", taken("train.kto.undesirable_weight", number)
        ),
        "dataset": _datasets,
        "dataset_dir": decided("where dataset_info.json is looked for"),
        "eval_dataset": tuning.LATER,
        "train_dataset": refused(V1),
        "template": asked(tuning.TEMPLATE),
        "tool_format": asked(tuning.TEMPLATE),
        "default_system": asked("put the system message into the records"),
        "enable_thinking": asked("set chat_template_kwargs in the records"),
        "cutoff_len": taken("data.seq_len", whole),
        "max_samples": asked(tuning.SLICE),
        "overwrite_cache": decided("tokens of files that changed are made anew"),
        "tokenized_path": decided("tokens are cached ($COLOTRAIN_CACHE)"),
        "preprocessing_num_workers": taken("data.workers", whole),
        "preprocessing_batch_size": decided("files are read in blocks"),
        "streaming": decided("files are read in blocks, and tokens kept on disk"),
        "mix_strategy": lambda value, flat: (
            decided("all files, one after the other")(value, flat)
            if value == "concat"
            else asked("set data.mixture")(value, flat)
        ),
        "interleave_probs": asked("set data.mixture"),
        "train_on_prompt": tuning.loss_on("all"),
        "mask_history": tuning.loss_on("last"),
        "packing": where(
            _is_stage("sft"),
            "texts are packed, pairs are not",
            tuning.packing(lambda flat: is_on(flat.get("neat_packing"))),
        ),
        "neat_packing": tuning.packing(),
        "val_size": tuning.held_out,
        "disable_shuffling": taken("data.shuffle", lambda value: not is_on(value)),
        "per_device_train_batch_size": taken("train.micro_batch", whole),
        "per_device_eval_batch_size": decided("evaluations take micro-batches of the same size"),
        "num_train_epochs": where(
            lambda flat: not is_positive(flat.get("max_steps")),
            "max_steps counts",
            taken("train.epochs", number),
        ),
        "max_steps": where(
            lambda flat: is_positive(flat["max_steps"]),
            "the length of the run is its epochs",
            taken("train.max_steps", whole),
        ),
        "optim": tuning.optimizer,
        "bf16": _half("bf16"),
        "fp16": _half("fp16"),
        "pure_bf16": _pure,
        "disable_gradient_checkpointing": _recompute,
        "use_reentrant_gc": decided("recomputation is non-reentrant, always"),
        **tuning.trainer("lr_scheduler_type"),
        "compute_accuracy": none("see train.metrics"),
        "report_to": tuning.tracker,
        "use_swanlab": none(tuning.TRACKER),
        "swanlab_*": none(tuning.TRACKER),
        "plot_loss": decided("`colotrain plot` draws it"),
        "run_name": taken("name", str),
        "overwrite_output_dir": decided("every run has a folder of its own"),
        "logging_dir": decided("records go into the run's folder"),
        "tensor_model_parallel_size": taken("mesh.tp", whole),
        "pipeline_model_parallel_size": taken("mesh.pp", whole),
        "context_parallel_size": taken("mesh.cp", whole),
        "sequence_parallel": taken("mesh.sequence_parallel", is_on),
        "expert_model_parallel_size": taken("mesh.ep", whole),
        "recompute_granularity": taken("train.activation_checkpointing", lambda _: "full"),
        "use_kt": refused(ENGINE),
        "kt_*": decided("for use_kt alone"),
        "use_unsloth": refused(ENGINE),
        **dict.fromkeys(
            (
                *("flash_attn", "enable_liger_kernel", "use_v1_kernels", "use_unsloth_gc"),
                *("*_fusion", "overlap_*", "moe_*", "use_distributed_optimizer", "low_cpu_*"),
            ),
            decided(tuning.KERNELS),
        ),
    }
)


def defaults(given: Flat) -> dict[str, Any]:
    """Settings of LLaMA-Factory where a file does not have a key."""
    has = {key for key, value in given.items() if value is not None}
    found = tuning.TRANSFORMERS | {
        "train.micro_batch": 8,
        "optim.lr": 5e-5,
        "optim.schedule.name": "linear",
        "train.activation_checkpointing": "full",
        "train.precision": "bf16",
        "checkpoint.every": 500,
        "data.seq_len": 2048,
        "train.eval_steps": 0,
    }
    found |= PREFERENCES.get(_objective(given) or "", {})
    if not is_positive(given.get("max_steps")):
        found["train.epochs"] = 3
    if not has & {"warmup_steps", "warmup_ratio"}:
        found["optim.schedule.warmup_steps"] = 0
    if _has_adapter(given) and "adapter_name_or_path" not in has:
        rank = given["lora_rank"] if is_positive(given.get("lora_rank")) else 8
        found |= {"adapter.name": "lora", "adapter.rank": rank, "adapter.alpha": 2 * rank}
        found |= {"adapter.dropout": 0.0, "adapter.targets": tuning.LINEAR_LAYERS}
    return found
