"""Axolotl's YAML configuration (its keys: docs.axolotl.ai)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colotrain.migrate import finetuning as tuning
from colotrain.migrate.accelerate import replicas
from colotrain.migrate.findings import (
    Answer,
    Flat,
    Rule,
    asked,
    decided,
    is_on,
    none,
    number,
    refused,
    taken,
    unless_null,
    where,
    whole,
)

SIGNS = frozenset(
    {
        "base_model",
        "datasets",
        "sequence_len",
        "micro_batch_size",
        "num_epochs",
        "sample_packing",
        "val_set_size",
    }
)
LORA_KEYS = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target_modules",
    "whole_modules": "lora_modules_to_save",
    "rank_stabilised": "peft_use_rslora",
    "decomposed": "peft_use_dora",
    "ratio_of_b": "loraplus_lr_ratio",
}
CHATS = ("chat_template", "chat_template.default")
TEXTS = ("completion", "pretrain")
PLUGINS = {
    "LigerPlugin": "",
    "KernelsPlugin": "",
    "CutCrossEntropyPlugin": "",
    "SwanLabPlugin": "",
    "ExpertParallelPlugin": "",
    "DiffusionPlugin": tuning.OBJECTIVE,
    "LLMCompressorPlugin": "sparse weights are not kept sparse",
    "SpectrumPlugin": "set freeze.patterns and freeze.except to its choice of layers",
}
TEXT = (
    "texts, trained on whole; one longer than a sample is divided there, and here under "
    "data.packing=stream alone"
)
LENGTH = "longer samples are cut here; Axolotl leaves them out unless excess_length_strategy cuts"
REINFORCED = "reinforcement learning and its rewards are not there"
PARTS = ("bf16", "bfloat16", "fp16", "float16")


def _has_adapter(flat: Flat) -> bool:
    return flat.get("adapter") not in (None, "")


PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"train.dpo.beta": 0.1},
    "kto": {
        "train.kto.beta": 0.1,
        "train.kto.desirable_weight": 1.0,
        "train.kto.undesirable_weight": 1.0,
    },
    "orpo": {"train.orpo.beta": 0.1},
    "simpo": {"train.simpo.beta": 0.1},
    "reward": {"train.reward.center_coefficient": 0.0},
}
"""Objective → settings that TRL's trainers of Axolotl have where a file says nothing."""
ADDED = (
    "set cpo_alpha: 0 and simpo_gamma: otherwise Axolotl adds the loss of the chosen texts, which "
    "train.objective=simpo does not have"
)
NOTES = {"kto": tuning.KL, "orpo": tuning.MEAN_OF_PAIRS}


def _objective(flat: Flat) -> str | None:
    """The objective on preferences that a file asks for."""
    name = "reward" if is_on(flat.get("reward_model")) else flat.get("rl")
    return name if name in PREFERENCES else None


def _is(*names: str) -> Callable[[Flat], bool]:
    return lambda flat: _objective(flat) in names


def _adapter(value: Any, _: Flat) -> Answer:
    if value in ("lora", "qlora"):  # the latter with load_in_4bit
        return Answer(outcome="taken", settings={"adapter.name": "lora"})
    return refused(f"{value} is not there: lora is")(value, {})


def _rl(value: Any, flat: Flat) -> Answer:
    has_gamma = flat.get("simpo_gamma") is not None
    if value == "simpo" and not (flat.get("cpo_alpha") == 0 and has_gamma):
        return Answer(outcome="refused", note=ADDED)
    if value in PREFERENCES and value != "reward":
        note = NOTES.get(value, "")
        return Answer(outcome="taken", note=note, settings={"train.objective": value})
    return refused(tuning.OBJECTIVE)(value, {})


def _reward(value: Any, _: Flat) -> Answer:
    if not is_on(value):
        return Answer(outcome="decided", note="off")
    return Answer(outcome="taken", settings={"train.objective": "reward"})


def _num_labels(value: Any, flat: Flat) -> Answer:
    if _objective(flat) == "reward" and value == 1:
        return Answer(outcome="decided", note="a reward is one number")
    return refused(tuning.OBJECTIVE)(value, flat)


