"""Samples, their order, and the micro-batches of every rank."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from colotrain import generators
from colotrain.data.prepare.tokens import Prepared, prepare
from colotrain.data.read.loader import (
    BatchLoader,
    SampleOrder,
    TokenSamples,
    count_evaluated,
    open_samples,
    order_of,
)
from colotrain.data.read.mixtures import Mixture
from colotrain.data.read.samples import StreamSamples
from colotrain.errors import ConfigError
from colotrain.models.outputs import TargetRule
from colotrain.spec.plan import BatchPlan, DataPlan


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


def plan_of(path: Path | str = "", **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        "source": "path",
        "paths": (str(path),),
        "seq_len": 8,
        "tokenizer": "bytes",
        "shuffle": True,
        "validation_fraction": 0.25,
    }
    return DataPlan(**{**settings, **changes})


def token_file(tmp_path: Path, count: int, fraction: float = 0.25) -> tuple[Prepared, Any]:
    ids = np.random.default_rng().integers(0, 60_000, count).astype(np.uint16)
    ids.tofile(tmp_path / "tokens.bin")
    return prepare(plan_of(tmp_path / "tokens.bin", validation_fraction=fraction)), ids


def batch_of(world_size: int, micro_batch: int, steps: int) -> BatchPlan:
    return BatchPlan(
        global_batch=world_size * micro_batch * steps,
        micro_batch=micro_batch,
        accumulation_steps=steps,
        data_parallel=world_size,
    )


def numbers(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.tensor([i, -i])} for i in range(count)]


def ledger(samples: Any, order: SampleOrder, batch: BatchPlan, step: int) -> list[int]:
    """The samples of a step, by rank and micro-batch."""
    loaders = [BatchLoader(samples, order, batch, rank) for rank in range(batch.data_parallel)]
    return [
        index
        for micro, loader in itertools.product(range(batch.accumulation_steps), loaders)
        for index in loader.ids(step, micro)
    ]


def test_windows_lie_side_by_side_and_labels_are_the_next_tokens(tmp_path: Path) -> None:
    prepared, ids = token_file(tmp_path, random.randint(200, 1000))
    samples = TokenSamples(prepared, "train", 16)

    assert len(samples) == (prepared.num_train - 1) // 16
    for index in random.sample(range(len(samples)), 8):
        window = [int(number) for number in ids[index * 16 : index * 16 + 17]]
        assert samples[index]["input_ids"].tolist() == window[:-1]
        assert samples[index]["labels"].tolist() == window[1:]
        assert {value.dtype for value in samples[index].values()} == {torch.int64}


def test_validation_windows_begin_where_validation_begins(tmp_path: Path) -> None:
    prepared, ids = token_file(tmp_path, 1000)
    first = TokenSamples(prepared, "validation", 16)[0]
    assert first["input_ids"].tolist() == ids[750:766].tolist()


def test_the_last_window_has_all_its_labels(tmp_path: Path) -> None:
    prepared, _ = token_file(tmp_path, 100)
    windows = list(TokenSamples(prepared, "train", 15))  # type: ignore[call-overload]
    assert [len(window["labels"]) for window in windows] == [15] * 4


def test_a_split_with_nothing_in_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    plan = plan_of(tmp_path / "text.txt", validation_fraction=0.0)
    assert len(open_samples(plan, "validation")) == 0
    assert len(open_samples(plan, "train")) == 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_exactly_once_per_epoch(shuffle: bool) -> None:
    count = random.randint(1, 500)
    order = SampleOrder(count, random.randint(-5, 2**40), shuffle)
    for epoch in range(4):
        seen = order.samples_at(range(epoch * count, (epoch + 1) * count))
        assert sorted(seen) == list(range(count))
        assert shuffle or seen == sorted(seen)


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    orders = [SampleOrder(200, seed, True) for seed in (0, 1, 2)]
    seen = {
        tuple(order.samples_at(range(epoch * 200, (epoch + 1) * 200)))
        for order in orders
        for epoch in range(5)
    }
    assert len(seen) == 15


def test_an_order_is_the_same_from_wherever_it_is_entered() -> None:
    count, seed = random.randint(5, 100), random.randint(0, 10**6)
    whole = SampleOrder(count, seed, True).samples_at(range(5 * count))
    for position in random.sample(range(5 * count), 10):
        assert SampleOrder(count, seed, True).sample_at(position) == whole[position]


def test_an_order_never_changes_between_versions() -> None:
    # A run is resumed with the order it was started with: this list is a promise.
    assert SampleOrder(10, 42, True).samples_at(range(20)) == [
        *(7, 1, 6, 4, 3, 5, 9, 0, 2, 8),
        *(4, 9, 5, 3, 0, 2, 7, 1, 6, 8),
    ]


def test_shuffling_has_no_favourites() -> None:
    firsts = Counter(SampleOrder(4, seed, True).sample_at(0) for seed in range(4000))
    assert all(850 < firsts[index] < 1150 for index in range(4))


def test_the_samples_of_a_step_are_the_same_for_every_split_of_the_global_batch() -> None:
    samples = numbers(random.randint(10, 300))
    order = SampleOrder(len(samples), random.randint(0, 10**6), True)
    for step in random.sample(range(40), 8):
        expected = order.samples_at(range(step * 32, (step + 1) * 32))
        for world_size, micro_batch in itertools.product((1, 2, 4, 8), (1, 2, 4)):
            batch = batch_of(world_size, micro_batch, 32 // (world_size * micro_batch))
            assert ledger(samples, order, batch, step) == expected


def test_steps_use_each_sample_once_until_the_epoch_ends() -> None:
    samples, batch = numbers(96), batch_of(4, 2, 3)
    order = SampleOrder(96, 3, True)
    seen = [index for step in range(4) for index in ledger(samples, order, batch, step)]
    assert sorted(seen) == list(range(96))


def test_a_micro_batch_is_its_samples_stacked_in_order() -> None:
    samples = numbers(50)
    loader = BatchLoader(samples, SampleOrder(50, 1, True), batch_of(2, 4, 2), rank=1)
    found = loader.micro_batch(3, 1)["x"]
    assert found.tolist() == [[index, -index] for index in loader.ids(3, 1)]


def test_a_dataset_smaller_than_a_micro_batch_goes_round() -> None:
    loader = BatchLoader(numbers(3), SampleOrder(3, 1, False), batch_of(1, 8, 1), rank=0)
    assert loader.micro_batch(0, 0)["x"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_arrays_and_numbers_become_tensors() -> None:
    samples = [{"x": np.arange(3), "y": i, "z": [1.5]} for i in range(4)]
    loader = BatchLoader(samples, SampleOrder(4, 1, False), batch_of(1, 4, 1), rank=0)
    found = loader.micro_batch(0, 0)
    assert found["y"].tolist() == [0, 1, 2, 3]
    assert found["x"].shape == (4, 3)
    assert found["z"].dtype == torch.float32


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ({"x": torch.zeros(5)}, r"sample 1 is x\[5\], sample 0 is x\[2\]"),
        ({"y": torch.zeros(2)}, r"sample 1 is y\[2\]"),
        ({"x": "text"}, "x of sample 1 is str: "),
        (torch.zeros(2), "sample 1 is Tensor"),
        ({}, "sample 1 is dict"),
    ],
)
def test_samples_that_do_not_stack_are_named(second: Any, told: str) -> None:
    samples = [{"x": torch.zeros(2)}, second]
    loader = BatchLoader(samples, SampleOrder(2, 1, False), batch_of(1, 2, 1), rank=0)
    with pytest.raises(ConfigError, match=told):
        loader.micro_batch(0, 0)


@pytest.mark.parametrize("samples", [[], Mixture([[], []], [3, 1])])
def test_no_sample_at_all_is_an_error_before_training(samples: Any) -> None:
    with pytest.raises(ConfigError, match="at least one sample"):
        order_of(samples, seed=1, shuffle=True)
    with pytest.raises(ConfigError, match="at least one sample"):
        BatchLoader(samples, SampleOrder(0, 1, True), batch_of(1, 1, 1), rank=0)


def test_targets_are_the_labels_that_count() -> None:
    labels = torch.randint(0, 9, (4, 50))
    labels[torch.rand(4, 50) < 0.3] = -100
    expected = sum(number != -100 for row in labels.tolist() for number in row)
    assert TargetRule().count({"labels": labels}) == expected
    assert TargetRule().count({"x": labels}) is None


# --- the user's own dataset


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder."""
    name = f"own_{random.getrandbits(64):x}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


