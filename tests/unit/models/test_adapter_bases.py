"""Adapters that change the weights below them, as PEFT does when it makes or loads such ones."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.config.adapter import read_peft
from colotrain.errors import ConfigError
from colotrain.models import adapters
from colotrain.models.adapter_kinds import bases
from colotrain.models.loading import WHOLE
from colotrain.spec.plan import AdapterPlan
from tests.unit.models.test_adapter_kinds import PATTERNS, gpt2, llama
from tests.unit.models.test_adapters import plan

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
IDS = torch.arange(27).view(3, 9) * 7 % 32
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pissa": (llama, {"target_modules": "all-linear", **PATTERNS, "lora_alpha": 5}),
    "olora": (llama, {"target_modules": "all-linear", **PATTERNS, "lora_alpha": 5}),
    "pissa-transposed": (
        gpt2,
        {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
    ),
}


def base_of(make: Any) -> Any:
    base = make()
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.15)
    return base.eval()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def trained_(model: Any) -> None:
    """Move every matrix of the adapters, as training does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def with_ours(base: Any, found: AdapterPlan) -> Any:
    model = copy.deepcopy(base)
    adapters.attach_(model, found)
    adapters.fill_(model, found, seed=0, shards=WHOLE)
    return model


def difference(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item() / one.abs().max().item()


def saved_by_peft(case: str, folder: Path) -> tuple[Any, Any]:
    """The base, and PEFT's trained model, which is saved in `folder`."""
    make, settings = CASES[case]
    base = base_of(make)
    config = peft.LoraConfig(init_lora_weights=case.partition("-")[0], **{"r": 2, **settings})
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    trained_(theirs)
    theirs.save_pretrained(folder)
    return base, theirs


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_put_on_the_weights_that_peft_puts_it_on(case: str, tmp_path: Path) -> None:
    base, theirs = saved_by_peft(case, tmp_path)
    found = read_peft(tmp_path)
    assert found.init == case.partition("-")[0]
    ours = with_ours(base, found)
    wanted = logits_of(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path))
    assert difference(wanted, logits_of(theirs)) < 1e-5
    assert difference(wanted, logits_of(ours)) < 1e-6
    plain = with_ours(base, replace(found, init=None))
    assert difference(wanted, logits_of(plain)) > 1e-2  # the weights as they are are others


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_new_adapter_begins_as_pefts_and_changes_no_output(init: str) -> None:
    base = base_of(llama)
    new = plan("*proj", init=init, alpha=5.0, ranks={"*mlp*": 2}, rslora=True)
    ours = with_ours(base, new)
    assert difference(logits_of(base), logits_of(ours)) < 1e-5
    config = peft.LoraConfig(
        **{"target_modules": "all-linear", "r": 3, "lora_alpha": 5, "use_rslora": True},
        **{"rank_pattern": {"mlp.*": 2}, "init_lora_weights": init},
    )
    theirs = peft.get_peft_model(copy.deepcopy(base), config).base_model.model
    for name, layer in adapters.adapted(ours).items():
        other, own = theirs.get_submodule(name), layer
        wanted = other.lora_B["default"].weight @ other.lora_A["default"].weight
        found = own.lora_B.weight @ own.lora_A.weight  # type: ignore[union-attr,operator]
        assert own.lora_scale == other.scaling["default"]
        assert difference(wanted, found) < 1e-5, name
        assert difference(other.base_layer.weight, own.weight) < 1e-5, name  # type: ignore[arg-type]


def test_a_part_that_stays_in_the_weight_and_a_scale_applied_twice_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, theirs = saved_by_peft("pissa", tmp_path)
    wanted, own = logits_of(theirs), bases.with_products

    def twice(weight: Tensor, products: list[bases.Product]) -> Tensor:
        return own(weight, [replace(p, scale=-p.scale * p.scale) for p in products])

    for wrong in (lambda weight, products: weight, twice):
        monkeypatch.setattr(bases, "with_products", wrong)
        assert difference(wanted, logits_of(with_ours(base, read_peft(tmp_path)))) > 1e-3


@pytest.mark.parametrize("inits", [(True, True), ("pissa", True), (True, "pissa")])
def test_adapters_are_merged_one_after_the_other_beneath_one_that_trains(
    inits: tuple[Any, Any], tmp_path: Path
) -> None:
    base = base_of(llama)
    theirs, folders = copy.deepcopy(base), [tmp_path / "first", tmp_path / "second"]
    for folder, init, rank in zip(folders, inits, (2, 3), strict=True):
        settings = {"init_lora_weights": init, **PATTERNS, "lora_alpha": 7}
        names = ["q_proj", "down_proj"] if rank == 2 else ["q_proj", "lm_head"]
        config = peft.LoraConfig(r=rank, target_modules=names, **settings)
        made = peft.get_peft_model(copy.deepcopy(theirs), config)
        trained_(made)
        made.save_pretrained(folder, save_embedding_layers=False)
        theirs = peft.PeftModel.from_pretrained(theirs, folder).merge_and_unload()
    merge = tuple(read_peft(folder) for folder in folders)
    ours = with_ours(base, plan("q_proj", merge=merge))
    assert difference(logits_of(theirs), logits_of(ours)) < 1e-6
    assert difference(logits_of(theirs), logits_of(base)) > 1e-2
    alone = with_ours(base, plan("q_proj", merge=merge[:1]))
    assert difference(logits_of(theirs), logits_of(alone)) > 1e-3


def tied() -> Any:
    config = transformers.LlamaConfig(
        **{"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 24, "tie_word_embeddings": True},
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "changes", "line"),
    [
        (llama, {"rank": 12, "targets": ("k_proj",)}, "ranks up to the 8 that model.layers.0.self"),
        (tied, {"targets": ("lm_head",)}, "that of lm_head is model.embed_tokens.weight, too"),
    ],
)
def test_a_weight_of_which_no_part_can_be_taken_is_told(
    make: Any, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        adapters.attach_(make(), plan(**{"init": "pissa", **changes}))
    assert any(line in text for text in caught.value.lines())
