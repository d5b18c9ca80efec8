"""What the token files of a corpus hold."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colotrain.data.prepare import corpora, token_files, tokens
from colotrain.data.prepare.tokens import Prepared, decode, prepare
from colotrain.data.prepare.vocabulary import check_tokenizer, vocab_size_of
from colotrain.errors import ColotrainError, ConfigError
from colotrain.spec.plan import DataPlan

WORDS = ["the", "cat", "naïve", "😀", "", "a\tb.", "12345", "\n", "\r\n", "日本語", "'ll", "<|x|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plan_of(*paths: Path | str, **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        "source": "path",
        "paths": tuple(map(str, paths)),
        "seq_len": 8,
        "tokenizer": "bytes",
        "shuffle": True,
        "validation_fraction": 0.25,
    }
    return DataPlan(**{**settings, **changes})


def random_text(length: int) -> str:
    made_up = ["".join(random.choices("abcdefg", k=5)) for _ in range(9)]
    return " ".join(random.choices(WORDS + made_up, k=length))


def write_corpus(folder: Path, count: int, length: int = 200) -> dict[str, str]:
    folder.mkdir(parents=True)
    texts = {f"{i:03}.txt": random_text(length) for i in range(count)}
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())
    return texts


def ids_of(prepared: Prepared, split: str) -> np.ndarray[Any, Any]:
    stored = np.fromfile(getattr(prepared, split), dtype=prepared.dtype)
    start = getattr(prepared, f"{split}_start")
    return stored[start : start + getattr(prepared, f"num_{split}")]


def test_bytes_are_the_documents_of_each_split_with_one_zero_between(tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "text", 40)
    (tmp_path / "text" / "empty.txt").touch()

    prepared = prepare(plan_of(tmp_path / "text"))

    assert (prepared.dtype, prepared.vocab_size, prepared.tokenizer) == ("uint16", 256, None)
    for split in ("train", "validation"):
        chosen = [
            text
            for name, text in sorted(texts.items())
            if corpora.is_validation(name, 0.25) == (split == "validation")
        ]
        expected = b"\0".join(text.encode() for text in chosen)
        assert bytes(ids_of(prepared, split).astype(np.uint8)) == expected
        num_bytes = getattr(prepared, f"num_bytes_{split}")
        assert num_bytes == sum(len(text.encode()) for text in chosen) > 0


def test_bpe_tokens_decode_to_the_text(tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "text", 12, length=2000)

    prepared = prepare(plan_of(tmp_path / "text", tokenizer="bpe-400"))

    assert prepared.vocab_size == 400 == vocab_size_of(str(prepared.tokenizer))
    for split in ("train", "validation"):
        chosen = [
            text
            for name, text in sorted(texts.items())
            if corpora.is_validation(name, 0.25) == (split == "validation")
        ]
        ids = ids_of(prepared, split)
        assert decode(prepared, ids) == tokens.vocabulary.END_OF_TEXT.join(chosen)
        assert ids.max() < 400
        assert len(ids) < getattr(prepared, f"num_bytes_{split}") / 1.5


def test_bpe_learns_from_the_train_split_alone(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    names = [f"{i}.txt" for i in range(30)]
    for name in names:
        word = "zebra" if corpora.is_validation(name, 0.25) else "horse"
        (folder / name).write_text(f"{word} " * 50)

    prepared = prepare(plan_of(folder, tokenizer="bpe-300"))

    vocabulary = json.loads(prepared.tokenizer.read_text())["model"]["vocab"]  # type: ignore[union-attr]
    assert "horse" in vocabulary
    assert "zebra" not in vocabulary


def test_bpe_of_the_same_text_is_the_same_in_every_process(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", 6, length=3000)
    plan = plan_of(tmp_path / "text", tokenizer="bpe-500")
    code = (
        "import sys; from pathlib import Path; from colotrain.data.prepare.tokens import prepare;"
        "from colotrain.spec.plan import DataPlan;"
        "made = prepare(eval(sys.argv[1]), cache=Path(sys.argv[2]));"
        "files = made.train.parent.iterdir();"
        "print(sorted((file.name, hash(file.read_bytes())) for file in files))"
    )
    outputs = set()
    for threads in ("1", "2"):
        environment = {
            "PYTHONHASHSEED": "1",
            "RAYON_NUM_THREADS": threads,
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        command = [sys.executable, "-c", code, repr(plan), str(tmp_path / threads)]
        outputs.add(subprocess.check_output(command, env=environment, text=True))

    assert len(outputs) == 1
    assert "tokenizer.json" in outputs.pop()


def test_where_a_document_is_cut_into_pieces_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "text", 9)
    plan = plan_of(tmp_path / "text")
    whole = prepare(plan, cache=tmp_path / "a")
    monkeypatch.setattr(corpora, "PIECE_BYTES", 50)
    monkeypatch.setattr(tokens, "BATCH_BYTES", 120)
    cut = prepare(plan, cache=tmp_path / "b")

    assert whole.train.read_bytes() == cut.train.read_bytes()
    assert whole.validation.read_bytes() == cut.validation.read_bytes()


def test_a_tokenizer_file_is_used_and_kept_with_the_tokens(tmp_path: Path) -> None:
    write_corpus(tmp_path / "first", 8, length=2000)
    own = prepare(plan_of(tmp_path / "first", tokenizer="bpe-350")).tokenizer
    assert own is not None
    spec = tmp_path / "tokenizer.json"
    spec.write_bytes(own.read_bytes())
    (tmp_path / "second.txt").write_text("a text that is " + random_text(50))

    prepared = prepare(plan_of(tmp_path / "second.txt", tokenizer=str(spec)))
    spec.unlink()

    assert decode(prepared, ids_of(prepared, "train")).startswith("a text that is")
    assert prepared.vocab_size == len(json.loads(own.read_text())["model"]["vocab"])


def test_truncation_and_padding_of_a_tokenizer_file_are_off(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=300)
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "text.txt").write_text("a b " * 100)

    prepared = prepare(
        plan_of(
            tmp_path / "text.txt", tokenizer=str(tmp_path / "words.json"), validation_fraction=0.0
        )
    )

    assert ids_of(prepared, "train").tolist() == [0, 1] * 100
    assert prepared.num_validation == 0


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    wanted = [random.randrange(70_000) for _ in range(99)] + [69_999]
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in wanted))

    prepared = prepare(
        plan_of(
            tmp_path / "text.txt", tokenizer=str(tmp_path / "words.json"), validation_fraction=0.0
        )
    )

    assert (prepared.dtype, prepared.vocab_size) == ("uint32", 70_000)
    assert ids_of(prepared, "train").tolist() == wanted


@pytest.mark.parametrize(("ending", "dtype"), [(".bin", "uint16"), (".u32.bin", "uint32")])
def test_a_folder_in_nanogpts_layout_is_used_in_place(
    tmp_path: Path, cache: Path, ending: str, dtype: str
) -> None:
    rng = np.random.default_rng()
    train = rng.integers(0, 50_257, 4000).astype(dtype)
    held = rng.integers(0, 50_257, 300).astype(dtype)
    train.tofile(tmp_path / f"train{ending}")
    held.tofile(tmp_path / f"val{ending}")
    (tmp_path / "input.txt").write_text("not to be read")

    prepared = prepare(plan_of(tmp_path))

    assert prepared.train == tmp_path / f"train{ending}"
    assert prepared.validation == tmp_path / f"val{ending}"
    assert (ids_of(prepared, "train") == train).all()
    assert (ids_of(prepared, "validation") == held).all()
    assert prepared.vocab_size == max(train.max(), held.max()) + 1
    assert not (cache / "tokens").exists()


def test_a_single_token_file_is_split_by_position_at_its_end(tmp_path: Path) -> None:
    ids = np.random.default_rng().integers(0, 100, random.randint(50, 500)).astype(np.uint16)
    ids.tofile(tmp_path / "mine.bin")

    prepared = prepare(plan_of(tmp_path / "mine.bin"))

    assert prepared.train == prepared.validation == tmp_path / "mine.bin"
    assert prepared.num_validation == len(ids) // 4
    both = np.concatenate([ids_of(prepared, "train"), ids_of(prepared, "validation")])
    assert (both == ids).all()


def test_token_files_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "none.bin").touch()
    for name in ("odd.bin", "none.bin"):
        with pytest.raises(ConfigError, match=r"data\.path=.*multiple of 2 bytes"):
            prepare(plan_of(tmp_path / name))


def test_the_highest_token_is_looked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.bin"
    np.arange(700, dtype=np.uint16).tofile(path)
    assert prepare(plan_of(path)).vocab_size == 700
    monkeypatch.setattr(token_files, "scan", None)
    assert prepare(plan_of(path)).vocab_size == 700


def test_files_without_text_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match="text to train on"):
        prepare(plan_of(tmp_path))


def test_progress_goes_from_reading_to_tokenizing_and_ends_at_the_total(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", 10)
    seen: list[tuple[str, int, int]] = []

    prepare(
        plan_of(tmp_path / "text", tokenizer="bpe-300"),
        progress=lambda what, done, total: seen.append((what, done, total)),
    )

    assert list(dict.fromkeys(what for what, _, _ in seen)) == [
        "reading",
        "training tokenizer",
        "tokenizing",
    ]
    for what in ("reading", "training tokenizer", "tokenizing"):
        done = [done for name, done, _ in seen if name == what]
        assert done == sorted(done)
        assert done[-1] == [total for name, _, total in seen if name == what][-1]


def test_vocabularies_are_told_without_preparing(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", 8)
    own = prepare(plan_of(tmp_path / "text", tokenizer="bpe-300")).tokenizer

    assert vocab_size_of("bytes") == 256
    assert vocab_size_of("bpe-32768") == 32768
    assert vocab_size_of(str(own)) == len(json.loads(own.read_text())["model"]["vocab"])  # type: ignore[union-attr]
    assert vocab_size_of("no-such-file.json") is None


@pytest.mark.parametrize("spec", ["bpe-", "bpe-12", "bpe-99999999", "gpt2", "", "wrong.json"])
def test_a_wrong_tokenizer_is_explained_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.json").write_text('{"model": 1}')
    (tmp_path / "text.txt").write_text("text")

    assert check_tokenizer(spec)
    with pytest.raises(ConfigError) as caught:
        prepare(plan_of("text.txt", tokenizer=spec))
    assert caught.value.problems[0].key == "data.tokenizer"


def test_good_tokenizers_have_nothing_wrong() -> None:
    assert [check_tokenizer(spec) for spec in ("bytes", "bpe-257", "bpe-50257")] == [None] * 3


def test_decoding_bytes_takes_prepared_data_or_the_name(tmp_path: Path) -> None:
    text = random_text(40)
    (tmp_path / "text.txt").write_bytes(text.encode())
    prepared = prepare(plan_of(tmp_path / "text.txt", validation_fraction=0.0))

    assert decode(prepared, ids_of(prepared, "train")) == text
    assert decode("bytes", list(text.encode())) == text
    with pytest.raises(ColotrainError, match="tokenizer is not known"):
        decode(prepared, [300])


def test_neither_torch_nor_tokenizers_is_loaded_for_bytes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 20)
    code = (
        "import sys; from colotrain.data.prepare.tokens import prepare;"
        "from colotrain.spec.plan import DataPlan;"
        "prepare(eval(sys.argv[1])); print({'torch', 'tokenizers'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, repr(plan_of(tmp_path / "text.txt"))]
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "COLOTRAIN_CACHE": str(tmp_path / "c"),
    }
    assert subprocess.check_output(command, env=environment, text=True).strip() == "set()"
