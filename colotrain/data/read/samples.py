"""The user's own dataset from `data.target`, map-style or a stream."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch.utils.data import IterableDataset, Subset

from colotrain import generators
from colotrain.dotted import described, import_target
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.spec.plan import DataPlan


def user_samples(plan: DataPlan, split: str) -> Any:
    """The split `train` or `validation` of the dataset that `data.target` returns for `data.args`.

    A callable with a `split` parameter gets it (unless `data.args` sets it). Otherwise the
    dataset's last samples, `validation_fraction` of them rounded down, are the validation split; a
    stream has no end, and so no validation. Raises `ConfigError` for a wrong path, wrong arguments
    or a wrong result.
    """
    target = str(plan.target)
    make = import_target("data.target", target)
    takes_split = _takes_split(make) and "split" not in plan.args
    args = {**plan.args, "split": split} if takes_split else dict(plan.args)
    before = generators.of_host()
    dataset = _call(make, target, args)
    if _is_stream(dataset):

        def again() -> Any:
            with generators.kept():
                generators.set_on_host(before)
                return _call(make, target, args)

        return StreamSamples(dataset, again) if takes_split or split == "train" else []
    if not _is_map(dataset):
        expected = "a callable that returns a map-style dataset (`__len__` and `__getitem__`), or "
        expected += f"an iterable of samples (it returned {type(dataset).__name__})"
        raise _wrong("data.target", target, expected, "return a list, or a torch Dataset")
    count = _length(dataset, target)
    if takes_split:
        return dataset
    cut = count - int(count * plan.validation_fraction)
    if split == "validation":
        return Subset(dataset, range(cut, count))
    return WithoutValidation(dataset, range(cut))


class WithoutValidation(Subset[Any]):
    """The first samples of a dataset whose last ones are kept for validation."""


def rest_of(samples: Any) -> Subset[Any] | None:
    """The validation split of a dataset that is cut in two; None where each split is opened."""
    if not isinstance(samples, WithoutValidation):
        return None
    total: int = len(samples.dataset)  # type: ignore[arg-type]
    return Subset(samples.dataset, range(len(samples), total))


def notes_of(samples: Any, plan: DataPlan, *, global_batch: int, evaluates: bool) -> Iterator[str]:
    """Yield what happens to the samples of training without the user's doing, a line each."""
    if isinstance(samples, WithoutValidation):
        total: int = len(samples.dataset)  # type: ignore[arg-type]
        held = total - len(samples)
        unused = "" if evaluates else ", which train.eval_steps=0 leaves out"
        if held:
            yield (
                f"the last {held} of the {total} samples of data.target are for validation"
                f"{unused}, not training (data.validation_fraction={plan.validation_fraction:g}; "
                "0: none; a parameter `split` of your function: samples of its own)"
            )
    if len(samples) < global_batch:
        yield (
            f"warning: there are {len(samples)} samples to train on, fewer than "
            f"train.global_batch={global_batch}: a step has some of them several times"
        )


BEAT_EVERY = 64
"""Skipped samples between two calls of `StreamSamples.beat`."""


class StreamSamples:
    """An iterable dataset with an index: sample p is the one at position p of the stream.

    The stream's order is kept, never shuffled: every rank reads from the beginning and skips other
    ranks' samples, and resuming reads forward to the run's position. Reading an earlier sample
    restarts the stream, by loading its first `state_dict` if it has `load_state_dict`, else with a
    new stream from `remake()`. A stream that ends is restarted, too. What it draws at random
    depends on the seed and the position alone. Its `len` is `sys.maxsize`.
    """

    def __init__(self, stream: Any, remake: Callable[[], Any]) -> None:
        self.stream = stream
        self.remake = remake
        self._first_state = copy.deepcopy(stream.state_dict()) if self._can_load else None
        self._draws = self._first_draws = generators.of_host()
        """State of the generators that the stream draws from: the same on all ranks."""
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self.beat: Callable[[], None] = lambda: None
        """Called regularly while samples are skipped, as after a resume, so that this long wait is
        not taken for a hang."""
        self.ended: Callable[[int], None] = lambda num: None
        """Called once, with the number of samples, when the stream has ended for the first time."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Any:
        with generators.kept():
            begins_again = self._iterator is not None and index < self._next
            generators.set_on_host(self._first_draws if begins_again else self._draws)
            if self._iterator is None:
                self._iterator = iter(self.stream)
            elif begins_again:
                self._iterator, self._next = self._from_the_first(), 0
            for passed in range(index - self._next):
                if passed % BEAT_EVERY == 0:
                    self.beat()
                self._read()
            sample = self._read()
            self._draws = generators.of_host()
        return sample

    def _read(self) -> Any:
        for begin in (self._as_it_is, self._another_time, self._from_the_first):
            self._iterator = begin()
            with suppress(StopIteration):
                sample = next(self._iterator)
                self._next += 1
                return sample
            if self._next:
                self.ended(self._next)
                self.ended = lambda num: None
        raise ConfigError([Problem(key="data.target", expected="a stream with a sample in it")])

    def _as_it_is(self) -> Iterator[Any]:
        assert self._iterator is not None
        return self._iterator

    def _another_time(self) -> Iterator[Any]:
        """An iterator after the stream's end."""
        return self._from_the_first() if self._can_load else iter(self.stream)

    def _from_the_first(self) -> Iterator[Any]:
        if self._can_load:
            self.stream.load_state_dict(copy.deepcopy(self._first_state))
        else:
            self.stream = self.remake()
        return iter(self.stream)

    @property
    def _can_load(self) -> bool:
        return hasattr(self.stream, "load_state_dict")


def _call(make: Callable[..., Any], target: str, args: dict[str, Any]) -> Any:
    try:
        inspect.signature(make).bind(**args)
    except TypeError as error:
        expected = f"the arguments of {target} ({error})"
        raise _wrong("data.args", args, expected, f"it takes {inspect.signature(make)}") from error
    except ValueError:  # builtins may have no signature
        pass
    try:
        return make(**args)
    except ColotrainError:
        raise
    except Exception as error:
        expected = f"a dataset that can be made ({described(error)})"
        raise _wrong("data.target", target, expected, "correct data.args, or the code") from error


def _length(dataset: Any, target: str) -> int:
    try:
        return len(dataset)
    except ColotrainError:
        raise
    except Exception as error:
        expected = f"a dataset that has a length ({described(error)})"
        fix = "return the number of samples from its `__len__`"
        raise _wrong("data.target", target, expected, fix) from error


def _takes_split(make: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(make).parameters.get("split")
    except ValueError:
        return False
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


def _is_stream(dataset: Any) -> bool:
    if not hasattr(dataset, "__iter__") or isinstance(dataset, Mapping | str | bytes):
        return False
    keeps_place = hasattr(dataset, "state_dict") and not _is_map(dataset)
    return isinstance(dataset, IterableDataset) or keeps_place or not hasattr(dataset, "__len__")


def _is_map(dataset: Any) -> bool:
    is_sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return is_sized and not isinstance(dataset, Mapping | str | bytes | IterableDataset)


def _wrong(key: str, value: Any, expected: str, fix: str) -> ConfigError:
    return ConfigError([Problem(key=key, value=value, expected=expected, fix=fix)])
