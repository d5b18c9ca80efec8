"""Samples out of documents: windows, whole documents, one each; documents that are kept apart."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colotrain.data.read.loader import BatchLoader, open_samples, order_of
from colotrain.data.read.mixtures import BLOCK, Mixture, MixtureOrder, block_counts
from colotrain.data.read.packing import Concatenation
from colotrain.errors import ConfigError
from colotrain.models import documents
from colotrain.models.documents import (
    attend_within,
    documents_in,
)
from colotrain.models.graphs import leave_graphs
from colotrain.models.llm import LLM, positions_within
from colotrain.spec.objectives import IGNORE_INDEX
from colotrain.spec.plan import BatchPlan, DataPlan, PartPlan
from tests import varlen_on_cpu


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


def plan_of(path: Path | str, **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        "source": "path",
        "paths": (str(path),),
        "seq_len": 24,
        "tokenizer": "bytes",
        "shuffle": True,
        "validation_fraction": 0.0,
    }
    return DataPlan(**{**settings, **changes})


def write_texts(path: Path, count: int, longest: int = 30) -> list[bytes]:
    """Records; their documents as bytes, each with its separator."""
    texts = ["".join(random.choices("abcdef", k=random.randint(1, longest))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [text.encode() + b"\0" for text in texts]


def rows_of(samples: Any) -> list[dict[str, list[int]]]:
    return [
        {name: value.tolist() for name, value in samples[i].items()} for i in range(len(samples))
    ]


def test_documents_may_run_on_and_each_token_predicts_the_next(tmp_path: Path) -> None:
    stream = b"".join(write_texts(tmp_path / "a.jsonl", 40))
    rows = rows_of(open_samples(plan_of(tmp_path / "a.jsonl"), "train"))
    assert b"".join(bytes(row["input_ids"]) for row in rows) == stream[: len(rows) * 24]
    assert b"".join(bytes(row["labels"]) for row in rows) == stream[1 : len(rows) * 24 + 1]
    assert "document_ids" not in rows[0]


def test_in_an_isolated_stream_no_token_predicts_another_document(tmp_path: Path) -> None:
    documents = write_texts(tmp_path / "a.jsonl", 40)
    stream, owner = b"".join(documents), []
    for number, document in enumerate(documents):
        owner += [number] * len(document)
    rows = rows_of(open_samples(plan_of(tmp_path / "a.jsonl", isolate=True), "train"))
    for i, row in enumerate(rows):
        for j in range(24):
            at = i * 24 + j
            follows = owner[at] == owner[at + 1]
            assert row["labels"][j] == (stream[at + 1] if follows else IGNORE_INDEX)
            assert row["document_ids"][j] == owner[at] - owner[i * 24]


def test_token_files_are_told_apart_by_their_tokenizers_separator(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(9)} | {"<|endoftext|>": 9}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    ids = [1, 2, 9, 3, 9, 4, 5, 6, 9, 7, 8]
    np.array(ids, np.uint16).tofile(tmp_path / "a.bin")
    plan = plan_of(
        tmp_path / "a.bin", seq_len=5, isolate=True, tokenizer=str(tmp_path / "tokenizer.json")
    )
    rows = rows_of(open_samples(plan, "train"))
    assert [row["document_ids"] for row in rows] == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert rows[0]["labels"] == [2, 9, IGNORE_INDEX, 9, IGNORE_INDEX]
    assert rows[1]["labels"] == [5, 6, 9, IGNORE_INDEX, 8]


def test_token_files_of_no_known_tokenizer_cannot_be_told_apart(tmp_path: Path) -> None:
    np.arange(99, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"set data\.tokenizer"):
        open_samples(plan_of(tmp_path / "a.bin", isolate=True), "train")
    with pytest.raises(ConfigError, match=r"data\.packing=stream"):
        open_samples(plan_of(tmp_path / "a.bin", packing="whole"), "train")


@pytest.mark.parametrize("packing", ["whole", "none"])
def test_whole_documents_lie_side_by_side_and_the_rest_is_padding(
    tmp_path: Path, packing: str
) -> None:
    documents = write_texts(tmp_path / "a.jsonl", 60)
    plan = plan_of(tmp_path / "a.jsonl", packing=packing, isolate=True)
    rows = rows_of(open_samples(plan, "train"))
    found = []
    for row in rows:
        numbers = np.array(row["document_ids"])
        for number in range(numbers.max() + 1):
            places = np.flatnonzero(numbers == number)
            assert (np.diff(places) == 1).all()
            ids = [row["input_ids"][p] for p in places]
            assert [row["labels"][p] for p in places] == [*ids[1:], IGNORE_INDEX]
            found.append(bytes(ids))
        assert {row["labels"][p] for p in np.flatnonzero(numbers < 0)} <= {IGNORE_INDEX}
    assert found == [document[:24] for document in documents]
    if packing == "none":
        assert len(rows) == 60
    else:  # no document would have fitted into the sample before
        sizes = [sum(n >= 0 for n in row["document_ids"]) for row in rows]
        firsts = [sum(n == 0 for n in row["document_ids"]) for row in rows]
        assert all(a + b > 24 for a, b in zip(sizes, firsts[1:], strict=False))
        assert len(rows) < 60


def test_shards_are_samples_one_after_the_other() -> None:
    parts = [list("abc"), [], list("de")]
    both = Concatenation(parts)
    assert [both[i] for i in range(len(both))] == list("abcde")
    for index in (-1, 5):
        with pytest.raises(IndexError):
            both[index]


# --- attention


def small() -> LLM:
    torch.manual_seed(0)
    return LLM(
        vocab_size=50, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, d_hidden=48
    ).double()


def test_isolated_documents_have_the_logits_they_have_alone() -> None:
    model = small()
    for _ in range(5):
        lengths = [random.randint(1, 12) for _ in range(4)]
        documents = [torch.randint(0, 50, (1, n)) for n in lengths]
        numbers = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], 1)
        together = model(torch.cat(documents, 1), document_ids=numbers)
        alone = torch.cat([model(document) for document in documents], 1)
        torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


def test_without_isolation_documents_do_see_one_another() -> None:
    model = small()
    a, b = torch.randint(0, 50, (1, 6)), torch.randint(0, 50, (1, 6))
    together = model(torch.cat([a, b], 1))[:, 6:]
    assert (together - model(b)).abs().max() > 1e-4


def test_gradients_of_isolated_documents_are_those_of_the_documents_alone() -> None:
    documents = [torch.randint(0, 50, (1, n)) for n in (5, 9, 3)]
    labels = [torch.cat([d[:, 1:], torch.full((1, 1), IGNORE_INDEX)], 1) for d in documents]
    numbers = torch.cat([torch.full((1, d.shape[1]), i) for i, d in enumerate(documents)], 1)
    packed, plain = small(), small()
    packed(torch.cat(documents, 1), torch.cat(labels, 1), numbers)[0].backward()
    for document, label in zip(documents, labels, strict=True):
        plain(document, label)[0].backward()
    for one, other in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)


def test_one_document_is_as_if_nothing_had_been_said() -> None:
    model, ids = small(), torch.randint(0, 50, (2, 16))
    said = model(ids, document_ids=torch.zeros_like(ids))
    torch.testing.assert_close(said, model(ids), rtol=1e-12, atol=1e-12)


def test_positions_begin_anew() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1]])
    assert positions_within(numbers).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("at_once", [False, True])
def test_attention_by_document_is_that_under_a_mask(
    window: int | None, kv_heads: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, of samples that are cut in different places."""
    varlen_on_cpu.register()
    monkeypatch.setattr(documents, "has_kernel_for_all", lambda *_: at_once)
    for _ in range(5):
        numbers = (torch.rand(3, 40) < random.choice([0.0, 0.1, 0.5, 1.0])).cumsum(1)
        query, key, value = (
            torch.randn(3, 40, heads, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
            for heads in (4, kv_heads, kv_heads)
        )
        seen = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        slope = torch.randn(3, 4, 40, 8, dtype=torch.float64)
        wanted = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, enable_gqa=True
        )
        of_mask = torch.autograd.grad(wanted, (query, key, value), slope)
        found = attend_within(
            query, key, value, documents_in(numbers), window=window, enable_gqa=True
        )
        own = torch.autograd.grad(found, (query, key, value), slope)
        torch.testing.assert_close((found, *own), (wanted, *of_mask), rtol=1e-10, atol=1e-10)


