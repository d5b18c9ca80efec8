"""`colotrain data inspect`: statistics of the data, and a sample as the model sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from colotrain.data.prepare.prepared import Note
from colotrain.data.prepare.vocabulary import DocumentForm
from colotrain.errors import ConfigError, UsageError
from colotrain.runs.resolving import plan_from
from colotrain.show.console import print_json, stderr_console, stdout_console
from colotrain.show.terminal import is_live
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import format_size

if TYPE_CHECKING:
    from colotrain.data.read.inspection import Token

SPLITS = ("train", "validation")
BAR_WIDTH = 40


def inspect(overrides: list[str], *, sample: int, split: str, as_json: bool) -> int:
    """Prepare the data of the plan that the overrides describe, and print it with a sample."""
    from colotrain.data.read.inspection import describe, sample_images, sample_tokens
    from colotrain.show.progress import preparation

    if split not in SPLITS:
        raise UsageError(f"--split={split}: expected one of {', '.join(SPLITS)}")
    plan = plan_of_data(overrides)
    with preparation(stderr_console()) as progress:
        document = describe(plan.data, progress)
    index, tokens = sample_tokens(plan.data, sample, seed=plan.train.seed, split=split)  # type: ignore[arg-type]
    document["sample"] = _sample_document(index, sample, split, tokens)
    document["sample"]["images"] = sample_images(plan.data, index, split)  # type: ignore[arg-type]
    if as_json:
        print_json(document)
        return 0
    console = stdout_console()
    for part in document["parts"]:
        _print_part(console, part)
    counts = ", ".join(f"{split} {count:,}" for split, count in document["samples"].items())
    console.print(f"samples of {document['seq_len']} tokens: {counts}")
    _print_sample(console, document["sample"], tokens, plan.data.rows)
    return 0


def plan_of_data(overrides: list[str]) -> RunPlan:
    """Return the plan of the arguments; no size of batches is asked for: no data depends on it."""
    try:
        return plan_from(overrides, here=False)
    except ConfigError as error:
        if ("train.micro_batch", None) not in [(p.key, p.value) for p in error.problems]:
            raise
    return plan_from([*overrides, "train.micro_batch=1"], here=False)


def _sample_document(index: int, position: int, split: str, tokens: list[Token]) -> dict[str, Any]:
    return {
        "position": position,
        "index": index,
        "split": split,
        "in_loss": sum(token.in_loss for token in tokens),
        "padding": sum(token.document == -1 for token in tokens),
        "segments": [
            {"text": text, "in_loss": in_loss, "document": document}
            for text, in_loss, document in _segments(tokens)
        ],
    }


def _segments(tokens: list[Token]) -> Iterator[tuple[str, bool, int | None]]:
    """Merge neighbouring tokens of one document with the same loss mask; leave out padding."""
    text, fate = "", (False, None)
    for token in tokens:
        if token.document == -1:
            continue
        if (token.in_loss, token.document) != fate:
            if text:
                yield text, *fate
            text, fate = "", (token.in_loss, token.document)  # type: ignore[assignment]
        text += token.text
    if text:
        yield text, *fate


def _print_part(console: Console, part: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(part):
        table.add_row(name, value)
    console.print(table)
    if part["lengths"]:
        _print_lengths(console, part["lengths"])


def _rows(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "data", ", ".join(map(str, part["paths"]))
    shards = f", {part['shards']} shards" if part["shards"] > 1 else ""
    yield "format", part["format"] + shards
    yield "files", part["text"]
    if part["weight"] is not None:
        yield "weight", f"{part['weight']:g}"
    yield "tokenizer", f"{part['tokenizer']}, {part['vocab_size']:,} tokens"
    if part["texts"] is not None:
        yield "texts", str(DocumentForm(**part["texts"]))
    isolated = ", documents kept apart" if part["isolate"] else ""
    yield "packing", part["packing"] + isolated
    for split in SPLITS:
        yield split, _counts(part, split)
    if (images := part["images"]) is not None:
        yield "images", _images(images)
    share = part["in_loss"] / max(part["tokens"]["train"], 1)
    yield "trained on", f"{part['in_loss']:,} tokens of train ({share:.1%})"
    if part["without_targets"]:
        cut = f"{part['without_targets']:,} documents are cut before their first token that is"
        yield "of no use", f"{cut} trained on: raise data.seq_len"
    if part["bad"]["count"]:
        yield (
            "bad records",
            f"{part['bad']['count']:,} left out: " + "; ".join(part["bad"]["first"]),
        )
    notes = [Note(**note) for note in part["notes"]]
    yield from (("note", str(note)) for note in notes if not note.is_unread)
    if unread := [f"{note.text} ({note.count:,} records)" for note in notes if note.is_unread]:
        yield "not read", ", ".join(unread)


def _images(images: dict[str, Any]) -> str:
    if not images["images"]:
        return "none"
    sizes = [" x ".join(map(str, images[which])) for which in ("smallest", "largest")]
    counts = images["placeholders"]
    return (
        f"{images['images']:,} in {images['samples']:,} samples, {sizes[0]} to {sizes[1]}; "
        f"{counts['min']:,} to {counts['max']:,} placeholders in a sample"
    )


def _counts(part: dict[str, Any], split: str) -> str:
    found = [f"{part['tokens'][split]:,} tokens"]
    if part["documents"][split] is not None:
        found.insert(0, f"{part['documents'][split]:,} documents")
    if part["bytes"][split] is not None:
        found.append(f"{format_size(part['bytes'][split])} of text")
    return ", ".join(found)


def _print_lengths(console: Console, lengths: dict[str, Any]) -> None:
    console.print(
        f"tokens per document: {lengths['min']:,} to {lengths['max']:,}, "
        f"median {lengths['median']:,.0f}, mean {lengths['mean']:,.1f}; "
        f"{lengths['longer_than_seq_len']:,} longer than data.seq_len"
    )
    most = max(row["count"] for row in lengths["bins"])
    for row in lengths["bins"]:
        bar = "█" * max(round(BAR_WIDTH * row["count"] / most), int(row["count"] > 0))
        console.print(f"  up to {row['up_to']:>9,}  {row['count']:>11,}  {bar}", highlight=False)


def _print_sample(
    console: Console, sample: dict[str, Any], tokens: list[Token], parts: Sequence[str]
) -> None:
    """Print the sample; tokens in the loss are green, or in brackets without colour.

    `parts` names what its documents are, where they are no documents.
    """
    padding = f", {sample['padding']} of padding" if sample["padding"] else ""
    console.print(
        f"sample {sample['position']} of {sample['split']} (number {sample['index']}): "
        f"{len(tokens)} tokens, {sample['in_loss']} trained on{padding}"
    )
    coloured, text, last = is_live(console), Text(), None
    for segment in sample["segments"]:
        if segment["document"] not in (None, last):
            last = segment["document"]
            text.append(f"\n── {parts[last] if parts else f'document {last}'} ──\n", style="cyan")
        shown = _visible(segment["text"])
        if coloured:
            text.append(shown, style="green" if segment["in_loss"] else "dim")
        else:
            text.append(f"[[{shown}]]" if segment["in_loss"] else shown)
    console.print(text, soft_wrap=True)
    for number, image in enumerate(sample["images"], 1):
        width, height = image["size"]
        console.print(f"image {number}: {width} x {height}, {image['image']}", highlight=False)
    meaning = "green" if coloured else "between [[ and ]]"
    console.print(f"({meaning}: trained on)", style="dim")


def _visible(text: str) -> str:
    """Replace control characters by visible symbols, so that data cannot control the terminal."""
    table = {number: 0x2400 + number for number in range(32) if chr(number) not in "\n\t"}
    return text.translate({**table, 127: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)})
