"""New tokens have the rows that `resize_token_embeddings` makes, at the mean of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.config.schema import Config, Data, Mesh, Model
from colotrain.data.prepare import vocabulary
from colotrain.errors import ConfigError, Problem
from colotrain.models import huggingface
from colotrain.models.huggingface_match import sources_of
from colotrain.models.loading import build, build_whole
from colotrain.models.stored import StoredTensors, weight_files
from colotrain.planner.vocabulary import warn_of_new_rows, with_new_tokens
from colotrain.spec.plan import ModelPlan
from colotrain.spec.survey import ParameterInfo, Survey
from tests.dist import hf
from tests.families import CAUSAL, MIXTURES, VOCAB, Family
from tests.tokenizers_like import make

transformers = pytest.importorskip("transformers")
NEW = 7


def resized(model: Any, size: int) -> Any:
    """`model` as transformers resizes it, without what it draws around the mean."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    tensors = [p for layer in layers for p in (layer.weight, getattr(layer, "bias", None))]
    means = [None if old is None else old.detach().double().mean(dim=0) for old in tensors]
    known = tensors[0].shape[0]
    model.resize_token_embeddings(size, mean_resizing=False)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    tensors = [p for layer in layers for p in (layer.weight, getattr(layer, "bias", None))]
    with torch.no_grad():
        for new, mean in zip(tensors, means, strict=True):
            if new is not None:
                new[known:] = mean.to(new.dtype)
    return model


@pytest.mark.parametrize("family", [*CAUSAL, *MIXTURES], ids=lambda family: family.name)
def test_a_larger_vocabulary_is_what_transformers_makes_of_it(
    family: Family, tmp_path: Path
) -> None:
    folder = family.make(tmp_path / "model")
    plan = ModelPlan(target="", hf=str(folder), args={"vocab_size": VOCAB + NEW})
    own = build_whole(plan, seed=0).eval()
    plain = resized(family.load(folder), VOCAB + NEW).eval()
    expected = dict(plain.named_parameters())
    assert own.config.vocab_size == VOCAB + NEW
    assert dict(own.named_parameters()).keys() == expected.keys()
    reference = dict(huggingface.build(plan, loads=True).named_parameters())  # verify's
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert torch.equal(parameter, reference[name]), name
    ids = torch.tensor([[1, VOCAB - 1, VOCAB, VOCAB + NEW - 1]])
    assert own(ids).logits.shape[-1] == VOCAB + NEW
    torch.testing.assert_close(own(ids).logits, plain(ids).logits, rtol=0, atol=1e-6)


def test_every_part_of_the_rows_is_the_same(tmp_path: Path) -> None:
    folder = hf.make_directory("llama", tmp_path / "llama")
    plan = ModelPlan(target="", hf=str(folder), args={"vocab_size": hf.VOCAB + NEW})
    source = sources_of(build(plan, seed=0)).found["model.embed_tokens.weight"]
    files = StoredTensors(weight_files(folder))
    whole = source.rows(files)
    for start in range(0, hf.VOCAB + NEW, 5):
        for count in (1, 3, hf.VOCAB + NEW - start):
            part = source.rows(files, start, count)
            assert torch.equal(part, whole[start : start + count])


def settings(hf_folder: Path, tokenizer: Path, tokens: list[str], tp: int = 1) -> Config:
    return Config(
        model=Model(hf=str(hf_folder), tokens=tokens),
        data=Data(corpus="stdlib", tokenizer=str(tokenizer)),
        mesh=Mesh(tp=tp),
    )


def test_the_vocabulary_grows_where_the_tokenizer_is_larger(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "gpt2")
    size = vocabulary.vocab_size_of(str(folder))
    assert size is not None
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))

    def planned(*tokens: str, tp: int = 1, tokenizer: Path = folder) -> Any:
        problems: list[Problem] = []
        found = with_new_tokens(settings(folder, tokenizer, [*tokens], tp), problems)
        assert not problems
        return found.model.args.get("vocab_size")

    assert planned() is None
    assert planned("<|endoftext|>") is None  # it is there already
    assert planned("<|a|>", "<|b|>") == size + 2
    assert planned("<|a|>", tp=4) == -(-(size + 1) // 4) * 4
    assert planned("<|a|>", tp=0) == size + 1  # what tp must be is said elsewhere
    larger = tmp_path / "larger"
    larger.mkdir()
    vocabulary.load_with(folder / "tokenizer.json", ["<|a|>"]).save(str(larger / "tokenizer.json"))
    assert planned(tokenizer=larger) == size + 1
    other = make(tmp_path / "other", "gemma")
    assert planned(tokenizer=other) is None  # refused as too large
    (folder / "tokenizer.json").write_text("{")
    assert planned(tokenizer=larger) is None


def test_rows_of_added_tokens_that_do_not_train_are_told(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "gpt2")
    size = vocabulary.vocab_size_of(str(folder))
    assert size is not None
    (folder / "config.json").write_text(json.dumps({"vocab_size": size + 8}))  # rows to spare

    def told(*tokens: str, frozen_by: str | None) -> list[str]:
        embedding = ParameterInfo(
            name="wte.weight", shape=(size + 8, 4), numel=4, itemsize=4, frozen_by=frozen_by
        )
        survey = Survey(
            parameters=(embedding,), matched={}, flops_per_token=0.0, vocab_size=size + 8
        )
        return [*warn_of_new_rows(settings(folder, folder, [*tokens], 1), survey)]

    assert told("<|a|>", frozen_by=None) == []
    assert told(frozen_by="*") == []
    (line,) = told("<|a|>", "<|b|>", frozen_by="*")
    assert line.startswith(
        "rows of 2 added tokens in frozen wte.weight do not train: freeze.except"
    )


def test_tokens_without_a_tokenizer_of_their_own_are_refused(tmp_path: Path) -> None:
    folder = hf.make_directory("llama", tmp_path / "llama")
    problems: list[Problem] = []
    with_new_tokens(settings(folder, Path("bytes"), ["<|a|>"]), problems)
    assert [problem.key for problem in problems] == ["model.tokens"]


def test_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = hf.make_directory("llama", tmp_path / "llama")
    plan = ModelPlan(target="", hf=str(folder), args={"vocab_size": hf.VOCAB - 1})
    with pytest.raises(ConfigError, match="embed_tokens"):
        build(plan, seed=0)