OWN = """
import random

import torch
from torch.utils.data import IterableDataset

def rows(count, start=0):
    return [{"x": torch.tensor(i)} for i in range(start, start + count)]

def splits(*, split):
    return rows(7) if split == "train" else rows(2, start=100)

class Stream(IterableDataset):
    starts = 0
    def __init__(self, count=None, split="train"):
        self.count, self.at = count, 0
    def __iter__(self):
        Stream.starts += 1
        while self.count is None or self.at < self.count:
            self.at += 1
            yield {"x": torch.tensor(self.at - 1)}
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

class Itself:
    # its own iterator, or one that goes on where others were
    def __init__(self, count=9, shared=False):
        self.shared = shared
        self.numbers = iter([random.randrange(10**6) for _ in range(count)])
    def __iter__(self):
        return self.many() if self.shared else self
    def __next__(self):
        return {"x": torch.tensor(next(self.numbers))}
    def many(self):
        yield from ({"x": torch.tensor(number)} for number in self.numbers)
    def state_dict(self):
        return {}

def unsplit_stream(count=None):
    return Stream(count)

class Loader:  # iterable, of batches, and no dataset
    def __iter__(self):
        yield {}

    def __len__(self):
        return 1

class HalfLong(list):
    def __len__(self):
        return 2.5

def missing():
    raise FileNotFoundError("rows.csv")

def number():
    return 3

text = "not callable"
"""


