"""Every kind of adapter computes, reads and writes what PEFT does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from colotrain.config.adapter import read_peft
from colotrain.errors import ConfigError
from colotrain.models import adapters
from colotrain.models.adapter_kinds import magnitude, parameters
from colotrain.models.loading import WHOLE, build, build_whole
from colotrain.spec.plan import AdapterPlan
from colotrain.verify.adapters import compute_plainly_
from tests.unit.models.test_adapters import llm, plan

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24},
}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}


def llama() -> Any:
    config = transformers.LlamaConfig(attention_bias=True, bos_token_id=0, eos_token_id=1, **SIZES)
    return transformers.LlamaForCausalLM(config)


def tied() -> Any:
    config = transformers.LlamaConfig(tie_word_embeddings=True, bos_token_id=0, **SIZES)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    no_dropout = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
    config = transformers.GPT2Config(eos_token_id=1, **sizes, **no_dropout)
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> Any:
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **EXPERTS))
    model.set_experts_implementation("eager")  # the others have no float64
    return model


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(pad_token_id=0, eos_token_id=1, **SIZES, **EXPERTS)
    model = transformers.GptOssForCausalLM(config)
    model.set_experts_implementation("eager")
    return model


ALL = {"target_modules": "all-linear"}
PATTERNS = {
    **{"rank_pattern": {"mlp.*": 3, "q_proj": 1}, "alpha_pattern": {".*layers.1.*": 9}},
    "use_rslora": True,
}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "ranks": (llama, {**ALL, **PATTERNS}),
    "dora": (llama, {**ALL, **PATTERNS, "use_dora": True}),
    "dora-dropout": (llama, {**ALL, "use_dora": True, "lora_dropout": 0.3}),
    "dora-gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "modules": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "embedding": (
        llama,
        {"target_modules": ["q_proj"], "target_parameters": ["embed_tokens.weight"]},
    ),
    "embedding-tied": (
        tied,
        {"target_modules": ["q_proj"], "target_parameters": ["embed_tokens.weight"]},
    ),
    "experts": (
        mixtral,
        {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "experts.down_proj"]},
    ),
    "experts-transposed": (
        gpt_oss,
        {
            **{"target_modules": [], "target_parameters": ["gate_up_proj", "experts.down_proj"]},
            "rank_pattern": {"gate_up_proj": 3},
        },
    ),
}


def pair(case: str, folder: Path) -> tuple[Any, Any, AdapterPlan]:
    """PEFT's model with random values, and ours made of what PEFT saved, both in float64."""
    make, settings = CASES[case]
    torch.manual_seed(1)
    base = make().double()
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = copy.deepcopy(base)
    gpt = {"fan_in_fan_out": True} if make is gpt2 else {}
    config = peft.LoraConfig(r=2, lora_alpha=4, **gpt, **settings)
    theirs = peft.get_peft_model(base, config).double()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(folder)
    found = read_peft(folder)
    adapters.attach_(ours, found)
    adapters.fill_(ours, found, seed=0, shards=WHOLE)
    return theirs.train(), ours.train(), found


def loss_of(model: Any) -> Tensor:
    ids = torch.arange(27).view(3, 9) * 7 % 32
    torch.manual_seed(5)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def peft_gradients(model: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = name.replace(".default", "").replace("modules_to_save.", "")
            found[plain.replace("magnitude_vector.weight", "magnitude_vector")] = parameter.grad
    return found


def our_gradients(model: Any) -> dict[str, Tensor]:
    parts = {part.name: part for part in adapters.parts(model)}
    found = {}
    for name, parameter in model.named_parameters():
        if name in parts:
            found[parts[name].stored] = parts[name].as_stored(parameter.grad)
        elif parameter.requires_grad:
            found[f"{adapters.PREFIX}{name}"] = parameter.grad
    return found


def largest_difference(theirs: Any, ours: Any) -> float:
    """Largest difference of the losses and of any gradient, relative to that gradient."""
    losses = [loss_of(model).item() for model in (theirs, ours)]
    wanted, found = peft_gradients(theirs), our_gradients(ours)
    assert found.keys() == wanted.keys()
    assert all(gradient.abs().max() > 1e-6 for gradient in wanted.values())
    relative = [(found[n] - g).abs().max() / g.abs().max() for n, g in wanted.items()]
    return max(abs(losses[0] - losses[1]), *(r.item() for r in relative))


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_merged_weights_are_pefts(case: str, tmp_path: Path) -> None:
    theirs, ours, _ = pair(case, tmp_path)
    assert largest_difference(theirs, ours) < 1e-12
    merge_(ours)
    merged = dict(theirs.merge_and_unload().named_parameters())
    for name, parameter in ours.named_parameters():
        if name in merged:
            assert (parameter - merged[name]).abs().max().item() < 1e-6, name


def merge_(model: Any) -> None:
    values = dict(model.named_parameters())
    with torch.no_grad():
        for merge in [*adapters.merges(model)]:
            parts = [values[name] for name in merge.parts]
            merge.parameter.copy_(merge.merged(merge.parameter, *parts))
            merge.detach_()


WRITTEN = ["ranks", "dora", "dora-gpt2", "embedding-tied", "experts-transposed"]


@pytest.mark.parametrize("case", WRITTEN)
def test_peft_reads_what_is_written_of_it(case: str, tmp_path: Path) -> None:
    theirs, ours, found = pair(case, tmp_path / "peft")
    out = tmp_path / "ours"
    out.mkdir()
    tensors = {
        part.stored: part.as_stored(part.parameter.detach()).clone()
        for part in adapters.parts(ours)
    }
    save_file(tensors, out / adapters.WEIGHTS)
    settings = adapters.peft_settings(ours, found, base=None)
    (out / adapters.SETTINGS).write_text(adapters.to_json(settings))
    assert load_file(tmp_path / "peft" / adapters.WEIGHTS).keys() == tensors.keys()
    torch.manual_seed(1)
    base = CASES[case][0]().double()
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.2)
    again = peft.PeftModel.from_pretrained(base, out).double().eval()
    ids = torch.arange(9).view(1, 9)
    with torch.no_grad():
        logits = [model.eval()(input_ids=ids).logits for model in (theirs, again)]
    assert (logits[0] - logits[1]).abs().max().item() < 1e-12
    reread = read_peft(out)
    names = [m.weight.removesuffix(".weight") for m in adapters.merges(ours)]
    assert [reread.scale_of(n) for n in names] == [found.scale_of(n) for n in names]


