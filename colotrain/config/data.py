"""Data section: checks that do not read the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from glob import iglob
from pathlib import Path
from typing import Any

from colotrain.config.schema import Data, Part
from colotrain.errors import ConfigError, Problem, suggest
from colotrain.records import same_fields
from colotrain.spec.objectives import MaskedPlan, RelatedPlan
from colotrain.spec.plan import DataPlan, PartPlan
from colotrain.spec.settings import CommonData, CommonPart

PAIRS = "give JSONL, Parquet or Arrow files of preference pairs"
RELATED = "give JSONL, CSV, Parquet or Arrow files of texts that belong together"
LABELLED = "give files of records with these fields (docs/data.md)"
NEEDED_FIELDS = {False: "text and label", True: "tokens and labels"}
"""Whether words have classes → the fields of records that have some."""
RATED = "give JSONL, CSV, Parquet or Arrow files of answers with a label"


def data_plan(
    data: Data,
    problems: list[Problem],
    *,
    pairs: bool = False,
    margins: bool | None = None,
    rated: bool = False,
    related: RelatedPlan | None = None,
    masked: MaskedPlan | None = None,
    tokens: Sequence[str] = (),
    classes: Sequence[str] = (),
    classes_of_words: bool = False,
    classes_numbered: bool = False,
    marks_padding: bool = False,
) -> DataPlan | None:
    """Return the plan of the data section, with absolute paths; None without a source of data.

    `pairs`: whether the records are preference pairs, with `margins` if so. `rated`: whether they
    are answers with a label. `related`: the texts of a sample. `masked`: which tokens are hidden.
    `tokens` are added to the tokenizer. `classes`: those of texts, or with `classes_of_words` of
    their words, whose numbers may be labels if `classes_numbered`. `marks_padding`: whether
    samples say where their padding is.
    """
    missing: list[Problem] = []
    paths = _absolute(data.path, "data.path", missing)
    held = _absolute(data.validation_path, "data.validation_path", missing)
    parts = [_part(part, f"data.mixture[{i}]", missing) for i, part in enumerate(data.mixture)]
    problems += missing
    source = "corpus" if data.corpus else "path" if paths else "mixture" if parts else "target"
    if data.target is None:
        problems += _check_processor(data)
        problems += _check_tokenizer(data)
        problems += _check_template(data)
    if source == "target" and data.target is None:
        return None
    template = _absolute_place(data.chat_template) if data.chat_template else None
    placed = replace(data, tokenizer=_absolute_place(data.tokenizer), chat_template=template)
    plan = DataPlan(
        source=source,  # type: ignore[arg-type]  # one of four literals
        **same_fields(placed, CommonData),
        paths=paths,
        validation_paths=held,
        mixture=tuple(parts),
        tokens=tuple(tokens),
        workers=0 if data.workers == "auto" else data.workers,
        pairs=pairs,
        margins=margins,
        rated=rated,
        related=related,
        masked=masked,
        classes=tuple(classes),
        classes_of_words=classes_of_words,
        classes_numbered=classes_numbered,
        marks_padding=marks_padding,
    )
    num_sources = sum(map(bool, (data.corpus, paths, parts, data.target)))
    if not missing and num_sources == 1:
        problems += _check_formats(plan)
    return plan


def check_data(data: Data, *, is_whole: bool) -> Iterator[Problem]:
    """Yield conflicts between sources, and settings that do not apply to the chosen source."""
    sources = ("corpus", "path", "mixture", "target")
    given = {f"data.{key}": v for key in sources if (v := getattr(data, key)) not in (None, [])}
    if len(given) > 1:
        value = ", ".join(key if isinstance(v, list) else f"{key}={v}" for key, v in given.items())
        first = next(iter(given))
        fix = f"set all but one of them to null, as in {first}=null"
        yield Problem(key="data", expected=f"one source of data (there is {value})", fix=fix)
    if not given and is_whole:
        expected = "data.corpus, data.path, data.mixture or data.target"
        yield Problem(key="data", expected=expected, fix="for example data.corpus=stdlib")
    if data.args and data.target is None:
        fix = "remove it, or set data.target"
        expected = "nothing without data.target, whose arguments they are"
        yield Problem(key="data.args", value=data.args, expected=expected, fix=fix)
    if data.validation_path and (data.mixture or data.target is not None):
        own = "the function of data.target has a parameter `split`"
        fix = "set it in the parts of data.mixture" if data.mixture else f"remove it: {own}"
        expected = "null where the data are not those of data.path or data.corpus"
        yield Problem(
            key="data.validation_path", value=data.validation_path, expected=expected, fix=fix
        )
    for key in ("collate", "sampler"):
        value = getattr(data, key)
        if value is not None and data.target is None and is_whole:
            expected, fix = "null without data.target, a dataset of your own", "remove it"
            yield Problem(key=f"data.{key}", value=value, expected=expected, fix=fix)
    if data.sampler is not None and not data.shuffle:
        expected, fix = "true under data.sampler, which draws samples", "remove one of them"
        yield Problem(key="data.shuffle", value=False, expected=expected, fix=fix)
    if data.mixture and data.tokenizer.startswith("bpe-"):
        expected = "one tokenizer for all parts of data.mixture (bpe-SIZE is made from one corpus)"
        fix = (
            "prepare the largest part alone, and name its tokenizer.json (`colotrain data inspect`)"
        )
        yield Problem(key="data.tokenizer", value=data.tokenizer, expected=expected, fix=fix)
    yield from _check_columns("data.columns", data.columns)
    for index, part in enumerate(data.mixture):
        yield from _check_columns(f"data.mixture[{index}].columns", part.columns)
        if not 0 < part.weight < float("inf"):
            key = f"data.mixture[{index}].weight"
            yield Problem(key=key, value=part.weight, expected="a number above 0", fix="remove it")


def holds_tokens(data: Data) -> bool:
    """Whether the data are already tokens, whose vocabulary is known only when they are read."""
    from colotrain.data.prepare.formats import TOKEN_FORMATS

    paths = [data.path] if isinstance(data.path, str) else list(data.path or [])
    kinds = [data.format]
    for part in data.mixture:
        paths += [part.path] if isinstance(part.path, str) else part.path
        kinds.append(part.format)
    named = any(path.endswith((".bin", ".idx")) for path in paths)
    found = any(any(Path(path).expanduser().glob("*.bin")) for path in paths if path)
    prefix = any(Path(f"{path}.idx").exists() for path in paths)
    return named or found or prefix or bool({*TOKEN_FORMATS} & {*kinds})


def _part(part: Part, key: str, problems: list[Problem]) -> PartPlan:
    return PartPlan(
        **same_fields(part, CommonPart),
        paths=_absolute(part.path, f"{key}.path", problems),
        validation_paths=_absolute(part.validation_path, f"{key}.validation_path", problems),
    )


def _absolute(
    path: str | Sequence[str] | None, key: str, problems: list[Problem]
) -> tuple[str, ...]:
    """Return absolute paths; a path that does not exist is reported."""
    written = [path] if isinstance(path, str) else list(path or ())
    found = [str(Path(place).expanduser().absolute()) for place in written]
    for value, place in zip(written, found, strict=True):
        exists = Path(place).exists() or Path(f"{place}.idx").exists()
        if not value or not (exists or any(iglob(place, recursive=True))):
            expected = "a folder, file or glob of files that exist"
            fix = f"correct the path (now in {Path.cwd()})"
            problems.append(Problem(key=key, value=value, expected=expected, fix=fix))
    return tuple(found)


def _absolute_place(text: str) -> str:
    place = Path(text).expanduser()
    return str(place.absolute()) if place.exists() else text


def _check_formats(plan: DataPlan) -> Iterator[Problem]:
    """Yield what is wrong with the files of each part: formats, splits, or no pairs."""
    from colotrain.data.prepare.sources import find_sources
    from colotrain.data.prepare.tokens import parts_of

    if plan.source == "target" or not (plan.paths or plan.mixture or plan.validation_paths):
        return
    for part in parts_of(plan):
        try:
            found = find_sources(part)
            needed = _needed(plan)
            if needed and part.paths and found.family != "records":
                fields, fix = needed
                expected = f"records with {fields}, not {found.kinds}"
                yield Problem(key="data.path", value=part.paths[0], expected=expected, fix=fix)
        except ConfigError as error:
            yield from error.problems
        except OSError:  # reported when the data are read
            continue


def _needed(plan: DataPlan) -> tuple[str, str] | None:
    """Return the fields that records must have, and what to do; None where texts do, too."""
    if plan.pairs:
        return "prompt, chosen and rejected", PAIRS
    if plan.related is not None:
        return f"{', '.join(plan.related.columns[:-1])} and {plan.related.columns[-1]}", RELATED
    if plan.classes:
        return NEEDED_FIELDS[plan.classes_of_words], LABELLED
    if plan.images:
        return "messages and images", "give JSONL, Parquet or Arrow files of conversations"
    return ("prompt, completion and label", RATED) if plan.rated else None


def _check_tokenizer(data: Data) -> Iterator[Problem]:
    from colotrain.data.prepare.vocabulary import check_tokenizer

    wrong = check_tokenizer(data.tokenizer)
    if wrong is not None:
        expected = f"bytes, bpe-SIZE or a tokenizer.json file ({wrong})"
        fix = "for example data.tokenizer=bytes"
        yield Problem(key="data.tokenizer", value=data.tokenizer, expected=expected, fix=fix)


def _check_processor(data: Data) -> Iterator[Problem]:
    from colotrain.data.prepare.images import check_processor

    wrong = check_processor(data.tokenizer) if data.images else None
    if wrong is not None:
        expected = f"a folder with a tokenizer and a processor of images ({wrong})"
        fix = "name the model's directory, as data.tokenizer=auto does"
        yield Problem(key="data.tokenizer", value=data.tokenizer, expected=expected, fix=fix)


def _check_template(data: Data) -> Iterator[Problem]:
    template = data.chat_template
    if template not in (None, "chatml") and not Path(str(template)).expanduser().is_file():
        expected = "chatml, or a file with a Jinja template"
        fix = f"correct the path (now in {Path.cwd()})"
        yield Problem(key="data.chat_template", value=template, expected=expected, fix=fix)


def _check_columns(key: str, columns: Mapping[str, Any]) -> Iterator[Problem]:
    from colotrain.data.prepare.conversations import (
        COLUMNS,
        OF_OBJECTIVES,
        RELATED_TEXTS,
    )

    known = (*COLUMNS, *OF_OBJECTIVES, *RELATED_TEXTS)
    for name in columns:
        if name not in known:
            expected = f"one of {', '.join(known)}"
            yield Problem(key=f"{key}.{name}", expected=expected, fix=suggest(name, known))
