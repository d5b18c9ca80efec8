"""Hugging Face directories: what is read, what is refused, and never any code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from colotrain.config.schema import Config, Data, Model
from colotrain.engine.sharding.grouping import find_groups
from colotrain.errors import ConfigError
from colotrain.models.huggingface import fingerprint
from colotrain.models.loading import build, build_whole
from colotrain.planner.resolve import _with_tokenizer
from colotrain.planner.traced.survey import survey
from colotrain.spec.plan import FreezePlan, ModelPlan
from tests.dist import hf

transformers = pytest.importorskip("transformers")
NO_FREEZE = FreezePlan(patterns=(), except_=(), unfreeze={})
BATCH = {name: torch.randint(hf.VOCAB, (2, hf.SEQ)) for name in ("input_ids", "labels")}


@pytest.fixture(params=hf.KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return hf.make_directory(request.param, tmp_path / request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return hf.make_directory("llama", tmp_path / "llama")


def plan(folder: Path, **args: Any) -> ModelPlan:
    return ModelPlan(target="", hf=str(folder), args=args)


def test_a_model_has_no_storage_until_it_is_filled_and_is_then_transformers_own(
    folder: Path,
) -> None:
    assert all(p.is_meta for p in build(plan(folder), seed=0).parameters())
    own = build_whole(plan(folder), seed=0).eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(own(BATCH["input_ids"]).logits, plain(BATCH["input_ids"]).logits)
    names = [n for n, _ in plain.named_parameters(remove_duplicate=False)]
    assert [n for n, _ in own.named_parameters(remove_duplicate=False)] == names


def test_the_loss_is_of_labels_that_are_shifted_already(folder: Path) -> None:
    model = build_whole(plan(folder), seed=0).eval()
    labels = BATCH["labels"].clone()
    labels[0, :5] = -100
    loss, count = model(input_ids=BATCH["input_ids"], labels=labels)
    logits = model(input_ids=BATCH["input_ids"]).logits
    expected = [-logits[i, t].log_softmax(0)[labels[i, t]] for i, t in (labels >= 0).nonzero()]
    assert count == len(expected) == 2 * hf.SEQ - 5
    assert loss.item() == pytest.approx(sum(expected).item(), rel=1e-5)


def test_documents_of_one_sample_can_be_kept_apart(folder: Path) -> None:
    model = build_whole(plan(folder), seed=0).eval()
    ids = BATCH["input_ids"]
    documents = torch.tensor([[0] * 5 + [1] * (hf.SEQ - 5), [0] * hf.SEQ])
    together = model(input_ids=ids, document_ids=documents).logits
    first, second = (model(input_ids=part).logits for part in (ids[:1, :5], ids[:1, 5:]))
    assert torch.allclose(together[:1], torch.cat((first, second), dim=1), atol=1e-5)
    assert torch.allclose(together[1:], model(input_ids=ids[1:]).logits, atol=1e-5)


def test_a_forward_needs_no_values(folder: Path) -> None:
    """Memory and time are estimated from a forward and backward on the meta device."""
    model = build(plan(folder), seed=0).to("meta")
    loss, _ = model(**{name: tensor.to("meta") for name, tensor in BATCH.items()})
    loss.backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


def test_every_decoder_block_is_a_group(folder: Path) -> None:
    groups = find_groups(build(plan(folder), seed=0), chunk_bytes=None, batch=BATCH)
    assert len(groups) == 3


def test_weights_are_float32_unless_said(llama: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(
        llama
    )
    assert json.loads((llama / "config.json").read_text())["dtype"] == "bfloat16"
    model = build_whole(plan(llama), seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    half = build_whole(plan(llama, dtype="bfloat16"), seed=0)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in half.buffers()} == {torch.float32}  # rotary frequencies


def test_config_json_can_be_changed_and_unknown_settings_are_refused(llama: Path) -> None:
    assert build(plan(llama, attention_dropout=0.5), seed=0).config.attention_dropout == 0.5
    with pytest.raises(ConfigError, match=r"model\.args\.n_layer=3: expected a setting of this"):
        build(plan(llama, n_layer=3), seed=0)


def test_shards_with_an_index_are_read(tmp_path: Path, llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    own = build_whole(plan(tmp_path / "sharded"), seed=0)
    for (name, p), (_, q) in zip(own.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_base_model_without_its_prefix_is_read(tmp_path: Path) -> None:
    folder = hf.make_directory("gpt2", tmp_path / "gpt2")
    weights = load_file(folder / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    build_whole(plan(folder), seed=0)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        build(plan(folder), seed=0)
    (line,) = caught.value.lines()
    return line


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_pickles_are_refused(llama: Path) -> None:
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    assert "its weights are pickles (pytorch_model.bin)" in refusal(llama)


def test_code_in_a_directory_is_never_run(llama: Path) -> None:
    (llama / "modeling_mine.py").write_text("open('ran', 'w')\nclass Mine: pass\n")
    (llama / "configuration_mine.py").write_text("open('ran', 'w')\nclass Config: pass\n")
    names = {
        "AutoConfig": "configuration_mine.Config",
        "AutoModelForCausalLM": "modeling_mine.Mine",
    }
    change(llama, auto_map=names, model_type="mine", architectures=["Mine"])
    assert "this directory brings code of its own" in refusal(llama)
    change(llama, model_type="llama")
    assert "this directory brings code of its own" in refusal(llama)
    assert not (llama / "ran").exists()
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "a model directory with a config.json"),
        (lambda f: (f / "config.json").write_text("{"), "a config.json that transformers reads"),
        (lambda f: change(f, vocab_size=7), "model.embed_tokens.weight is (96, 24), not (7, 24)"),
        (lambda f: change(f, num_hidden_layers=4), "weights of its config.json (model.layers.3."),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x08" * 20), "not a safetensors file"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "../../other.safetensors"}}'
            ),
            "other.safetensors is missing (1 of 1 files)",
        ),
    ],
)
def test_a_damaged_directory_is_one_line(llama: Path, damage: Any, words: str) -> None:
    damage(llama)
    line = refusal(llama)
    assert line.startswith(f"error: model.hf={llama}")
    assert words in line


def test_the_fingerprint_changes_with_the_model(llama: Path) -> None:
    look = fingerprint.__wrapped__
    before = look(llama)
    (llama / "README.md").write_text("notes")
    assert look(llama) == before
    change(llama, rms_norm_eps=1e-3)
    assert look(llama) != before


def test_the_tokenizer_beside_a_model_is_the_default(llama: Path) -> None:
    def chosen(tokenizer: str = "auto", hf: str | None = str(llama)) -> str:
        settings = Config(model=Model(hf=hf), data=Data(tokenizer=tokenizer))
        return _with_tokenizer(settings).data.tokenizer

    assert chosen() == "bytes"
    (llama / "tokenizer.json").write_text("{}")
    assert chosen() == str(llama)
    assert chosen("bpe-300") == "bpe-300"
    assert chosen(hf=None) == "bytes"


def test_the_fingerprint_tells_bases_of_one_architecture_apart(llama: Path) -> None:
    before = fingerprint(llama)
    weights = load_file(llama / "model.safetensors")
    name = next(n for n in weights if n.endswith("layers.1.mlp.up_proj.weight"))
    weights[name] += 1.0
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    fingerprint.cache_clear()
    assert fingerprint(llama) != before


def test_weights_of_more_layers_than_the_config_says_are_refused(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    config["num_hidden_layers"] = 1
    config.pop("layer_types", None)
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"1 layers of model\.layers.*have model\.layers\.1\."):
        build(plan(llama), seed=0)


@pytest.mark.parametrize(("kind", "learned"), [("llama", False), ("gpt2", True)])
def test_the_model_tells_how_long_samples_may_be(kind: str, learned: bool, tmp_path: Path) -> None:
    found = survey(plan(hf.make_directory(kind, tmp_path / kind)), NO_FREEZE, 12)
    assert (found.num_positions, found.learned_positions) == (32, learned)