def own_plan(target: str, **args: Any) -> DataPlan:
    return plan_of(source="target", target=target, args=args, paths=())


def values(samples: Any, indices: Any = None) -> list[int]:
    indices = range(len(samples)) if indices is None else indices
    return [int(samples[index]["x"]) for index in indices]


def test_a_dataset_is_split_by_index_at_its_end(own: str) -> None:
    plan = own_plan(f"{own}:rows", count=11, start=5)
    assert values(open_samples(plan, "train")) == list(range(5, 14))
    assert values(open_samples(plan, "validation")) == [14, 15]


def test_a_callable_that_takes_split_is_given_it(own: str) -> None:
    plan = own_plan(f"{own}:splits")
    assert values(open_samples(plan, "train")) == list(range(7))
    assert values(open_samples(plan, "validation")) == [100, 101]


def test_a_split_the_user_names_is_kept_and_cut(own: str) -> None:
    plan = own_plan(f"{own}:splits", split="train")
    assert values(open_samples(plan, "train")) == [0, 1, 2, 3, 4, 5]
    assert values(open_samples(plan, "validation")) == [6]


def test_position_p_of_a_stream_is_sample_p(own: str) -> None:
    samples: Any = open_samples(own_plan(f"{own}:unsplit_stream"), "train")
    order = SampleOrder(len(samples), 7, True)
    wanted = sorted(random.sample(range(200), 20))
    assert values(samples, order.samples_at(range(30))) == list(range(30))
    assert values(samples, [index + 30 for index in wanted]) == [index + 30 for index in wanted]
    assert type(samples.stream).starts == 1