@pytest.mark.parametrize("case", CASES)
def test_the_formulas_of_verify_are_the_same(case: str, tmp_path: Path) -> None:
    _, ours, found = pair(case, tmp_path)
    other = copy.deepcopy(ours)
    compute_plainly_(other, found)
    losses = [loss_of(model).item() for model in (ours, other)]
    wanted, gradients = our_gradients(ours), our_gradients(other)
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-10 * gradient.abs().max(), name


def test_the_scale_of_dora_applied_twice_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours, _ = pair("dora", tmp_path)
    once = magnitude.product
    monkeypatch.setattr(magnitude, "product", lambda layer, x: once(layer, x) * layer.lora_scale)
    assert largest_difference(theirs, ours) > 1e-3


def test_an_adapter_on_the_neighbour_expert_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours, _ = pair("experts", tmp_path)
    own = parameters.with_product

    def neighbours(parameter: Tensor, a: Tensor, b: Tensor, **settings: Any) -> Tensor:
        rank = settings["rank"]
        return own(parameter, a.roll(rank, 0), b.roll(rank, 1), **settings)

    monkeypatch.setattr(parameters, "with_product", neighbours)
    assert largest_difference(theirs, ours) > 1e-3


def test_new_magnitudes_are_the_norms_of_the_weights_and_change_nothing() -> None:
    ids = torch.randint(32, (2, 5))
    bare = build_whole(llm(None), seed=4)
    model = build_whole(llm(plan("*mlp*", name="dora")), seed=4)
    values = dict(model.named_parameters())
    weight = values["blocks.0.mlp.up.weight"]
    found = values["blocks.0.mlp.up.lora_magnitude_vector.weight"]
    torch.testing.assert_close(found, weight.square().sum(1).sqrt())
    torch.testing.assert_close(model(ids), bare(ids))


def test_a_row_of_zeros_has_no_direction() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight[1] = 0.0  # type: ignore[index]
    dora = plan("0", name="dora")
    adapters.attach_(model, dora)
    with pytest.raises(ConfigError, match=r"adapter\.name=dora.*0 has one.*adapter\.exclude=\[0\]"):
        adapters.fill_(model, dora, seed=0, shards=WHOLE)


def test_all_linear_leaves_out_the_head_and_what_is_excluded() -> None:
    model = llama()
    adapters.attach_(model, plan("all-linear", exclude=("*.0.*", "k_proj")))
    last = {"q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in adapters.adapted(model)} == last
    assert not any(".0." in name for name in adapters.adapted(model))


def test_globs_give_layers_other_ranks_and_alphas() -> None:
    found = plan("query", "*mlp*", ranks={"*mlp*": 2}, alphas={"blocks.1.*": 9.0}, rslora=True)
    model = build(llm(found), seed=0)
    layers: dict[str, Any] = adapters.adapted(model)
    assert layers["blocks.0.mlp.up"].lora_A.weight.shape[0] == 2
    assert layers["blocks.0.attention.query"].lora_A.weight.shape[0] == 3
    assert layers["blocks.1.mlp.up"].lora_scale == 9 / 2**0.5
    settings = adapters.peft_settings(model, found, base=None)
    assert settings["rank_pattern"][r"^blocks\.0\.mlp\.up"] == 2
    assert settings["use_rslora"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"ranks": {"q_proj": 2}}, "adapter.ranks.q_proj=2: expected a glob on what has an adap"),
        ({"alphas": {"*": 1.0, "*0*": 2.0}}, "adapter.alphas: expected one number for blocks.0.m"),
        ({"exclude": ("q_proj",)}, "adapter.exclude=q_proj: expected a glob on linear layers"),
        ({"parameters": ("mlp.up.weight",)}, "name linear layers in adapter.targets"),
        ({"parameters": ("experts",)}, "adapter.parameters=experts: expected a glob on matrices"),
    ],
)
def test_names_that_mean_nothing_are_told(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(llm(plan("*mlp*", **changes)), seed=0)
    assert any(line in text for text in caught.value.lines())


def test_peft_adapters_of_an_embedding_are_refused_with_the_way_there_is(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"])
    peft.get_peft_model(llama(), config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"it has .*lora_embedding_A.*merge_and_unload"):
        read_peft(tmp_path)
    with pytest.raises(
        ConfigError, match=r"set adapter\.parameters=\[model\.embed_tokens\.weight\]"
    ):
        adapters.attach_(llama(), plan("embed_tokens"))
