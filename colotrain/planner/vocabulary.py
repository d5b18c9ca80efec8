"""The vocabulary that tokenizer and model share: new tokens need rows in the embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from colotrain.config.data import holds_tokens
from colotrain.config.schema import Config
from colotrain.data.prepare import vocabulary
from colotrain.errors import Problem
from colotrain.rundir import read_json
from colotrain.spec.survey import Survey


def stored_vocab_size(folder: str) -> int | None:
    """Size of the vocabulary in a directory's config.json; None where it has none."""
    try:
        config = read_json(Path(folder).expanduser() / "config.json")
        size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def with_new_tokens(settings: Config, problems: list[Problem]) -> Config:
    """Set `model.args.vocab_size` of a model directory where the tokenizer has more tokens.

    The size is a multiple of `mesh.tp`. A tokenizer of which the directory's own is no beginning is
    another one: it is refused as too large.
    """
    model, data = settings.model, settings.data
    problems += _check_new_tokens(settings)
    if model.hf is None or data.target is not None or "vocab_size" in model.args:
        return settings
    stored, size = stored_vocab_size(model.hf), _num_tokens(settings)
    if stored is None or size is None or size <= stored or not _extends(data.tokenizer, model.hf):
        return settings
    unit = max(settings.mesh.tp, 1)  # a smaller one is refused later
    rows = -(-size // unit) * unit
    args = {**model.args, "vocab_size": rows}
    return dataclasses.replace(settings, model=dataclasses.replace(model, args=args))


def _num_tokens(settings: Config) -> int | None:
    return vocabulary.vocab_size_of(settings.data.tokenizer, settings.model.tokens)


def _extends(tokenizer: str, folder: str) -> bool:
    """Whether a tokenizer has all tokens of a directory's own one, with the same ids."""
    mine, own = vocabulary.tokenizer_file(tokenizer), vocabulary.tokenizer_file(folder)
    if mine is None or own is None or vocabulary.check_tokenizer(folder) is not None:
        return False
    if mine == own:
        return True
    return vocabulary.load(own).get_vocab().items() <= vocabulary.load(mine).get_vocab().items()


def _check_new_tokens(settings: Config) -> Iterator[Problem]:
    tokens, tokenizer = settings.model.tokens, settings.data.tokenizer
    if tokens and settings.data.target is not None:
        expected = "none with data.target, whose tokenizer is not known"
        fix = "add them to your tokenizer, and set model.args.vocab_size to its size"
        yield Problem(key="model.tokens", value=tokens, expected=expected, fix=fix)
    elif tokens and vocabulary.tokenizer_file(tokenizer) is None:
        expected = f"none with data.tokenizer={tokenizer}, which has no special tokens"
        fix = "name a tokenizer.json, or a directory with one"
        yield Problem(key="model.tokens", value=tokens, expected=expected, fix=fix)
    elif not all(isinstance(token, str) and token for token in tokens):
        yield Problem(key="model.tokens", value=tokens, expected="texts that are not empty")


def warn_of_new_rows(settings: Config, survey: Survey) -> Iterator[str]:
    """Say how many rows are new in the embedding, and whether rows of added tokens train.

    Added tokens may take rows that the embedding has to spare: then it does not grow.
    """
    if settings.model.hf is None:
        return
    rows, stored = survey.vocab_size, stored_vocab_size(settings.model.hf)
    if rows is None or stored is None:
        return
    if rows > stored:
        yield (
            f"the vocabulary grows from {stored:,} to {rows:,} tokens: {rows - stored:,} new rows "
            "of embedding and head begin at the mean of the others"
        )
    frozen = [p.name for p in survey.parameters if p.shape[:1] == (rows,) and p.frozen_by]
    if frozen and (added := _num_added(settings)):
        names, tokens = ", ".join(frozen), f"{added:,} added token{'s' * (added > 1)}"
        yield f"rows of {tokens} in frozen {names} do not train: freeze.except=[{names}] lets them"


def _num_added(settings: Config) -> int:
    """Number of tokens that the model directory's own tokenizer lacks; 0 where it has none."""
    tokenizer, folder = settings.data.tokenizer, settings.model.hf
    if folder is None or settings.data.target is not None or not _extends(tokenizer, folder):
        return 0
    mine, own = vocabulary.tokenizer_file(tokenizer), vocabulary.tokenizer_file(folder)
    assert mine is not None and own is not None, "one extends the other"  # noqa: PT018
    known = vocabulary.load(own).get_vocab()
    return len({*vocabulary.load(mine).get_vocab(), *settings.model.tokens} - set(known))


def check_vocabulary(settings: Config, survey: Survey) -> Iterator[Problem]:
    """Problems of a tokenizer larger than the model; token files are checked when they are read."""
    data = settings.data
    if data.target is not None or survey.vocab_size is None or holds_tokens(data):
        return
    size = _num_tokens(settings)
    if size is not None and size > survey.vocab_size:
        expected = f"at most model.args.vocab_size={survey.vocab_size} tokens, not {size}"
        fix = f"set model.args.vocab_size={size}, or another data.tokenizer"
        yield Problem(key="data.tokenizer", value=data.tokenizer, expected=expected, fix=fix)