def test_nothing_as_large_as_all_pairs_of_tokens_is_made() -> None:
    """Under a mask of 512 x 512 pairs one number of it would be made for each."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(found):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.untyped_storage().nbytes() // 8)
            return found

    model, ids = small(), torch.randint(0, 50, (1, 512))
    with Largest() as largest:
        model(ids, ids, (ids == 0).cumsum(1))[0].backward()
    assert 512 * 50 <= largest.numel < 512 * 512 / 2


@pytest.mark.slow
def test_a_compiled_block_keeps_documents_apart_and_is_compiled_once() -> None:
    model, plain = small(), small()
    leave_graphs()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    frames, compiled = torch._dynamo.utils.counters["frames"], 0
    for number in range(12):
        ids = torch.randint(0, 50, (2, 16))
        numbers = (torch.rand(2, 16) < 0.3).cumsum(1)
        torch.testing.assert_close(model(ids, None, numbers), plain(ids, None, numbers))
        compiled = frames["ok"] if number == 0 else compiled
    assert frames["ok"] == compiled > 0


# --- mixtures


def mixture_order(sizes: list[int], weights: list[float], **changes: Any) -> MixtureOrder:
    from colotrain.data.read.loader import SampleOrder

    settings = {"seed": 3, "shuffle": True, "order": SampleOrder, **changes}
    return MixtureOrder(sizes, weights, **settings)


def test_counts_of_a_block_are_the_weights() -> None:
    for _ in range(50):
        weights = [random.random() + 1e-6 for _ in range(random.randint(1, 9))]
        counts = block_counts(weights)
        assert sum(counts) == BLOCK
        assert min(counts) >= 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - max(1, BLOCK * weight / sum(weights))) <= len(weights)


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_are_exact_over_a_block_and_near_everywhere(shuffle: bool) -> None:
    sizes, weights = [700, 50, 9000], [5.0, 3.0, 2.0]
    order = mixture_order(sizes, weights, shuffle=shuffle)
    bounds = np.cumsum([0, *sizes])
    ids = np.array(order.samples_at(range(2 * BLOCK)))
    parts = np.searchsorted(bounds, ids, side="right") - 1
    for block in (parts[:BLOCK], parts[BLOCK:]):
        assert np.bincount(block).tolist() == [5000, 3000, 2000]
    for at in range(0, BLOCK, 1000):
        share = np.bincount(parts[at : at + 1000], minlength=3) / 1000
        assert np.abs(share - [0.5, 0.3, 0.2]).max() < (0.1 if shuffle else 0.003)
    for part, size in enumerate(sizes):  # each part's samples once per epoch of its own
        own = ids[parts == part] - bounds[part]
        for at in range(0, len(own) - size + 1, size):
            assert sorted(own[at : at + size]) == list(range(size))


def test_a_mixture_is_the_same_from_wherever_it_is_entered() -> None:
    sizes, weights = [40, 60, 7], [1.0, 2.0, 0.1]
    whole = mixture_order(sizes, weights).samples_at(range(BLOCK - 50, BLOCK + 50))
    for offset in random.sample(range(100), 10):
        fresh = mixture_order(sizes, weights)
        assert fresh.sample_at(BLOCK - 50 + offset) == whole[offset]


def test_the_order_of_a_mixture_never_changes_between_versions() -> None:
    # As for a single source, a run is resumed with the order it was started with.
    found = mixture_order([5, 5], [1.0, 3.0], seed=42).samples_at(range(12))
    assert found == [8, 9, 7, 6, 5, 7, 6, 0, 5, 9, 8, 6]


def test_a_mixture_of_formats_is_one_dataset(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "a.jsonl", 30)
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "b.bin")
    plan = plan_of(
        "",
        source="mixture",
        paths=(),
        seq_len=8,
        mixture=(
            PartPlan(paths=(str(tmp_path / "a.jsonl"),), weight=1.0),
            PartPlan(paths=(str(tmp_path / "b.bin"),), weight=3.0),
        ),
    )
    samples = open_samples(plan, "train")
    assert isinstance(samples, Mixture)
    first = (len(b"".join(texts)) - 1) // 8
    assert len(samples) == first + 499 // 8
    assert samples[first]["input_ids"].tolist() == list(range(8))
    order = order_of(samples, seed=1, shuffle=True)
    share = sum(i >= first for i in order.samples_at(range(BLOCK))) / BLOCK
    assert share == 0.75
    batch = BatchPlan(global_batch=8, micro_batch=2, accumulation_steps=2, data_parallel=2)
    loaders = [BatchLoader(samples, order, batch, rank) for rank in (0, 1)]
    ids = [i for micro in range(2) for loader in loaders for i in loader.ids(5, micro)]
    assert ids == order.samples_at(range(40, 48))
    assert len(open_samples(plan, "validation")) == 0


@pytest.mark.parametrize("weights", [[1, 1e-9], [1e-9, 1, 1, 1e-7], [1e6, *[1e-3] * 40]])
def test_the_smallest_weight_has_a_position(weights: list[float]) -> None:
    counts = block_counts(weights)
    assert sum(counts) == BLOCK
    assert min(counts) >= 1
