"""The new head that an objective gives a model: its padding token, and what it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from colotrain.config.data import data_plan
from colotrain.config.schema import Config
from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.classes import class_number, find_classes, is_number, listed_classes
from colotrain.data.prepare.tokens import parts_of
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.rundir import read_json
from colotrain.spec.objectives import objective_of
from colotrain.spec.plan import DataPlan

NAMES = ("score.*", "classifier.*")
"""Globs on the heads of transformers' classifiers, those that PEFT trains beside adapters, too."""
OWN = ("num_labels", "id2label", "label2id", "problem_type")
"""Settings of a model that its new head decides."""


def check_head(settings: Config) -> Iterator[Problem]:
    """Problems of a model that cannot get a new head."""
    name = settings.train.objective
    if not objective_of(name).has_head:
        return
    if settings.model.hf is None:
        expected = f"a model directory under train.objective={name}, which gives it a new head"
        fix = "name a causal model's directory"
        yield Problem(key="model.hf", value=None, expected=expected, fix=fix)
    for key in OWN:
        if key in settings.model.args:
            expected = f"nothing under train.objective={name}, which decides it"
            value = settings.model.args[key]
            yield Problem(key=f"model.args.{key}", value=value, expected=expected, fix="remove it")


def check_brought_head(settings: Config, modules: Iterable[str]) -> Iterator[Problem]:
    """Problem of a head that an adapter's directory brings, of which nobody knows the classes.

    `modules`: names of the modules that are whole in it.
    """
    key, classes = named_classes(settings)
    heads = [name for name in modules if any(fnmatchcase(f"{name}.", glob) for glob in NAMES)]
    if objective_of(settings.train.objective).has_classes and heads and not classes:
        expected = f"the names of the classes of {heads[0]} in adapter.path, in their order"
        yield Problem(key=key, value="", expected=expected, fix=f"for example {key}=[bad,good]")


def trained_heads(settings: Config) -> tuple[str, ...]:
    """Globs on the new head beside adapters, which trains with them."""
    has_adapter = settings.adapter.name is not None
    return NAMES if has_adapter and objective_of(settings.train.objective).has_head else ()


def named_classes(settings: Config) -> tuple[str, list[str]]:
    """The setting that names the objective's classes, and its value."""
    train = settings.train
    section = train.classify_tokens if _labels_words(settings) else train.classify
    return f"train.{section.section}.classes", section.classes


def _labels_words(settings: Config) -> bool:
    return objective_of(settings.train.objective).labels_words


def classes_of(settings: Config, problems: list[Problem]) -> tuple[str, ...]:
    """Names of the classes: the setting's, those of a classifier, or of the data."""
    own_key, named = named_classes(settings)
    try:
        found = tuple(named) or find_classes(_parts(settings))
    except ConfigError as error:
        problems += error.problems
        return ()
    except (ColotrainError, OSError):  # reported when the data are read
        return ()
    known = _known_classes(settings)
    if named:
        problems += _moved_classes(own_key, named, known)
        known = ()
    others = [name for name in found if class_number(name, known, numbered=True) is None]
    if known and others:
        other = ", ".join(others[:5])
        expected = f"a model whose classes are those of the data ({other} is none of its classes: "
        expected += f"{', '.join(known[:20])})"
        fix = f"name them in {own_key}, or give the model without its head"
        problems.append(Problem(key="model.hf", expected=expected, fix=fix))
    if not known and not states_order(settings, found):
        problems += _mixed_classes(own_key, found)
    classes = known or found
    if len({*classes}) < max(2, len(classes)):
        key, fix = (own_key, "name each once") if named else ("data.path", "")
        expected = "at least two classes, each with a name of its own"
        problems.append(Problem(key=key, value=", ".join(classes), expected=expected, fix=fix))
        return ()
    return classes


def states_order(settings: Config, classes: Sequence[str]) -> bool:
    """Whether the classes are in an order that the setting, the model or the files state.

    Then numbers may stand for them: that of `in_order` says nothing about numbers.
    """
    _, named = named_classes(settings)
    known = tuple(named) or _known_classes(settings) or listed_classes(_parts(settings))
    return tuple(classes) == known


def _mixed_classes(key: str, found: Sequence[str]) -> Iterator[Problem]:
    """Problem of labels of which some are numbers and others names."""
    numbers = [name for name in found if is_number(name)]
    names = [name for name in found if not is_number(name)]
    if numbers and names:
        expected = "the names of the classes in their order, for some labels are numbers "
        expected += f"({', '.join(numbers[:3])}) and others names ({', '.join(names[:3])})"
        yield Problem(key=key, value="", expected=expected, fix=f"for example {key}=[bad,good]")


def _moved_classes(key: str, named: Sequence[str], known: Sequence[str]) -> Iterator[Problem]:
    """Problem of a class of a model's own head that is named at another place of it."""
    for name, own in zip(named, known, strict=False):
        if name != own and name in known:
            order = ", ".join(known[:20])
            expected = f"the model's own classes in their order, which is {order}"
            fix = "leave it out, or give the model without its head"
            yield Problem(key=key, value=", ".join(named), expected=expected, fix=fix)
            return


def _parts(settings: Config) -> list[DataPlan]:
    found = data_plan(settings.data, [], classes_of_words=_labels_words(settings))
    return [] if found is None or found.source == "target" else parts_of(found)


def _known_classes(settings: Config) -> tuple[str, ...]:
    """The classes of a directory that is a classifier already."""
    config = _config_of(settings)
    names, labels = config.get("architectures"), config.get("id2label")
    kind = "TokenClassification" if _labels_words(settings) else "SequenceClassification"
    is_one = isinstance(names, list) and any(kind in str(name) for name in names)
    if not is_one or not isinstance(labels, dict):
        return ()
    try:
        return tuple(str(labels[number]) for number in sorted(labels, key=int))
    except ValueError:  # reported when the model is built
        return ()


def padding_id(settings: Config, problems: list[Problem]) -> int:
    """The token that stands behind texts, and is never scored.

    It is that of the model's configuration, or else the tokenizer's, or its end of text, as in TRL.
    """
    for found in _candidates(settings):
        if isinstance(found, int) and not isinstance(found, bool) and found >= 0:
            return found
    expected = f"a padding token, for train.objective={settings.train.objective} scores what is "
    expected += "before it; neither the model nor the tokenizer names one"
    fix = "give the number of a token that no text has"
    problems.append(Problem(key="model.args.pad_token_id", expected=expected, fix=fix))
    return 0


def _candidates(settings: Config) -> Iterator[Any]:
    yield settings.model.args.get("pad_token_id")
    config = _config_of(settings)
    yield config.get("pad_token_id")
    text = config.get("text_config")
    yield text.get("pad_token_id") if isinstance(text, dict) else None
    tokenizer = settings.data.tokenizer
    if vocabulary.check_tokenizer(tokenizer) is not None:
        return
    special = vocabulary.special_tokens(tokenizer, settings.model.tokens)
    yield None if special is None else special.pad
    yield vocabulary.end_of_text(tokenizer)


def _config_of(settings: Config) -> dict[str, Any]:
    try:
        found = read_json(Path(settings.model.hf or "").expanduser() / "config.json")
    except (OSError, ValueError, TypeError):
        found = None
    return found if isinstance(found, dict) else {}  # reported when the model is built
