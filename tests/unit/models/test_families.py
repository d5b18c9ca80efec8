"""Architectures of transformers: their task, their loss without all logits, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colotrain.engine.gradients.accumulation import weighted_loss
from colotrain.errors import ConfigError, UsageError
from colotrain.models import loss
from colotrain.models.huggingface_loss import holds_all_logits, logits_of
from colotrain.models.loading import build, build_whole
from colotrain.models.loss import Logits
from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import AdapterPlan, ModelPlan
from tests import families
from tests.families import CAUSAL, FAMILIES, MIXTURES, OTHERS, Family

pytest.importorskip("transformers")

TEXT = ("data.corpus=stdlib", "data.seq_len=16", "train.micro_batch=2", "train.max_steps=1")
Gradients = dict[str, Tensor]


def title(family: Family) -> str:
    return f"{family.name} {family.architecture}".replace(" ", "-")


def plan(folder: Path, **settings: Any) -> ModelPlan:
    return ModelPlan(target="", hf=str(folder), **settings)


def batch_of(family: Family, count: int = 4) -> dict[str, Tensor]:
    samples = getattr(families, family.data)(count)
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def gradients(model: Any) -> Gradients:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Gradients, wanted: Gradients, tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max().item() <= tolerance * max(largest, 1.0), name


@pytest.mark.parametrize("family", CAUSAL, ids=title)
def test_gradients_are_transformers_own_and_no_tensor_is_as_large_as_the_logits(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 5 * families.VOCAB)
    folder = family.make(tmp_path)
    tokens = torch.randint(families.VOCAB, (4, 33), generator=families.generator())
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    theirs = family.load(folder).double().train()
    wanted = theirs(input_ids=tokens, labels=labels).loss  # it shifts labels itself
    wanted.backward()
    model = build_whole(plan(folder), seed=0).double().train()
    with Largest() as largest:
        total, count = model(input_ids=tokens[:, :-1], labels=labels[:, 1:])
        (total / count).backward()
    assert not holds_all_logits(model)
    assert (total / count).item() == pytest.approx(wanted.item(), rel=1e-6)
    assert_same(gradients(model), gradients(theirs))
    assert largest.numel < 4 * 32 * families.VOCAB
    with torch.no_grad():
        theirs.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(tokens).logits, theirs(tokens).logits)


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that operations make."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Llama", Logits()),
        ("Gemma 2", Logits(cap=3.0)),
        ("Granite", Logits(scale=0.25)),
        ("Cohere", Logits(scale=0.25)),
    ],
)
def test_what_a_model_does_with_the_products_of_its_head_is_known(
    name: str, shape: Logits, tmp_path: Path
) -> None:
    family = next(family for family in CAUSAL if family.name == name)
    model = family.load(family.make(tmp_path))
    assert logits_of(model) == shape


@pytest.mark.parametrize("change", ["squared", "in place", "of the whole"])
def test_a_head_that_does_something_else_keeps_all_logits(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    own = transformers.LlamaForCausalLM.forward

    def forward(self: Any, **batch: Any) -> Any:
        output = own(self, **batch)
        if change == "squared":
            output.logits = output.logits * output.logits.abs()
        elif change == "in place":
            output.logits.mul_(1.0)
            output.logits.add_(0.5)
        else:
            output.logits = output.logits.log_softmax(-1)
        return output

    family = CAUSAL[0]
    folder = family.make(tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    model = build_whole(plan(folder), seed=0)
    assert holds_all_logits(model)
    batch = batch_of(family)
    total, _ = model(**batch)
    logits = model(input_ids=batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )
    assert total.item() == pytest.approx(expected.item())
    made = plan_from([f"model.hf={folder}", *TEXT])
    assert any("logits of a whole micro-batch" in warning for warning in made.warnings)


def test_an_adapter_on_the_head_is_part_of_the_loss(tmp_path: Path) -> None:
    family = CAUSAL[0]
    adapter = AdapterPlan(rank=2, alpha=4.0, targets=("lm_head",))
    model = build_whole(plan(family.make(tmp_path), adapter=adapter), seed=0)
    torch.nn.init.normal_(model.lm_head.lora_B.weight)  # type: ignore[union-attr, arg-type]
    batch = batch_of(family)
    total, _ = model(**batch)
    logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    assert total.item() == pytest.approx(expected.item())
    total.backward()
    assert model.lm_head.lora_A.weight.grad is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("family", OTHERS, ids=title)
def test_the_loss_of_another_task_is_transformers_own(family: Family, tmp_path: Path) -> None:
    folder, batch = family.make(tmp_path), batch_of(family)
    theirs, model = family.load(folder).train(), build_whole(plan(folder), seed=0).train()
    wanted = theirs(**batch).loss
    wanted.backward()
    total, count = weighted_loss(model, batch)
    (total / count).backward()
    assert count == (batch["labels"] != -100).sum()
    assert total.item() / count.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert_same(gradients(model), gradients(theirs))


@pytest.mark.parametrize("family", OTHERS, ids=title)
def test_text_is_refused_for_a_model_of_another_task(family: Family, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from([f"model.hf={family.make(tmp_path)}", *TEXT])
    (line,) = caught.value.lines()
    assert line.startswith(f"error: model.hf={tmp_path}: expected a causal language model")
    assert "set data.target to a dataset of yours whose samples have " in line
    assert ("pixel_values" if family.data == "images" else "input_ids") in line


@pytest.mark.parametrize(
    ("architecture", "data", "says"),
    [
        ("BertForSequenceClassification", "causal", "the labels of a sample are (12,)"),
        ("BertForTokenClassification", "classes", "the labels of a sample are a number"),
        ("ViTForImageClassification", "causal", "samples have no pixel_values"),
    ],
)
def test_samples_of_another_task_are_refused_before_the_first_step(
    architecture: str, data: str, says: str, tmp_path: Path
) -> None:
    family = next(family for family in FAMILIES if family.architecture == architecture)
    with pytest.raises(UsageError, match=f"{architecture} is for .*") as caught:
        plan_from(
            [
                *(f"model.hf={family.make(tmp_path)}", f"data.target=tests.families:{data}"),
                *("train.global_batch=8", "train.micro_batch=2", "train.max_steps=1"),
            ]
        )
    assert says in caught.value.problem
    assert "let data.target return samples with" in caught.value.fix


def test_a_classifier_that_knows_no_padding_is_refused(tmp_path: Path) -> None:
    folder = by_architecture("LlamaForSequenceClassification").make(tmp_path)
    words = f"model.hf={folder}", "model.args.pad_token_id=null", "train.max_steps=1"
    data = "data.target=tests.families:classes", "train.global_batch=8", "train.micro_batch=2"
    with pytest.raises(UsageError) as caught:
        plan_from([*words, *data])
    assert caught.value.fix == "set model.args.pad_token_id"


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ("BertModel", "an architecture with a loss (BertModel has no head)"),
        ("BertLMHeadModel", "a decoder (BertLMHeadModel sees all tokens: is_decoder is false)"),
    ],
)
def test_an_architecture_that_cannot_learn_is_refused(
    architecture: str, says: str, tmp_path: Path
) -> None:
    folder = Family("BERT", architecture, "bert", families.BERT).make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build(plan(folder), seed=0)
    assert says in caught.value.lines()[0]


def by_architecture(name: str) -> Family:
    return next(family for family in FAMILIES if family.architecture == name)


@pytest.mark.parametrize("family", MIXTURES, ids=title)
@pytest.mark.parametrize("balanced", [False, True])
def test_experts_learn_as_in_transformers_with_the_auxiliary_loss_of_each_sample(
    family: Family, balanced: bool, tmp_path: Path
) -> None:
    folder = family.make(tmp_path)
    args = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if balanced else {}
    theirs = family.load(folder).train()
    for name, value in args.items():
        setattr(theirs.config, name, value)
    theirs.router_aux_loss_coef = theirs.config.router_aux_loss_coef
    model = build_whole(plan(folder, args=args), seed=0).double().train()  # builds for float64
    theirs.double()
    batch = batch_of(family)
    batch["labels"][1, :7] = -100
    total, count = model(**batch)
    (total / count).backward()
    whole = torch.zeros((), dtype=torch.float64)
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        own = theirs(input_ids=ids[None], labels=labels[None], shift_labels=labels[None]).loss
        whole = whole + own * (labels != -100).sum()
    (whole / count).backward()
    assert total.item() == pytest.approx(whole.item(), rel=1e-6)
    assert_same(gradients(model), gradients(theirs))
    routers = [name for name in gradients(model) if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3
    plain = build_whole(plan(folder), seed=0).double()
    assert (plain(**batch)[0].item() != pytest.approx(total.item(), rel=1e-3)) == balanced


def test_the_auxiliary_loss_is_told_and_no_bar_to_the_estimate(tmp_path: Path) -> None:
    family = by_architecture("MixtralForCausalLM")
    args = (f"model.hf={family.make(tmp_path)}", "model.args.output_router_logits=true")
    made = plan_from([*args, *TEXT])
    assert any("auxiliary loss is computed for each sample" in text for text in made.warnings)
    assert made.memory.activations > 0
    assert not any("logits of a whole" in text for text in made.warnings)


CONVERTED = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GPTNeoXForCausalLM", "BertForMaskedLM")


@pytest.mark.parametrize("name", [*CONVERTED, "ViTForImageClassification"])
def test_rows_of_a_converted_directory_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colotrain.models.huggingface_match import sources_of
    from colotrain.models.stored import StoredTensors, weight_files

    family = by_architecture(name)
    folder = family.make(tmp_path)
    files = StoredTensors(weight_files(folder))
    sources = sources_of(build(plan(folder), seed=0)).found
    read: list[str] = []
    rows = StoredTensors.rows
    monkeypatch.setattr(
        StoredTensors, "rows", lambda self, n, *a: (read.append(n), rows(self, n, *a))[1]
    )
    for parameter, wanted in family.load(folder).named_parameters():
        source = sources[parameter]
        assert torch.equal(source.rows(files), wanted), parameter
        read.clear()
        assert torch.equal(source.rows(files, 1, 2), wanted[1:3]), parameter
        if "experts" in parameter:  # of experts 1 and 2, and of no other
            assert read
            assert all(f"experts.{n}." in "|".join(read) for n in (1, 2))
            assert not any(f"experts.{n}." in "|".join(read) for n in (0, 3))


@pytest.mark.parametrize("name", [*CONVERTED, "ViTForImageClassification"])
def test_a_model_is_exported_in_the_layout_of_its_directory(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from colotrain.export.stream import Entry
    from colotrain.export.write import as_in_files

    folder = by_architecture(name).make(tmp_path)
    model = build_whole(plan(folder), seed=0)
    entries = [
        Entry(name=n, shape=tuple(p.shape), dtype=p.dtype, read=p.detach)
        for n, p in model.named_parameters()
    ]
    found = as_in_files(entries, model)
    wanted = load_file(folder / "model.safetensors")
    assert {entry.name for entry in found} == wanted.keys()
    for entry in found:
        assert entry.shape == wanted[entry.name].shape
        assert torch.equal(entry.read(), wanted[entry.name]), entry.name


def test_more_layers_than_the_config_says_are_found_under_other_names(tmp_path: Path) -> None:
    folder = by_architecture("ViTForImageClassification").make(tmp_path)
    with pytest.raises(ConfigError, match=r"2 layers of vit\.layers.*have vit\.layers\.2\."):
        build(plan(folder, args={"num_hidden_layers": 2}), seed=0)


def test_adapters_are_put_on_subclasses_that_compute_the_same(tmp_path: Path) -> None:
    folder = by_architecture("FalconForCausalLM").make(tmp_path)
    adapter = AdapterPlan(rank=2, alpha=4.0, targets=("query_key_value", "*dense*"))
    model = build_whole(plan(folder, adapter=adapter), seed=0)
    layer: Any = model.get_submodule("transformer.h.0.self_attention.query_key_value")
    assert type(layer) is not torch.nn.Linear
    torch.nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(3, 32)
    product = layer.lora_B.weight @ layer.lora_A.weight
    torch.testing.assert_close(layer(x), x @ (layer.weight + 2.0 * product).T)


def test_a_clone_without_git_lfs_is_told(tmp_path: Path) -> None:
    folder = CAUSAL[0].make(tmp_path)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid 1")
    with pytest.raises(
        ConfigError, match=r"a pointer of Git LFS, without the weights.*git lfs pull"
    ):
        build(plan(folder), seed=0)


def test_a_plan_has_no_room_for_all_logits(tmp_path: Path) -> None:
    words = 50_000
    family = Family("Llama", "LlamaForCausalLM", "llama", {**families.GROUPED, "vocab_size": words})
    batch = ("data.corpus=stdlib", "data.seq_len=64", "train.micro_batch=16", "train.max_steps=1")
    made = plan_from([f"model.hf={family.make(tmp_path)}", *batch])
    logits_bytes = 64 * 16 * words * 4
    assert 0 < made.memory.activations < logits_bytes / 2
