"""Files of Axolotl, LLaMA-Factory and torchtune: what each key means here, or why it is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from colotrain.cli.main import guarded
from colotrain.engine.optim.schedule import schedule
from colotrain.errors import ConfigError
from colotrain.migrate import recipes
from colotrain.runs.resolving import plan_from

Config = dict[str, Any]
BASE: dict[str, Config] = {
    "axolotl": {
        "base_model": "model",
        "datasets": [{"path": "chats.jsonl", "type": "chat_template"}],
        "sequence_len": 64,
        "micro_batch_size": 2,
        "num_epochs": 3,
        "learning_rate": 2e-4,
    },
    "llamafactory": {
        "model_name_or_path": "model",
        "stage": "sft",
        "do_train": True,
        "dataset": "chats",
        "template": "qwen",
        "cutoff_len": 64,
        "finetuning_type": "full",
        "bf16": True,
    },
    "torchtune": {
        "model": {"_component_": "torchtune.models.qwen2.qwen2_0_5b"},
        "tokenizer": {"_component_": "torchtune.models.qwen2.qwen2_tokenizer", "max_seq_len": 64},
        "checkpointer": {"checkpoint_dir": "model", "model_type": "QWEN2"},
        "dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "chats.jsonl"},
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
        "batch_size": 2,
        "epochs": 3,
        "dtype": "bf16",
    },
}
"""Least files of each tool."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")
    (tmp_path / "model").mkdir()
    chat = {
        "messages": [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1"}]
    }
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 40)
    return tmp_path


