"""Texts become the tokens that transformers makes of them, and nothing stands there twice."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.prepared import Prepared
from colotrain.data.prepare.tokens import prepare
from colotrain.spec.objectives import MaskedPlan
from colotrain.spec.plan import DataPlan
from tests.tokenizers_like import PIECES, STYLES, WORDS, make, random_text

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {style: make(folder / style, style) for style in STYLES}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


def plan_of(path: Path, tokenizer: Path, **changes: Any) -> DataPlan:
    plan = DataPlan(
        source="path",
        paths=(str(path),),
        seq_len=32,
        tokenizer=str(tokenizer),
        num_workers=0,
        shuffle=False,
        validation_fraction=0.0,
        workers=1,
    )
    return replace(plan, **changes)


def records(tmp_path: Path, tokenizer: Path, rows: list[Any], **changes: Any) -> Prepared:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(plan_of(path, tokenizer, **changes))


def documents(prepared: Prepared) -> list[list[int]]:
    ends = prepared.document_ends("train")
    assert ends is not None
    return [part.tolist() for part in np.split(prepared.tokens("train"), ends[:-1])]


def targets(prepared: Prepared) -> list[list[int]]:
    ends, found = prepared.document_ends("train"), prepared.targets("train")
    assert ends is not None
    assert found is not None
    return [part.tolist() for part in np.split(found, ends[:-1])]


def texts(seed: int, count: int = 60, pieces: Sequence[str] = PIECES) -> list[str]:
    draw = random.Random(seed)
    return [random_text(draw, pieces=pieces) for _ in range(count)]


def ended(ids: list[int], separator: int | None) -> list[int]:
    return ids if separator is None or ids[-1:] == [separator] else [*ids, separator]


@pytest.mark.parametrize("style", STYLES)
def test_a_text_has_the_tokens_that_transformers_makes_of_it(
    tmp_path: Path, families: dict[str, Path], style: str
) -> None:
    auto = transformers.AutoTokenizer.from_pretrained(families[style])
    separator = auto.eos_token_id if auto.eos_token_id is not None else auto.sep_token_id
    given = texts(1)
    expected = [ended(auto(text).input_ids, separator) for text in given]
    made = records(tmp_path, families[style], [{"text": text} for text in given])
    assert documents(made) == expected
    assert made.targets("train") is None


def common_prefix(a: list[int], b: list[int]) -> int:
    """Where TRL's SFTTrainer and DPOTrainer begin the completion."""
    pairs = zip(a, b, strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("style", STYLES)
def test_a_completion_begins_where_trl_begins_it(
    tmp_path: Path, families: dict[str, Path], style: str
) -> None:
    """A token with text of prompt and completion is the completion's, and they are counted."""
    auto = transformers.AutoTokenizer.from_pretrained(families[style])
    separator = auto.eos_token_id if auto.eos_token_id is not None else auto.sep_token_id
    pieces = WORDS if style in ("bert", "t5") else PIECES  # these join what they do not know
    pairs = [*zip(texts(2, pieces=pieces), texts(3, pieces=pieces), strict=True)]
    pairs = [
        (p, c) for p, c in pairs if c.strip() and auto.unk_token_id not in auto(p + c).input_ids
    ]
    made = records(tmp_path, families[style], [{"prompt": p, "completion": c} for p, c in pairs])
    expected = [ended(auto(p + c).input_ids, separator) for p, c in pairs]
    assert documents(made) == expected
    num_spanning = 0
    for (prompt, _), ids, wanted in zip(pairs, expected, targets(made), strict=True):
        alone = auto(prompt).input_ids
        alone = alone[:-1] if alone[-1:] == [separator] else alone
        begins = common_prefix(alone, ids)
        num_spanning += begins < len(alone)
        assert wanted == [0] * wanted.index(1) + [1] * (len(ids) - wanted.index(1))
        assert wanted.index(1) == begins or begins < len(alone)
    told = [note.count for note in made.notes if "spans the beginning" in note.text]
    assert sum(told) == num_spanning
    assert num_spanning or style == "bert"
    assert len(told) <= 1


@pytest.mark.parametrize("direction", ["left", "right"])
def test_padding_that_a_tokenizer_json_asks_for_is_not_taken_for_what_it_adds_to_texts(
    tmp_path: Path, direction: str
) -> None:
    folder = make(tmp_path / "tokenizer", "bert")
    tokenizer = vocabulary.load(folder / "tokenizer.json")
    added, known = vocabulary.frame_of(tokenizer), vocabulary.special_tokens(str(folder))
    tokenizer.enable_padding(direction=direction, length=64, pad_id=tokenizer.token_to_id("[PAD]"))
    tokenizer.save(str(folder / "tokenizer.json"))
    assert vocabulary.frame_of(vocabulary.load(folder / "tokenizer.json")) == added
    assert vocabulary.special_tokens(str(folder)) == known


def test_add_bos_token_beside_a_tokenizer_json_has_no_effect_as_in_transformers(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path / "tokenizer", "gpt2", bos_token="<|endoftext|>", add_bos_token=True)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    made = records(tmp_path, folder, [{"text": "the fox"}])
    assert documents(made) == [[*auto("the fox").input_ids, auto.eos_token_id]]


def test_an_end_that_a_text_has_already_is_not_doubled(
    tmp_path: Path, families: dict[str, Path]
) -> None:
    for style in ("llama3", "t5", "prefix", "gpt2"):
        auto = transformers.AutoTokenizer.from_pretrained(families[style])
        text = f"the fox{auto.eos_token}"
        rows = [{"text": text}, {"prompt": "the ", "completion": f"fox{auto.eos_token}"}]
        for ids in documents(records(tmp_path, families[style], rows)):
            assert ids.count(auto.eos_token_id) == 1
            assert ids[-1] == auto.eos_token_id


def test_a_beginning_that_a_text_has_already_is_said(
    tmp_path: Path, families: dict[str, Path]
) -> None:
    auto = transformers.AutoTokenizer.from_pretrained(families["gemma"])
    made = records(tmp_path, families["gemma"], [{"text": "<bos>the fox"}, {"text": "the fox"}])
    assert documents(made)[0][:-1] == auto("<bos>the fox").input_ids
    assert ["stands there twice" in note.text and note.count for note in made.notes] == [1]


def test_a_chat_has_what_its_template_writes_alone(
    tmp_path: Path, families: dict[str, Path]
) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    folder = make(tmp_path / "tokenizer", "llama3", chat_template=template)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    roles = [("user", "the fox"), ("assistant", "the dog")]
    messages = [{"role": role, "content": text} for role, text in roles]
    (ids,) = documents(records(tmp_path, folder, [{"messages": messages}]))
    assert ids == list(auto.apply_chat_template(messages)["input_ids"])
    assert ids.count(auto.bos_token_id) == 1


@pytest.mark.parametrize("style", STYLES)
def test_each_file_of_a_corpus_begins_and_ends_as_a_text(
    tmp_path: Path, families: dict[str, Path], style: str
) -> None:
    auto = transformers.AutoTokenizer.from_pretrained(families[style])
    separator = auto.eos_token_id if auto.eos_token_id is not None else auto.sep_token_id
    given = texts(4, 8)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(given):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    made = prepare(plan_of(tmp_path / "texts", families[style]))
    expected = [ended(auto(text).input_ids, separator) for text in given[:-1]]
    assert documents(made) == [*expected, auto(given[-1]).input_ids]


def test_samples_of_a_masked_model_have_the_frame_and_documents_do_not(
    tmp_path: Path, families: dict[str, Path]
) -> None:
    from colotrain.data.read.loader import open_samples

    folder = families["bert"]
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    found = vocabulary.special_tokens(str(folder))
    assert found is not None
    assert (found.begin, found.end) == (auto.cls_token_id, auto.sep_token_id)
    masked = MaskedPlan(
        probability=1e-12,
        mask_id=auto.mask_token_id,
        pad_id=auto.pad_token_id,
        begin_id=found.begin,
        end_id=found.end,
        special_ids=found.special,
        vocab_size=len(auto),
    )
    given = [text for text in texts(5) if len(auto(text).input_ids) <= 32]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    samples = open_samples(plan_of(path, folder, masked=masked, packing="none"), "train")
    for index, text in enumerate(given):
        row = samples[index]
        ids = row["input_ids"][row["attention_mask"].bool()].tolist()
        assert ids == auto(text).input_ids


def test_a_directory_whose_files_transformers_reads_otherwise_is_told(tmp_path: Path) -> None:
    folder, written = make(tmp_path / "mine", "gpt2"), tmp_path / "written"
    rows = [{"text": f"{word} cafe\u0301"} for word in WORDS[:5]]

    def others(tokenizer: Path) -> list[str]:
        told = [note.text for note in records(tmp_path, tokenizer, rows).notes]
        return [text for text in told if "makes others" in text]

    assert not others(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": {"type": "NFD"}}))
    (text,) = others(folder)
    assert f"training has the tokens of {file}, and transformers' Qwen2Tokenizer makes" in text
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(written)
    (written / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert not others(written)