def test_going_back_in_a_stream_starts_it_again(own: str) -> None:
    samples: Any = open_samples(own_plan(f"{own}:Stream", count=5), "train")
    assert values(samples, [3, 4, 1, 1, 0]) == [3, 4, 1, 1, 0]


def test_a_stream_that_ends_begins_again(own: str) -> None:
    samples: Any = open_samples(own_plan(f"{own}:Stream", count=5), "train")
    assert values(samples, range(12)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("shared", [False, True])
def test_a_stream_that_is_its_own_iterator_loses_nothing_by_going_back(
    own: str, shared: bool
) -> None:
    samples: Any = open_samples(own_plan(f"{own}:Itself", shared=shared), "train")
    first = values(samples, range(5))
    state = random.getstate()
    assert values(samples, range(9)) == [*first, *values(samples, range(5, 9))]
    assert values(samples, [9, 10, 0]) == [first[0], first[1], first[0]], "it begins again"
    assert random.getstate() == state


def test_every_rank_of_a_stream_reads_its_own_part(own: str) -> None:
    plan, batch = own_plan(f"{own}:unsplit_stream"), batch_of(2, 2, 2)
    seen = []
    for rank in range(2):
        samples = open_samples(plan, "train")
        loader = BatchLoader(samples, SampleOrder(len(samples), 0, True), batch, rank)
        seen += [int(x) for k in range(3) for j in range(2) for x in loader.micro_batch(k, j)["x"]]
    assert sorted(seen) == list(range(24))


def test_a_stream_without_splits_has_no_validation(own: str) -> None:
    assert len(open_samples(own_plan(f"{own}:unsplit_stream"), "validation")) == 0
    assert len(open_samples(own_plan(f"{own}:Stream"), "validation")) == sys.maxsize


def test_an_empty_stream_is_an_error(own: str) -> None:
    with pytest.raises(ConfigError, match="a sample in it"):
        open_samples(own_plan(f"{own}:Stream", count=0), "train")[0]


@pytest.mark.parametrize(
    ("name", "args", "key", "told"),
    [
        ("number", {}, "data.target", "it returned int"),
        ("Loader", {}, "data.target", "an iterable of samples \\(it returned Loader"),
        (
            "HalfLong",
            {},
            "data.target",
            r"a dataset that has a length \(TypeError.*of samples from its `__len__`",
        ),
        ("missing", {}, "data.target", r"can be made \(FileNotFoundError: rows.csv \("),
        ("rows", {}, "data.args", "count"),
        ("rows", {"count": 3, "stop": 4}, "data.args", "stop"),
        ("row", {}, "data.target", "did you mean rows"),
        ("text", {}, "data.target", "a callable, not str"),
    ],
)
def test_a_target_that_cannot_be_used_names_key_value_and_fix(
    own: str, name: str, args: dict[str, Any], key: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        open_samples(own_plan(f"{own}:{name}", **args), "train")
    (problem,) = caught.value.problems
    assert problem.key == key
    assert problem.value is not None
    assert problem.fix


class Stream:
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))

    def state_dict(self) -> dict[str, int]:
        return {}


def test_passing_over_samples_of_a_stream_gives_signs_of_life() -> None:
    samples, beats = StreamSamples(Stream(10_000), lambda: Stream(10_000)), []
    samples.beat = lambda: beats.append(1)
    assert samples[5000] == 5000
    assert len(beats) >= 50


def test_the_end_of_a_stream_is_told_once_and_it_begins_again() -> None:
    samples, told = StreamSamples(Stream(3), lambda: Stream(3)), []
    samples.ended = told.append
    assert [samples[index] for index in range(3)] == [0, 1, 2]
    assert told == []
    assert [samples[index] for index in range(3, 10)] == [0, 1, 2, 0, 1, 2, 0]
    assert told == [3]


def draws_for_ever() -> Iterator[float]:
    """A generator without `state_dict` that draws from each generator that it may."""
    number = 0
    while True:
        yield number + random.random() + float(np.random.rand()) + torch.rand(()).item()
        number += 1