def merged(base: Config, more: Config) -> Config:
    """`base` with the keys of `more`; sections are merged."""
    sections = {
        key: merged(base[key], value)
        for key, value in more.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return base | more | sections


def imported(kind: str, more: Config) -> tuple[dict[str, Any], list[recipes.Finding]]:
    found = recipes.findings(merged(BASE[kind], more), kind)
    assert [f.key for f in found if f.outcome == "unknown"] == []
    recipes.check_trained(found)
    return recipes.complete_settings(kind, found), found


@pytest.mark.parametrize("kind", BASE)
def test_the_least_file_is_recognised_and_has_its_tool_s_defaults(kind: str) -> None:
    assert recipes.recognise(BASE[kind], Path("theirs")) == kind
    settings, _ = imported(kind, {})
    assert settings["model.hf"] == "model"
    assert settings["optim.betas"] == [0.9, 0.999]
    assert (settings["train.epochs"], settings["data.seq_len"]) == (3, 64)
    assert settings["data.loss_on"] == "answers"
    assert settings["optim.schedule.min_lr_ratio"] == 0.0
    assert settings["train.eval_steps"] == 0
    decays = settings["optim.weight_decay"], "optim.rules" in settings
    assert decays == ((0.01, True) if kind == "torchtune" else (0.0, False))
    assert settings["train.grad_clip"] == (None if kind == "torchtune" else 1.0)
    name = {"axolotl": "cosine", "llamafactory": "linear", "torchtune": "constant"}[kind]
    assert settings["optim.schedule.name"] == name


LORA = {"adapter": "lora", "lora_r": 16, "lora_alpha": 8}
TUNED = {"finetuning_type": "lora", "lora_rank": 16}
TUNE = {"model": {"_component_": "torchtune.models.qwen2.lora_qwen2_0_5b", "lora_rank": 16}}
ALL_LAYERS = ["all-linear"]


def of(objective: str, **settings: Any) -> dict[str, Any]:
    more = {f"train.{objective}.{key}": value for key, value in settings.items()}
    return {"train.objective": objective, **more}


WEIGHTS = {"kto_desirable_weight": 0, "kto_undesirable_weight": 2}
AXOLOTLS: tuple[tuple[Config, Config], ...] = (
    ({"rl": "dpo"}, of("dpo", beta=0.1)),
    ({"rl": "kto"}, of("kto", beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)),
    ({"rl": "kto", "rl_beta": 0.2, **WEIGHTS}, of("kto", beta=0.2, undesirable_weight=2.0)),
    ({"rl": "kto", **WEIGHTS}, of("kto", desirable_weight=1.0)),
    ({"rl": "orpo"}, of("orpo", beta=0.1)),
    ({"rl": "orpo", "orpo_alpha": 0.3}, of("orpo", beta=0.3)),
    ({"rl": "orpo", "orpo_alpha": 0.3, "rl_beta": 0.4}, of("orpo", beta=0.4)),
    ({"rl": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0}, of("simpo", beta=0.1, gamma=0.7)),
    ({"rl": "simpo", "simpo_gamma": 0, "cpo_alpha": 0}, of("simpo", beta=0.1, gamma=0.0)),
    ({"trl": {"beta": 0.3}, "rl": "dpo", "rl_beta": 0.4}, of("dpo", beta=0.3)),
    ({"rl": "kto", "dpo_beta": 0.5, "trl": {"beta": 0.2}, "rl_beta": 0.4}, of("kto", beta=0.2)),
    ({"reward_model": True, "num_labels": 1}, of("reward", center_coefficient=0.0)),
    (
        {"reward_model": True, "center_rewards_coefficient": 0.01},
        of("reward", center_coefficient=0.01),
    ),
    ({"center_rewards_coefficient": 0.01}, {"train.objective": None}),
)
"""Keys of Axolotl 0.19 with TRL's trainers; simpo_gamma has no default there."""
FACTORYS: tuple[tuple[Config, Config], ...] = (
    ({"stage": "dpo", "pref_beta": 0.3}, of("dpo", beta=0.3)),
    ({"stage": "kto"}, of("kto", beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)),
    (
        {"stage": "kto", "pref_beta": 0.3, "kto_chosen_weight": 2, "kto_rejected_weight": 3},
        of("kto", beta=0.3, desirable_weight=2.0, undesirable_weight=3.0),
    ),
    ({"stage": "dpo", "pref_loss": "orpo"}, of("orpo", beta=0.1, nll_of_prompts=False)),
    ({"stage": "dpo", "pref_loss": "simpo"}, of("simpo", beta=0.1, gamma=0.5)),
    (
        {"stage": "dpo", "pref_loss": "simpo", "pref_beta": 2, "simpo_gamma": 1},
        of("simpo", beta=2.0, gamma=1.0),
    ),
    ({"stage": "rm", "pref_beta": 2}, of("reward", center_coefficient=0.0)),
    ({"stage": "rm"}, {"optim.lr": 5e-5, "optim.schedule.name": "linear"}),
)
"""Keys of LLaMA-Factory 0.9.5, whose ORPO has the loss of answers alone."""


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("axolotl", {"gradient_accumulation_steps": 4}, {"accumulate.steps": 4}),
        ("axolotl", {"batch_size": 8}, {"accumulate.steps": 4}),
        ("axolotl", {"max_steps": 5}, {"train.max_steps": 5, "train.epochs": None}),
        ("axolotl", {"warmup_steps": 1}, {"optim.schedule.warmup_steps": 2}),
        ("axolotl", {"warmup_steps": 0.1}, {"optim.schedule.warmup_ratio": 0.1}),
        ("axolotl", {"warmup_steps": 3, "warmup_ratio": 0.1}, {"optim.schedule.warmup_steps": 3}),
        ("axolotl", {}, {"optim.schedule.warmup_ratio": 0.03}),
        (
            "axolotl",
            {"lr_scheduler": "constant", "warmup_ratio": 0.1},
            {"optim.schedule.name": "constant", "optim.schedule.warmup_ratio": None},
        ),
        ("axolotl", {"cosine_min_lr_ratio": 0.2}, {"optim.schedule.min_lr_ratio": 0.2}),
        ("axolotl", {"adam_beta2": 0.95}, {"optim.betas": [0.9, 0.95]}),
        ("axolotl", {"optimizer": "paged_adamw_8bit"}, {"optim.name": "adamw8bit"}),
        ("axolotl", {"optimizer": "lion_32bit"}, {"optim.name": "lion"}),
        ("axolotl", {"train_on_inputs": True}, {"data.loss_on": "all"}),
        ("axolotl", {"sample_packing": True}, {"data.packing": "whole", "data.isolate": True}),
        ("axolotl", {"sample_packing": False}, {"data.packing": "none", "data.isolate": None}),
        ("axolotl", {"chat_template": "chatml"}, {"data.chat_template": "chatml"}),
        (
            "axolotl",
            {"datasets": [{"path": "chats.jsonl", "type": "completion", "field": "body"}]},
            {"data.columns.text": "body"},
        ),
        (
            "axolotl",
            {"datasets": [{"path": "json", "data_files": "a.jsonl", "type": "chat_template"}]},
            {"data.path": ["a.jsonl"]},
        ),
        (
            "axolotl",
            {"val_set_size": 0.1},
            {"data.validation_fraction": 0.1, "train.eval_steps": "all"},
        ),
        ("axolotl", {"evals_per_epoch": 4}, {"train.eval_every": "0.25ep"}),
        (
            "axolotl",
            {"early_stopping_patience": 2},
            {"train.stop_early.metric": "validation_loss", "train.stop_early.patience": 2},
        ),
        ("llamafactory", {"dataloader_drop_last": True}, {"train.last_batch": "drop"}),
        ("axolotl", {"saves_per_epoch": 2}, {"checkpoint.every": "0.5ep", "checkpoint.keep": 4}),
        (
            "axolotl",
            {"save_steps": 50, "save_total_limit": 3},
            {"checkpoint.every": 50, "checkpoint.keep": 3},
        ),
        ("axolotl", {"bf16": "auto"}, {"train.precision": "bf16", "model.args.dtype": "bfloat16"}),
        (
            "axolotl",
            {"bf16": "auto", "fsdp": ["full_shard"]},
            {"plugin.name": "zero3", "model.args.dtype": None},
        ),
        ("axolotl", {"bf16": False, "fp16": True}, {"train.precision": "fp16"}),
        ("axolotl", {"bf16": True, "fp16": True}, {"train.precision": "bf16"}),
        ("axolotl", {"bf16": False, "fp16": None}, {"train.precision": "fp32"}),
        ("axolotl", {"bf16": None}, {"train.precision": "fp32", "model.args.dtype": None}),
        ("axolotl", {"fp16": True}, {"train.precision": "bf16"}),
        ("axolotl", {}, {"train.tf32": True}),
        ("axolotl", {"tf32": "auto"}, {"train.tf32": True}),
        ("axolotl", {"tf32": None}, {"train.tf32": False}),
        ("axolotl", {"tf32": True}, {"train.tf32": True}),
        (
            "axolotl",
            {"gradient_checkpointing": "offload"},
            {"train.activation_checkpointing": "full"},
        ),
        ("axolotl", {"gradient_checkpointing": False}, {"train.activation_checkpointing": "none"}),
        ("axolotl", {"deepspeed": "ds/zero2.json"}, {"plugin.name": "zero2"}),
        ("axolotl", {"deepspeed": "ds/zero3_bf16_cpuoffload_all.json"}, {"plugin.name": "gemini"}),
        (
            "axolotl",
            {"fsdp_config": {"reshard_after_forward": True, "offload_params": True}},
            {"plugin.name": "gemini"},
        ),
        (
            "axolotl",
            {"dp_replicate_size": 2, "dp_shard_size": 4},
            {"plugin.name": "fsdp-hybrid", "plugin.shard_size": 4},
        ),
        (
            "axolotl",
            {"tensor_parallel_size": 2, "context_parallel_size": 4},
            {"mesh.tp": 2, "mesh.cp": 4},
        ),
        (
            "axolotl",
            {
                "plugins": ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"],
                "expert_parallel_size": 2,
                "expert_parallel_backend": "torch",
            },
            {"mesh.ep": 2},
        ),
        ("axolotl", {"wandb_project": "p"}, {"observe.trackers": ["wandb"]}),
        (
            "axolotl",
            LORA,
            {
                "adapter.name": "lora",
                "adapter.rank": 16,
                "adapter.alpha": 8.0,
                "model.args.dtype": None,
            },
        ),
        (
            "axolotl",
            LORA | {"lora_r": None, "lora_alpha": None},
            {"adapter.rank": 8, "adapter.alpha": 8},
        ),
        ("axolotl", LORA | {"peft_use_rslora": True}, {"adapter.rslora": True}),
        ("axolotl", LORA | {"peft_use_dora": True}, {"adapter.name": "dora"}),
        ("axolotl", {"peft_use_dora": True} | LORA, {"adapter.name": "dora"}),
        (
            "axolotl",
            LORA | {"lora_target_parameters": ["mlp.experts.down_proj"]},
            {"adapter.parameters": ["mlp.experts.down_proj"]},
        ),
        ("llamafactory", TUNED | {"use_rslora": True}, {"adapter.rslora": True}),
        ("torchtune", merged(TUNE, {"model": {"use_dora": True}}), {"adapter.name": "dora"}),
        ("axolotl", LORA | {"lora_target_linear": True}, {"adapter.targets": ALL_LAYERS}),
        ("axolotl", LORA | {"lora_modules_to_save": ["lm_head"]}, {"freeze.except": ["*lm_head*"]}),
        (
            "axolotl",
            LORA | {"loraplus_lr_ratio": 16},
            {"optim.rules": [{"match": "*lora_B*", "lr_scale": 16.0}]},
        ),
        (
            "axolotl",
            {"lora_r": 16, "load_in_4bit": False},
            {"adapter.rank": None, "adapter.name": None},
        ),
        (
            "axolotl",
            {"unfrozen_parameters": ["^lm_head.weight$", "model.layers.1.*"]},
            {"freeze.patterns": ["*"], "freeze.except": ["lm_head.weight", "model.layers.1*"]},
        ),
        (
            "axolotl",
            {"rl": "dpo", "rl_beta": 0.3},
            {"train.objective": "dpo", "train.dpo.beta": 0.3},
        ),
        ("llamafactory", {"per_device_train_batch_size": 1}, {"train.micro_batch": 1}),
        ("llamafactory", {}, {"train.micro_batch": 8, "optim.lr": 5e-5, "checkpoint.every": 500}),
        ("llamafactory", {}, {"train.activation_checkpointing": "full", "model.args.dtype": None}),
        (
            "llamafactory",
            {"disable_gradient_checkpointing": True},
            {"train.activation_checkpointing": "none"},
        ),
        (
            "llamafactory",
            {"num_train_epochs": 2.0, "max_steps": -1},
            {"train.epochs": 2.0, "train.max_steps": None},
        ),
        (
            "llamafactory",
            {"num_train_epochs": 2.0, "max_steps": 9},
            {"train.epochs": None, "train.max_steps": 9},
        ),
        ("llamafactory", {"mask_history": True}, {"data.loss_on": "last"}),
        ("llamafactory", {"train_on_prompt": True}, {"data.loss_on": "all"}),
        ("llamafactory", {"packing": True}, {"data.packing": "whole", "data.isolate": None}),
        (
            "llamafactory",
            {"packing": True, "neat_packing": True},
            {"data.packing": "whole", "data.isolate": True},
        ),
        ("llamafactory", {"stage": "pt"}, {"data.packing": "stream"}),
        (
            "llamafactory",
            {"stage": "dpo", "pref_beta": 0.2},
            {"train.objective": "dpo", "train.dpo.beta": 0.2},
        ),
        (
            "llamafactory",
            {"bf16": False, "pure_bf16": True},
            {"train.precision": "bf16", "model.args.dtype": "bfloat16"},
        ),
        ("llamafactory", {"bf16": False, "fp16": True}, {"train.precision": "fp16"}),
        (
            "llamafactory",
            {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 20},
            {"data.validation_fraction": 0.1, "train.eval_every": 20},
        ),
        ("llamafactory", {"report_to": "none"}, {"observe.trackers": None}),
        (
            "llamafactory",
            {"report_to": ["wandb", "tensorboard"]},
            {"observe.trackers": ["wandb", "tensorboard"]},
        ),
        ("llamafactory", {"use_muon": True}, {"optim.name": "muon"}),
        ("llamafactory", {"deepspeed": "ds_z3_config.json"}, {"plugin.name": "zero3"}),
        ("llamafactory", {"expert_model_parallel_size": 2}, {"mesh.ep": 2}),
        (
            "llamafactory",
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            {"mesh.tp": 2, "mesh.sequence_parallel": True},
        ),
        (
            "llamafactory",
            TUNED,
            {"adapter.rank": 16, "adapter.alpha": 32, "adapter.targets": ALL_LAYERS},
        ),
        (
            "llamafactory",
            TUNED | {"lora_target": "q_proj, v_proj"},
            {"adapter.targets": ["q_proj", "v_proj"]},
        ),
        ("llamafactory", {"finetuning_type": None}, {"adapter.name": "lora", "adapter.rank": 8}),
        ("llamafactory", {"lora_rank": 16}, {"adapter.rank": None}),
        ("torchtune", {}, {"train.precision": "bf16", "model.args.dtype": "bfloat16"}),
        (
            "torchtune",
            {"dtype": "fp32"},
            {"train.precision": "fp32", "model.args.dtype": "float32"},
        ),
        ("torchtune", {}, {"train.last_batch": "drop", "checkpoint.every": "1ep"}),
        (
            "torchtune",
            {"gradient_accumulation_steps": 8},
            {"train.micro_batch": 2, "accumulate.steps": 8},
        ),
        ("torchtune", {"max_steps_per_epoch": 10}, {"train.max_steps": 30, "train.epochs": None}),
        ("torchtune", {"max_steps_per_epoch": None}, {"train.max_steps": None, "train.epochs": 3}),
        ("torchtune", {"clip_grad_norm": 0.5}, {"train.grad_clip": 0.5}),
        ("torchtune", {"tokenizer": {"max_seq_len": None}}, {"data.seq_len": 2048}),
        (
            "torchtune",
            {"dataset": {"packed": True}},
            {"data.packing": "whole", "data.isolate": True},
        ),
        ("torchtune", {"dataset": {"train_on_input": True}}, {"data.loss_on": "all"}),
        (
            "torchtune",
            {"dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset"}},
            {"data.loss_on": "all", "data.path": ["chats.jsonl"]},
        ),
        (
            "torchtune",
            {"dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "source": None}},
            {"data.path": ["tatsu-lab/alpaca"]},
        ),
        (
            "torchtune",
            {
                "lr_scheduler": {
                    "_component_": "torchtune.training.get_cosine_schedule_with_warmup",
                    "num_warmup_steps": 7,
                }
            },
            {"optim.schedule.name": "cosine", "optim.schedule.warmup_steps": 7},
        ),
        (
            "torchtune",
            {"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}},
            {"optim.name": "adamw8bit", "optim.weight_decay": 0.01},
        ),
        ("torchtune", {"optimizer": {"weight_decay": 0.05}}, {"optim.weight_decay": 0.05}),
        ("torchtune", {"ac_mode": "selective"}, {"train.activation_checkpointing": "selective"}),
        ("torchtune", {"fsdp_cpu_offload": True}, {"plugin.name": "gemini"}),
        (
            "torchtune",
            {"run_val_every_n_steps": 10},
            {"train.eval_every": 10, "train.eval_steps": "all"},
        ),
        ("torchtune", {"save_adapter_weights_only": True}, {"checkpoint.content": "trained"}),
        (
            "torchtune",
            {"output_dir": "model", "checkpointer": {"checkpoint_dir": "${output_dir}"}},
            {"model.hf": "model"},
        ),
        (
            "torchtune",
            merged(
                TUNE,
                {
                    "model": {
                        "lora_attn_modules": ["q_proj", "output_proj"],
                        "apply_lora_to_mlp": True,
                    }
                },
            ),
            {
                "adapter.rank": 16,
                "adapter.targets": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            },
        ),
        (
            "torchtune",
            {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2}},
            {"train.objective": "dpo", "train.dpo.beta": 0.2},
        ),
        (
            "torchtune",
            {"teacher_checkpointer": {"checkpoint_dir": "large"}, "kd_ratio": 0.4},
            {
                "train.objective": "distill",
                "train.distill.teacher": "large",
                "train.distill.alpha": 0.4,
            },
        ),
        *(("axolotl", more, wanted) for more, wanted in AXOLOTLS),
        *(("llamafactory", more, wanted) for more, wanted in FACTORYS),
        (
            "torchtune",
            {"metric_logger": {"_component_": "torchtune.training.metric_logging.WandBLogger"}},
            {"observe.trackers": ["wandb"]},
        ),
    ],
)
def test_a_key_means_what_it_means_there(kind: str, more: Config, expected: Config) -> None:
    settings, _ = imported(kind, more)
    assert {key: settings.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("kind", "more", "key"),
    [
        *(
            ("axolotl", {key: value}, key)
            for key, value in {
                "load_in_8bit": True,
                "gptq": True,
                "bnb_config_kwargs.bnb_4bit_quant_type": "fp4",
                "rl": "grpo",
                "process_reward_model": True,
                "num_labels": 2,
                "processor_type": "AutoProcessor",
                "relora": True,
                "lisa_n_layers": 4,
                "fp8": True,
                "use_eaft": True,
                "optimizer": "came_pytorch",
                "lr_scheduler": "one_cycle",
                "lr_quadratic_warmup": True,
                "resume_from_checkpoint": "outputs/checkpoint-10",
                "plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"],
                "expert_parallel_token_capacity": 1024,
            }.items()
        ),
        ("axolotl", {"qat": {"weight_dtype": "int4"}}, "qat.weight_dtype"),
        ("axolotl", {"datasets": [{"path": "a", "type": "x.transform"}]}, "datasets[0].type"),
        *(
            ("llamafactory", {key: value}, key)
            for key, value in {
                "quantization_bit": 3,
                "quantization_type": "fp4",
                "stage": "ppo",
                "finetuning_type": "freeze",
                "use_galore": True,
                "neftune_noise_alpha": 5,
                "label_smoothing_factor": 0.1,
                "pref_ftx": 0.1,
                "freeze_vision_tower": True,
                "do_predict": True,
                "export_dir": "merged",
                "use_kt": True,
                "optim": "apollo_adamw",
                "train_dataset": "data/v1.yaml",
            }.items()
        ),
        ("axolotl", {"rl": "simpo", "simpo_gamma": 0.5}, "rl"),
        ("axolotl", {"rl": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.1}, "cpo_alpha"),
        ("llamafactory", {"stage": "dpo", "pref_loss": "ipo"}, "pref_loss"),
        ("llamafactory", {"stage": "kto", "pref_ftx": 0.1}, "pref_ftx"),
        (
            "torchtune",
            {"model": {"_component_": "torchtune.models.llama3_2_vision.llama3_2_vision_11b"}},
            "model._component_",
        ),
        (
            "torchtune",
            {"quantizer": {"_component_": "torchtune.training.quantization.QATQuantizer"}},
            "quantizer._component_",
        ),
        ("torchtune", {"loss": {"_component_": "torchtune.rlhf.loss.PPOLoss"}}, "loss._component_"),
        (
            "torchtune",
            {"ref_checkpointer": {"checkpoint_dir": "another"}},
            "ref_checkpointer.checkpoint_dir",
        ),
        ("torchtune", {"resume_from_checkpoint": True}, "resume_from_checkpoint"),
        ("torchtune", {"tasks": ["truthfulqa"]}, "tasks"),
        ("torchtune", {"dtype": "fp16"}, "dtype"),
    ],
)
def test_what_is_not_trained_here_is_refused(kind: str, more: Config, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        imported(kind, more)
    assert key in {problem.key for problem in error.value.problems}


@pytest.mark.parametrize(
    ("kind", "more", "key", "told"),
    [
        (
            "axolotl",
            {"datasets": [{"path": "chats.jsonl", "type": "alpaca"}]},
            "datasets[0].type",
            "Alpaca's text",
        ),
        (
            "axolotl",
            {"rl": "kto", "datasets": [{"path": "rated.jsonl", "type": "chatml.argilla"}]},
            "datasets[0].type",
            "set data.chat_template, for chatml",
        ),
        (
            "axolotl",
            {"datasets": [{"path": "chats.jsonl", "split": "train[:1%]"}]},
            "datasets[0].split",
            "cut the files",
        ),
        (
            "axolotl",
            LORA | {"lora_target_modules": "layers.[\\d]+.(q|k)_proj"},
            "lora_target_modules",
            "to globs",
        ),
        (
            "axolotl",
            {"unfrozen_parameters": ["layers.4[4-9]+.gate"]},
            "unfrozen_parameters",
            "to globs",
        ),
        ("axolotl", {"chat_template": "llama3"}, "chat_template", "set data.chat_template"),
        (
            "axolotl",
            {"special_tokens": {"eos_token": "</s>"}},
            "special_tokens.eos_token",
            "tokenizer's own",
        ),
        ("llamafactory", {}, "dataset", "which is not here"),
        ("llamafactory", {"max_samples": 10}, "max_samples", "cut the files"),
        ("torchtune", {"tokenizer": {"max_seq_len": None}}, "tokenizer.max_seq_len", "cut at 2048"),
    ],
)
def test_what_the_user_must_say_is_asked(kind: str, more: Config, key: str, told: str) -> None:
    _, found = imported(kind, more)
    (finding,) = [f for f in found if f.key == key]
    assert finding.outcome == "asked"
    assert told in finding.note
    assert any(told in question for question in recipes.questions(kind, found))


def test_of_several_keys_of_one_number_the_others_are_decided() -> None:
    given = {"rl": "orpo", "orpo_alpha": 0.5, "rl_beta": 0.4, "trl": {"beta": 0.3}}
    _, found = imported("axolotl", given)
    told = {f.key: (f.outcome, f.note) for f in found if f.settings or "counts" in f.note}
    assert told["trl.beta"][0] == "taken"
    assert told["rl_beta"] == told["orpo_alpha"] == ("decided", "trl.beta counts")


def test_two_datasets_with_columns_of_two_names_are_asked_about() -> None:
    entries = [
        {"path": "chats.jsonl", "type": "chat_template", "field_messages": name}
        for name in ("messages", "turns")
    ]
    _, found = imported("axolotl", {"datasets": entries})
    outcomes = [f.outcome for f in found if f.key.endswith("field_messages")]
    assert outcomes == ["asked", "asked"]
    settings, _ = imported(
        "axolotl", {"datasets": [entry | {"field_messages": "turns"} for entry in entries]}
    )
    assert settings["data.columns.messages"] == "turns"
    assert settings["data.path"] == ["chats.jsonl", "chats.jsonl"]


def test_names_of_datasets_are_looked_up_in_their_registry(folder: Path) -> None:
    (folder / "data").mkdir()
    entries = {
        "chats": {"file_name": "a.json", "columns": {"messages": "turns"}},
        "same": {"hf_hub_url": "some/chats", "columns": {"messages": "turns"}},
        "plain": {"file_name": "b.json"},
        "seen": {"file_name": "c.json", "columns": {"images": "images"}},
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps(entries))
    settings, _ = imported("llamafactory", {"dataset": "chats, same"})
    assert settings["data.path"] == ["data/a.json", "some/chats"]
    assert settings["data.columns.messages"] == "turns"
    _, found = imported("llamafactory", {"dataset": "chats,plain"})
    assert {f.key: f.outcome for f in found}["dataset"] == "asked"
    with pytest.raises(ConfigError):
        imported("llamafactory", {"dataset": "seen"})


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("axolotl", {"adapter": "qlora", "load_in_4bit": True}),
        ("llamafactory", {"finetuning_type": "lora", "quantization_bit": 4}),
        ("torchtune", {"model": {"_component_": "torchtune.models.llama3.qlora_llama3_8b"}}),
    ],
)
def test_a_base_in_4_bits_is_packed(kind: str, more: Config) -> None:
    settings, _ = imported(kind, more)
    assert settings["model.quantize"] == "nf4"
    assert settings["adapter.name"] == "lora"


