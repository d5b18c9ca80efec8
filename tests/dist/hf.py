"""Small Hugging Face directories with random weights, data for them, and plain fine-tunes.

The fine-tunes are transformers and torch in one process, in float64, with a LoRA written out as a
changed weight: nothing of colotrain but its order of samples and its masks.
"""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

from colotrain.spec.plan import RunPlan
from colotrain.verify.masks import MaskedSamples
from colotrain.verify.quantized import NF4_VALUES
from colotrain.verify.trajectory import Trajectory

VOCAB, SEQ = 96, 12
KINDS = ("llama", "gpt2")


def make_directory(kind: str, folder: Path, **llama: int) -> Path:
    """A model that transformers itself made and saved; `llama` replaces its sizes."""
    import transformers

    torch.manual_seed(3)
    if kind == "llama":
        sizes = {"vocab_size": VOCAB, "max_position_embeddings": 32, "intermediate_size": 40}
        sizes |= {"hidden_size": 24, "num_hidden_layers": 3}
        config: Any = transformers.LlamaConfig(
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=0,
            **sizes | llama,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=24,
            n_layer=3,
            n_head=4,
            initializer_range=0.1,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def store_quantized(folder: Path, method: str) -> None:
    """Replace weights in the files of a model by random ones that are stored quantized.

    `method` is mxfp4 (experts), nf4 or int8 (linear layers), as published directories have them.
    """
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    stored, draws = load_file(path), torch.Generator().manual_seed(7)
    for name in [n for n in stored if re.search(QUANTIZED[method], n)]:
        weight = stored.pop(name)
        if method == "mxfp4":
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            stored[f"{name}_blocks"] = _bytes((*shape, 16), draws)
            stored[f"{name}_scales"] = torch.randint(121, 124, shape, generator=draws).byte()
        elif method == "nf4":
            num = -(-weight.numel() // 64)
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32"}
            state |= {"shape": [*weight.shape], "nested_blocksize": 8, "nested_offset": 0.2}
            nested = {
                "absmax": _bytes((num,), draws),
                "quant_map": NF4_VALUES.clone(),
                "nested_absmax": torch.rand(-(-num // 8), generator=draws) / 10,
                "nested_quant_map": torch.linspace(-1, 1, 256),
                "quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()]).byte(),
            }
            stored[name] = _bytes((-(-weight.numel() // 2), 1), draws)
            stored |= {f"{name}.{key}": value for key, value in nested.items()}
        else:
            stored[name] = _bytes(tuple(weight.shape), draws).view(torch.int8)
            stored[name.replace("weight", "SCB")] = torch.rand(len(weight), generator=draws) / 3
            stored[f"{name}_format"] = torch.tensor(0, dtype=torch.uint8)
    save_file(stored, path, metadata={"format": "pt"})
    settings: dict[str, Any] = {"quant_method": "mxfp4" if method == "mxfp4" else "bitsandbytes"}
    if method != "mxfp4":
        settings["load_in_4bit" if method == "nf4" else "load_in_8bit"] = True
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


GPT_OSS = {
    **{"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_local_experts": 3},
    **{"num_experts_per_tok": 2, "pad_token_id": 0},
}
"""Sizes of a small GPT-OSS whose experts have whole blocks of 32."""
QUANTIZED = {
    "mxfp4": r"experts\.(gate_up|down)_proj$",
    **dict.fromkeys(("nf4", "int8"), r"_proj\.weight$"),
}
"""Method → regular expression of the tensors that are stored so."""


def _bytes(shape: tuple[int, ...], draws: torch.Generator) -> Tensor:
    return torch.randint(256, shape, generator=draws, dtype=torch.uint8)


def add_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with the tokens of ChatML, and an end of text that is another."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {text: number for number, text in enumerate([*letters, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.save_pretrained(folder)


def make_chat_directory(folder: Path, kind: str = "llama", **more: Any) -> Path:
    """A small model of 288 tokens, with its tokenizer."""
    import transformers

    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": 288,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    dtype = more.pop("dtype", torch.float32)
    config = transformers.AutoConfig.for_model(kind, **sizes | more)
    task = more.get("architecture", "CausalLM")
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    model.to(dtype).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether transformers' trainer decays a parameter of its own models."""
    norm = r"layernorm|rmsnorm|(^|\.|_)norm(\.|$)"
    return parameter.ndim > 1 and "bias" not in name and not re.search(norm, name.lower())


def plain(folder: Path) -> Any:
    """What transformers loads."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def samples(count: int = 64) -> list[dict[str, Tensor]]:
    """For `data.target`: random tokens, the labels shifted already."""
    tokens = torch.randint(VOCAB, (count, SEQ + 1), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


def fine_tune(plan: RunPlan, initial: dict[str, Tensor], *, steps: int) -> Trajectory:
    """The plan's fine-tune in plain transformers and torch; `initial` are the adapters' values.

    Its rounding is how far the same in float32 is from it.
    """
    exact, plain = (_train(plan, initial, steps, dtype) for dtype in (torch.float64, torch.float32))
    pairs = zip(exact.gradients, plain.gradients, strict=True)
    noise = [{n: (a[n] - b[n]).abs().max().item() for n in a} for a, b in pairs]
    return replace(exact, rounding={"gradients": noise})


def _train(plan: RunPlan, initial: dict[str, Tensor], steps: int, dtype: torch.dtype) -> Trajectory:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(plan.model.hf).to(dtype).train()
    model.config.use_cache = False
    base = dict(model.named_parameters())
    adapters = {n: nn.Parameter(t.to(dtype, copy=True)) for n, t in initial.items()}
    trained = adapters or {
        n: p
        for n, p in base.items()
        if not any(fnmatch.fnmatch(n, glob) for glob in plan.freeze.patterns)
    }
    for name, parameter in base.items():
        parameter.requires_grad = name in trained
    groups = [
        {"params": [p for n, p in trained.items() if decays(n, p)], "weight_decay": 0.1},
        {"params": [p for n, p in trained.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=plan.optim.lr, momentum=plan.optim.betas[0])
    data = MaskedSamples(samples())
    everything = {**base, **adapters}
    losses, gradients, parameters = [], [], [_values(everything)]
    size = plan.batch.global_batch
    for step in range(steps):
        rows = [data[i] for i in range(step * size, (step + 1) * size)]
        ids, labels = (torch.stack([r[k] for r in rows]) for k in ("input_ids", "labels"))
        weights = _with_adapters(model, base, adapters, plan)
        logits = functional_call(model, weights, kwargs={"input_ids": ids}).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        found = {n: p.grad for n, p in everything.items() if p.grad is not None}
        gradients.append({n: g.float().clone() for n, g in found.items()})
        optimizer.step()
        parameters.append(_values(everything))
    return Trajectory(
        losses=losses,
        gradients=gradients,
        parameters=parameters,
        optimizer_steps=steps,
        frozen=frozenset(everything) - set(trained),
    )


def _with_adapters(
    model: nn.Module, base: dict[str, Tensor], adapters: dict[str, nn.Parameter], plan: RunPlan
) -> dict[str, Tensor]:
    """The weights with every adapter's product added; GPT-2 keeps its own transposed."""
    weights: dict[str, Tensor] = dict(base)
    for name in {n.rpartition(".lora_")[0] for n in adapters}:
        adapter = plan.model.adapter
        assert adapter is not None
        a, b = (adapters[f"{name}.lora_{part}.weight"] for part in "AB")
        product = (b @ a) * adapter.alpha / adapter.rank
        transposed = not isinstance(model.get_submodule(name), nn.Linear)
        weights[f"{name}.weight"] = base[f"{name}.weight"] + (product.T if transposed else product)
    return weights


def _values(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {n: p.detach().float().clone() for n, p in parameters.items()}