BETAS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")
"""Keys of the same number, of which the first counts that a file has."""


def _beta(key: str) -> Rule:
    """Rule for one of `BETAS`."""

    def rule(value: Any, flat: Flat) -> Answer:
        name = _objective(flat)
        if name in (None, "reward"):
            return Answer(outcome="decided", note="for rl: dpo, kto, orpo and simpo alone")
        first = next(one for one in BETAS if one == key or flat.get(one) is not None)
        if first != key:
            return Answer(outcome="decided", note=f"{first} counts")
        return taken(f"train.{name}.beta", number)(value, flat)

    return rule


def _weight(key: str) -> Rule:
    """Rule for a weight of KTO; Axolotl takes 0 for 1."""
    rule = taken(f"train.kto.{key}", lambda value: number(value) or 1.0)
    return where(_is("kto"), "for rl: kto alone", rule)


def _kind(value: Any, flat: Flat) -> Answer:
    """Translate the way in which records become prompts."""
    name = str(value)
    if objective := _objective(flat):
        note = tuning.RATED if objective == "kto" else tuning.PAIRS
        template, dot, _ = name.partition(".")
        if dot:
            note = f"{note}; set data.chat_template, for {template} stands around the texts there"
        return Answer(outcome="asked", note=note)
    if name in CHATS:
        return Answer(outcome="decided", note=tuning.TEMPLATE)
    if name in TEXTS:
        settings = {"data.packing": "stream"} if "streaming" in flat or name == "pretrain" else {}
        return Answer(outcome="taken", note=TEXT, settings=settings)
    if name.partition(":")[0] == "alpaca":
        return Answer(outcome="asked", note=tuning.ALPACA)
    if name.endswith(".transform") or name.startswith(("bradley_terry", "stepwise_supervised")):
        return Answer(outcome="refused", note=tuning.OBJECTIVE)
    return Answer(outcome="asked", note=f"set data.columns to the fields of {name}")


def _template(value: Any, _: Flat) -> Answer:
    if value == "chatml":
        return Answer(outcome="taken", settings={"data.chat_template": "chatml"})
    if value == "tokenizer_default":
        return Answer(outcome="decided", note="the template of the tokenizer's folder")
    return Answer(outcome="asked", note=tuning.TEMPLATE)


def _half(name: str) -> Rule:
    """Rule for a half precision, of which bf16 counts where several are on.

    A file without the key bf16 has it on. Without an adapter or sharding, Axolotl keeps the weights
    themselves in bfloat16.
    """

    def rule(value: Any, flat: Flat) -> Answer:
        on = [key for key in PARTS if is_on(flat.get(key)) or flat.get(key) in ("auto", "full")]
        if value not in ("auto", "full") and not is_on(value):
            settings = {} if on else {"train.precision": "fp32"}
            return Answer(outcome="taken", settings=settings, note="off")
        if name == "fp16" and ("bf16" not in flat or any(key.startswith("b") for key in on)):
            return Answer(outcome="decided", note="bf16 is on as well, and counts")
        return Answer(outcome="taken", settings={"train.precision": name} | _dtype(name, flat))

    return rule


def _dtype(precision: str, flat: Flat) -> dict[str, Any]:
    keeps = precision == "bf16" and not _has_adapter(flat) and not tuning.is_sharded(flat)
    return {"model.args.dtype": "bfloat16"} if keeps else {}


def _unfrozen(value: Any, _: Flat) -> Answer:
    """Translate the patterns of parameters that train; regular expressions that are no globs are
    for the user to translate."""
    globs = []
    for pattern in value:
        glob = str(pattern).removeprefix("^").replace("\\.", ".").replace(".*", "*")
        glob = glob[:-1] if glob.endswith("$") else f"{glob.removesuffix('*')}*"
        globs.append(glob)
    if any(set("^$()|+\\{}") & set(glob) for glob in globs):
        note = "regular expressions: set freeze.patterns and freeze.except to globs"
        return Answer(outcome="asked", note=note)
    return Answer(outcome="taken", settings={"freeze.patterns": ["*"], "freeze.except": globs})