class ShuffledOnce(IterableDataset[int]):
    """Draws its order when it is begun, and has no `state_dict`."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(6).tolist())


@pytest.mark.parametrize("name", ["draws_for_ever", "ShuffledOnce"])
def test_a_stream_draws_by_the_seed_and_the_position_alone(name: str) -> None:
    def opened(seed: int = 0) -> Any:
        with generators.seeded(seed):
            return open_samples(own_plan(f"{__name__}:{name}"), "train")

    whole, others, resumed = opened(), opened(), opened()
    expected = [whole[index] for index in range(12)]
    states = random.getstate(), torch.get_rng_state()
    for index in range(1, 12, 2):
        random.random(), torch.rand(3)  # what training draws between
        assert others[index] == expected[index]
    assert [resumed[index] for index in range(7, 12)] == expected[7:]
    assert [resumed[index] for index in range(12)] == expected
    assert [opened(seed=1)[index] for index in range(12)] != expected
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    opened()[3]
    assert (random.getstate(), torch.get_rng_state().tolist()) == (states[0], states[1].tolist())


def test_an_evaluation_reads_each_position_once_in_as_many_micro_batches_on_every_rank() -> None:
    for _ in range(100):
        batch = batch_of(*(random.randint(1, 4) for _ in range(3)))
        end = random.randint(1, 3 * batch.global_batch)
        samples, order = numbers(end), SampleOrder(end, seed=random.randrange(9), shuffle=True)
        ranks = [BatchLoader(samples, order, batch, r, end=end) for r in range(batch.data_parallel)]
        num = ranks[0].num_micro_batches
        assert num is not None
        seen = list[int]()
        for index, rank in itertools.product(range(num), ranks):
            at = divmod(index, batch.accumulation_steps)
            seen += rank.ids(*at)
            num_read = len(rank.micro_batch(*at)["x"])
            assert num_read == max(1, len(rank.ids(*at)))
        assert sorted(seen) == list(range(end))
        assert all(rank.num_micro_batches == num for rank in ranks)
        last = divmod(num - 1, batch.accumulation_steps)
        assert any(rank.positions(*last) for rank in ranks)


def test_an_evaluation_is_at_most_one_pass() -> None:
    def counted(samples: Any, steps: int | str) -> int:
        plan: Any = SimpleNamespace(
            batch=batch_of(2, 3, 2), train=SimpleNamespace(eval_steps=steps, stop_early=None)
        )
        return count_evaluated(samples, plan)

    assert [counted(numbers(30), steps) for steps in (0, 1, 2, 3, "all")] == [0, 12, 24, 30, 30]
    mixture = Mixture([numbers(3), numbers(4)], [1.0, 2.0])
    assert counted(mixture, 2) == 24
    stream = type("Stream", (), {"__len__": lambda _: sys.maxsize})()
    assert counted(stream, 2) == 24
    with pytest.raises(ConfigError, match="the length of a stream is not known"):
        counted(stream, "all")


def test_ranks_refuse_a_best_checkpoint_without_validation_samples() -> None:
    plan: Any = SimpleNamespace(
        batch=batch_of(2, 3, 2),
        train=SimpleNamespace(eval_steps=8, stop_early=None),
        checkpoint=SimpleNamespace(best_metric="score"),
        data=SimpleNamespace(validation_fraction=0.05, validation_paths=(), source="path"),
    )
    with pytest.raises(ConfigError, match=r"metric=score: expected null: there are no validation"):
        count_evaluated([], plan)
    plan.data.source = "target"
    with pytest.raises(ConfigError, match=r"metric=score: expected null: the dataset of data\.t"):
        count_evaluated([], plan)
    plan.train.eval_steps = 0
    assert count_evaluated([], plan) == 0
    plan.train.eval_steps, plan.checkpoint.best_metric = 8, None
    assert count_evaluated([], plan) == 0