def test_names_of_models_keep_their_revision(folder: Path) -> None:
    settings, _ = imported("axolotl", {"base_model": "org/tiny", "revision_of_model": "v2"})
    assert (settings["model.hf"], settings["model.revision"]) == ("org/tiny", "v2")


def test_a_refused_file_writes_no_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BASE["axolotl"] | {"adapter": "vera", "load_in_8bit": True}
    (folder / "packed.yml").write_text(yaml.safe_dump(config))
    assert guarded(["import-config", "packed.yml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("=")[0] for line in lines] == ["error: adapter", "error: load_in_8bit"]
    assert not (folder / "recipes").exists()


def test_a_recipe_of_a_whole_file_has_no_base_and_tells_what_differs(folder: Path) -> None:
    config = BASE["axolotl"] | {"lr_scheduler": "cosine"}
    (folder / "sft.yml").write_text(yaml.safe_dump(config))
    assert guarded(["import-config", "sft.yml", "--to", "recipes/sft.yaml"]) == 0
    text = (folder / "recipes" / "sft.yaml").read_text()
    assert "defaults" not in yaml.safe_load(text)
    assert "# sequence_len = 64: taken (longer samples are cut here" in text
    assert '# lr_scheduler = "cosine": taken (a warm-up is one step ahead' in text
    assert "model, data:" not in text


def theirs(step: int, *, warmup: int, steps: int, shape: str, least: float) -> float:
    """Factor of the learning rate in transformers and torchtune, of a step from 0."""
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    falling = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return least + (1 - least) * falling[shape]


@pytest.mark.parametrize(
    ("kind", "more", "shape", "least"),
    [
        ("axolotl", {"max_steps": 400, "warmup_ratio": 0.1}, "cosine", 0.0),
        (
            "axolotl",
            {"max_steps": 400, "warmup_steps": 40, "cosine_min_lr_ratio": 0.2},
            "cosine",
            0.2,
        ),
        ("llamafactory", {"max_steps": 400, "warmup_ratio": 0.1}, "linear", 0.0),
        (
            "torchtune",
            {
                "max_steps_per_epoch": 400,
                "epochs": 1,
                "lr_scheduler": {
                    "_component_": "get_cosine_schedule_with_warmup",
                    "num_warmup_steps": 40,
                },
            },
            "cosine",
            0.0,
        ),
    ],
)
def test_learning_rates_are_at_most_a_step_from_theirs(
    folder: Path, kind: str, more: Config, shape: str, least: float
) -> None:
    found = recipes.findings(merged(BASE[kind], more), kind)
    text = recipes.render(Path("theirs"), kind, found)
    (folder / "recipes").mkdir()
    (folder / "recipes" / "mine.yaml").write_text(text)
    own = ["model.hf=null", "model.args=null", "model.target=colotrain.models.llm:LLM"]
    sizes = "model.args={vocab_size: 256, d_model: 16, num_layers: 1, num_heads: 1, d_hidden: 16}"
    data = ["data.path=null", "data.corpus=stdlib", "data.packing=auto", "data.isolate=false"]
    words = [*own, sizes, *data, "data.validation_fraction=0.05", "checkpoint.every=auto"]
    plan = plan_from(["recipe=mine", *words], here=False)
    assert plan.train.max_steps == 400
    ours = [schedule(plan.optim, step, 400) for step in range(400)]
    same = {"warmup": 40, "steps": 400, "shape": shape, "least": least}
    for step in (0, 1, 20, 200, 399):
        near = sorted(theirs(near, **same) for near in (step, step + 1))  # type: ignore[arg-type]
        assert near[0] - 2e-3 <= ours[step] <= near[1] + 2e-3
    assert plan.batch.micro_batch == (8 if kind == "llamafactory" else 2)