def _batch(value: Any, flat: Flat) -> Answer:
    """Translate the samples of one rank's step into micro-batches."""
    if flat.get("gradient_accumulation_steps") is not None:
        return Answer(outcome="decided", note="gradient_accumulation_steps counts")
    steps = max(whole(value) // whole(flat.get("micro_batch_size") or 1), 1)
    return Answer(outcome="taken", settings={"accumulate.steps": steps})


def _plugin(value: Any, _: Flat) -> Answer:
    names = [str(plugin).rpartition(".")[2] for plugin in value]
    notes = {note: "" for name in names if (note := PLUGINS.get(name, f"{name} is not there"))}
    if notes:
        return Answer(outcome="refused", note="; ".join(notes))
    return Answer(outcome="decided", note=tuning.KERNELS)


def _warmup(value: Any, flat: Flat) -> Answer:
    """Translate the warm-up; Axolotl makes two steps of one."""
    return tuning.warmup(2 if value == 1 else value, flat)


def _early(value: Any, _: Flat) -> Answer:
    stop_early = {"metric": "validation_loss", "patience": whole(value)}
    settings = {f"train.stop_early.{key}": what for key, what in stop_early.items()}
    return Answer(outcome="taken", settings=settings)


def _property(name: str, *known: str) -> Rule:
    def rule(value: Any, _: Flat) -> Answer:
        if value in known:
            return Answer(outcome="decided", note="messages with this field are read")
        return Answer(outcome="asked", note=f"rename the field {value} to {name}")

    return rule


def _roles(value: Any, _: Flat) -> Answer:
    if isinstance(value, list) and set(value) <= {"assistant", "gpt", "model"}:
        return Answer(outcome="taken", settings={"data.loss_on": "answers"})
    note = "answers are trained on: mark other turns with train or weight in the records"
    return Answer(outcome="asked", note=note)


def _entry(section: str) -> dict[str, Rule]:
    """The rules for the keys of an entry in a list of datasets."""
    entry = rf"{section}\[\d+\]\."
    columns = {
        "field_messages": "messages",
        "field": "text",
        "text_column": "text",
        "field_chosen": "chosen",
        "field_rejected": "rejected",
        "field_tools": "tools",
        "field_system": "system",
    }
    names = {key: tuning.column(meaning, entry + key) for key, meaning in columns.items()}
    rules = {
        "path": tuning.dataset,
        "data_files": tuning.data_files,
        "ds_type": decided("the kind of files is seen in them"),
        "split": tuning.split,
        "name": asked("set data.path to the files of that configuration in the folder"),
        "type": _kind,
        **names,
        "field_thinking": _property("reasoning_content", "reasoning_content", "thinking"),
        "template_thinking_key": decided("reasoning is rendered where the template does"),
        "message_property_mappings.role": _property("role", "role", "from"),
        "message_property_mappings.content": _property("content", "content", "value"),
        "message_field_role": _property("role", "role", "from"),
        "message_field_content": _property("content", "content", "value"),
        "roles.*": decided("the usual names of roles are known; others are refused by the data"),
        "roles_to_train": _roles,
        "train_on_eos": none("the tokens that end an answer are trained on, and no others"),
        "drop_system_message": asked("take system messages out of the records"),
        "chat_template": _template,
        "type.*": asked("set data.columns to the fields of the records"),
        "*": asked("see data.columns and data.chat_template for the shape of records"),
    }
    return {f"{section}[*].{key}": rule for key, rule in rules.items()}


RULES = unless_null(
    {
        "base_model": tuning.model,
        "model_type": decided("the folder says what the model is"),
        "tokenizer_type": decided("the folder says what the tokenizer is"),
        "base_model_config": decided("the model's folder has its config.json"),
        "cls_model_config": refused(tuning.IMAGES),
        "processor_type": refused(tuning.IMAGES),
        "freeze_mm_modules": refused(tuning.IMAGES),
        "num_labels": _num_labels,
        "tokenizer_config": taken("data.tokenizer", str),
        "tokenizer_*": decided("tokenizer.json of the folder is read"),
        "revision_of_model": taken("model.revision", str),
        "branch": taken("model.revision", str),
        "model_config.*": asked("set it in model.args"),
        "model_quantization_config*": asked("name a folder whose weights are not quantized"),
        "reinit_weights": refused("take model.target: a folder's weights are read"),
        "load_in_4bit": tuning.packed,
        "bnb_config_kwargs.bnb_4bit_quant_type": lambda value, flat: (
            decided("the only one") if value == "nf4" else refused(tuning.QUANTIZED)
        )(value, flat),
        "load_in_8bit": refused(tuning.QUANTIZED),
        "gptq": refused(tuning.QUANTIZED),
        "gptq_*": decided("nothing without gptq"),
        "bnb_config_kwargs.*": decided("nothing without quantized weights"),
        "quantize_moe_experts": refused(tuning.QUANTIZED),
        "use_onebitllms": refused(tuning.QUANTIZED),
        "qat.*": refused("training for quantized weights is not there"),
        "fp8*": refused("precision is fp32, bf16 or fp16"),
        "rl": _rl,
        "rl_beta": _beta("rl_beta"),
        "trl.beta": _beta("trl.beta"),
        "dpo_beta": _beta("dpo_beta"),
        "trl.*": refused(REINFORCED),
        "ebft.*": refused(REINFORCED),
        "vllm.*": refused(REINFORCED),
        "reward_model": _reward,
        "process_reward_model": refused(REINFORCED),
        "center_rewards_coefficient": where(
            _is("reward"),
            "for reward_model alone",
            taken("train.reward.center_coefficient", number),
        ),
        "kto_desirable_weight": _weight("desirable_weight"),
        "kto_undesirable_weight": _weight("undesirable_weight"),
        "orpo_alpha": where(
            _is("kto", "orpo", "dpo", "simpo"), "for rl: orpo alone", _beta("orpo_alpha")
        ),
        "simpo_gamma": where(
            _is("simpo"), "for rl: simpo alone", taken("train.simpo.gamma", number)
        ),
        "cpo_alpha": where(_is("simpo"), "for rl: simpo alone", refused(ADDED)),
        "diffusion.*": refused(tuning.OBJECTIVE),
        "use_eaft": refused(tuning.OBJECTIVE),
        "eaft_*": decided("nothing without use_eaft"),
        "relora*": refused("ReLoRA is not there: LoRA is"),
        "jagged_restart_*": refused("a schedule with restarts is not there"),
        "lisa_*": refused("LISA is not there: see freeze.patterns"),
        "llmcompressor.*": refused("sparse weights are not kept sparse"),
        "adapter": _adapter,
        "lora_target_linear": where(_has_adapter, "no adapter is asked for", tuning.linear_layers),
        "lora_target_parameters": where(
            _has_adapter,
            "no adapter is asked for",
            taken(
                "adapter.parameters", lambda value: value if isinstance(value, list) else [value]
            ),
        ),
        "lora_model_dir": tuning.adapter_folder,
        **tuning.lora(_has_adapter, LORA_KEYS),
        "lora_fan_in_fan_out": decided("seen in the model"),
        "lora_*_kernel": decided(tuning.KERNELS),
        "peft.*": refused(tuning.QUANTIZED),
        "peft_*": refused("an adapter of another kind is not there: LoRA is"),
        "unfrozen_parameters": _unfrozen,
        **_entry("datasets"),
        **_entry("pretraining_dataset"),
        "test_datasets*": tuning.LATER,
        "val_set_size": tuning.held_out,
        "dataset_prepared_path": decided("tokens are cached ($COLOTRAIN_CACHE)"),
        "dataset_exact_deduplication": asked("take records that repeat out of the files"),
        "skip_prepare_dataset": decided("records are prepared before the run"),
        "shuffle_merged_datasets": decided("samples of all files are drawn in random order"),
        "curriculum_sampling": taken("data.shuffle", lambda value: not is_on(value)),
        "streaming": decided("files are read in blocks, and tokens kept on disk"),
        "streaming_multipack_buffer_size": decided("packing sees all documents"),
        "push_dataset_to_hub": none("nothing is sent to the Hub"),
        "hf_use_auth_token": decided("the Hub is asked with the token of `hf auth login`"),
        "min_sample_len": asked("leave shorter records out of the files"),
        "chat_template": _template,
        "chat_template_jinja": asked("set data.chat_template to a file with that text"),
        "eot_tokens": decided("an answer ends with what the template writes after it"),
        "sequence_len": taken("data.seq_len", whole, LENGTH),
        "excess_length_strategy": none("longer samples are cut, always"),
        "sample_packing": tuning.packing(),
        "pretrain_multipack_attn": taken("data.isolate", is_on),
        "max_packed_sequence_len": asked("set data.packing=stream and data.seq_len"),
        "sample_packing_*": decided("whole documents are put side by side, as many as fit"),
        "eval_sample_packing": decided("validation samples are packed as the others"),
        "pad_to_sequence_len": decided("samples are padded to data.seq_len"),
        "total_num_tokens": decided("tokens are counted"),
        "train_on_inputs": tuning.loss_on("all"),
        "special_tokens": decided("none are named"),
        "special_tokens.pad_token": decided("padding is masked, whatever its token"),
        "special_tokens.*": asked("special tokens are the tokenizer's own: change its folder"),
        "tokens": taken("model.tokens", list),
        "tokens.pad_token": decided("padding is masked, whatever its token"),
        "tokens.*": asked("special tokens are the tokenizer's own: change its folder"),
        "resize_token_embeddings_to_32x": decided("an embedding grows by the tokens that it lacks"),
        "micro_batch_size": taken("train.micro_batch", whole),
        "batch_size": _batch,
        "accelerator_config.*": decided("colotrain owns accumulation"),
        "eval_batch_size": decided("evaluations take micro-batches of the same size"),
        "num_epochs": where(
            lambda flat: not flat.get("max_steps"),
            "max_steps counts",
            taken("train.epochs", number),
        ),
        "max_steps": taken("train.max_steps", whole),
        "optimizer": tuning.optimizer,
        "adam_eps": none("Axolotl reads adam_epsilon"),
        "cosine_min_lr_ratio": taken("optim.schedule.min_lr_ratio", number),
        "cosine_constant_lr_ratio": refused("see wsd of optim.schedule.name"),
        "lr_quadratic_warmup": refused("warm-up is linear"),
        "lr_div_factor": refused("see optim.schedule for what a schedule may have"),
        "embedding_lr*": asked("set optim.rules with a match of the embedding and its lr_scale"),
        "lr_groups*": asked("set optim.rules with matches of the modules and their lr_scale"),
        "noisy_embedding_alpha": refused("noise in embeddings is not there"),
        "loftq_config*": refused(tuning.QUANTIZED),
        "dpo_*": refused("the loss of DPO is that of train.objective: dpo"),
        "s2_attention": refused("attention that leaves tokens out is not there"),
        "use_pose": refused("positions that leave numbers out are not there"),
        "trainer_cls": refused("a trainer of your own is not called"),
        "overrides_of_model_config*": asked("set it in model.args"),
        "rope_scaling*": asked("set it in model.args"),
        "additional_special_tokens": taken("model.tokens", list),
        "added_tokens_overrides*": asked("the tokenizer has its own: change its folder"),
        "default_system_message": asked("put the system message into the records"),
        "dataset_processes": taken("data.workers", whole),
        "dataset_num_proc": taken("data.workers", whole),
        "sequence_parallel_degree": taken("mesh.cp", whole),
        "eta_min": none("Axolotl reads cosine_min_lr_ratio"),
        "bf16": _half("bf16"),
        "bfloat16": _half("bf16"),
        "fp16": _half("fp16"),
        "float16": _half("fp16"),
        "torch_dtype": taken("model.args.dtype", str),
        "activation_offloading": decided("set train.activation_checkpointing to save memory"),
        "saves_per_epoch": tuning.per_epoch("checkpoint.every"),
        "evals_per_epoch": tuning.per_epoch("train.eval_every"),
        "early_stopping_patience": _early,
        **tuning.trainer("lr_scheduler"),
        "warmup_steps": where(
            tuning.warms_up("lr_scheduler"), "a constant schedule has no warm-up", _warmup
        ),
        "eval_*": none("evaluations have the loss: see train.metrics"),
        "do_causal_lm_eval": none("evaluations have the loss: see train.metrics"),
        "loss_watchdog_*": none("a loss that is not finite ends the run, not one that is high"),
        "wandb_project": taken("observe.trackers", lambda _: ["wandb"], "set WANDB_PROJECT"),
        "wandb_*": decided("set W&B's own variables (WANDB_PROJECT and so on)"),
        "use_wandb": tuning.switched_tracker("wandb"),
        "use_tensorboard": tuning.switched_tracker("tensorboard"),
        "use_mlflow": tuning.switched_tracker("mlflow"),
        "mlflow_*": decided("set MLflow's own variables"),
        "*swanlab*": none(tuning.TRACKER),
        "trackio_*": none(tuning.TRACKER),
        "*otel_metrics*": none("see observe.metrics_port"),
        "comet_*": none(tuning.TRACKER),
        "auto_resume_from_checkpoints": decided("a run goes on from its own newest checkpoint"),
        "fsdp_version": decided("every plugin is built on FSDP2"),
        "ddp": decided("the plugin shards; results are the same"),
        "tensor_parallel_size": taken("mesh.tp", whole),
        "context_parallel_size": taken("mesh.cp", whole),
        "dp_shard_size": decided("the ranks beside the other axes"),
        "dp_replicate_size": replicas("dp_shard_size"),
        "expert_parallel_size": taken("mesh.ep", whole),
        "expert_parallel_token_capacity": refused("mesh.ep drops no tokens"),
        "expert_parallel_*": decided(tuning.KERNELS),
        "plugins": _plugin,
        "output_router_logits": asked("set it in model.args"),
        "use_ray": none("see `colotrain submit`"),
        "local_rank": decided("ranks are started by colotrain itself"),
        "debug": decided("every collective is bounded in time and checked"),
        "strict": decided("keys that are not known are told"),
        "device_map*": decided("ranks and their devices are colotrain's"),
        **dict.fromkeys(
            (
                *(
                    "flash_*",
                    "sdp_attention",
                    "xformers_attention",
                    "flex_*",
                    "attn_implementation",
                ),
                *("liger_*", "cut_cross_entropy", "use_kernels", "fused_attn_kernel", "tiled_mlp"),
                *("experts_implementation", "use_scattermoe", "use_sonicmoe", "use_*_kernels"),
                *("gemma4_hybrid_attn_impl", "dsv4_*", "llama4_linearized_experts"),
                *("eager_attention", "sdpa_varlen", "heads_k_stride", "ring_attn_func", "gc_steps"),
                *("batch_flattening", "selective_checkpointing*", "layer_offloading"),
                *("experimental_*", "low_cpu_mem_usage", "torchdistx_path", "nvfp4_*"),
            ),
            decided(tuning.KERNELS),
        ),
    }
)


def defaults(given: Flat) -> dict[str, Any]:
    """Settings of Axolotl where a file does not have a key."""
    has = {key for key, value in given.items() if value is not None}
    found = tuning.TRANSFORMERS | {
        "train.micro_batch": 1,
        "optim.schedule.name": "cosine",
        "train.activation_checkpointing": "none",
        "train.precision": "fp32" if "bf16" in given else "bf16",
        "train.tf32": "tf32" not in given,
        "checkpoint.every": "1ep",
        "checkpoint.keep": 4,
        "data.seq_len": 512,
        "train.eval_steps": 0,
    }
    if "bf16" not in given:
        found |= _dtype("bf16", given)
    found |= PREFERENCES.get(_objective(given) or "", {})
    if "max_steps" not in has:
        found["train.epochs"] = 1
    if not has & {"warmup_steps", "warmup_ratio"} and given.get("lr_scheduler") != "constant":
        found["optim.schedule.warmup_ratio"] = 0.03
    if given.get("adapter") == "lora" and "lora_model_dir" not in has:
        found |= {"adapter.rank": 8, "adapter.alpha": 8, "adapter.dropout": 0.0}
    return found
