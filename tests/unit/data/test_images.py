"""Conversations with images: tokens, labels and batches are those of the directory's processor."""

from __future__ import annotations

import base64
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.data.prepare import images
from colotrain.data.prepare.tokens import prepare
from colotrain.data.read.images import ImageSamples, pad_together
from colotrain.data.read.loader import open_samples
from colotrain.errors import ColotrainError, ConfigError
from colotrain.models.huggingface_images import joined_images
from colotrain.spec.plan import DataPlan
from tests import image_text
from tests.image_text import GEMMA3, IDEFICS3, LLAVA, LLAVA_NEXT, ImageText

pytest.importorskip("transformers")
pytest.importorskip("PIL")
FAMILIES = (GEMMA3, LLAVA, LLAVA_NEXT, IDEFICS3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    images.open_processor.cache_clear()


def plan_of(path: Path, folder: Path, **changes: Any) -> DataPlan:
    plan = DataPlan(
        source="path",
        paths=(str(path),),
        seq_len=256,
        tokenizer=str(folder),
        images=True,
        shuffle=False,
        validation_fraction=0.0,
        workers=1,
    )
    return replace(plan, **changes)


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def png(**picture: Any) -> dict[str, str]:
    (image,) = image_text.pictures(1, **picture)
    return {"bytes": base64.b64encode(image_text.as_png(image)).decode()}


def record(*, content: Any = "Look.", **others: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "Seen."}
    return {"messages": [{"role": "user", "content": content}, answer], **others}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kind)
def test_a_batch_is_the_processors_own(family: ImageText, tmp_path: Path) -> None:
    processor = family.make_processor(tmp_path / "made")
    data = image_text.write_records(tmp_path / "data", 3, in_files=family is not LLAVA)
    samples = open_samples(plan_of(data, tmp_path / "made"), "train")
    batch = joined_images(pad_together([samples[index] for index in range(3)]))
    records = image_text.conversations(3)
    wanted = processor(
        text=[processor.apply_chat_template(messages, tokenize=False) for messages, _ in records],
        images=[own for _, own in records],
        padding="max_length",
        max_length=256,
        padding_side="right",
        add_special_tokens=False,
        return_tensors="pt",
    )
    assert batch.keys() == {*wanted.keys(), "labels"}
    assert not [name for name, tensor in wanted.items() if not torch.equal(batch[name], tensor)]


def test_answers_are_learned_and_placeholders_are_not(tmp_path: Path) -> None:
    processor = LLAVA_NEXT.make_processor(tmp_path / "made")
    data = image_text.write_records(tmp_path / "data", 1)
    for loss_on, wanted in {
        "answers": "It is 0.<|end|>It is 0.<|end|>",
        "all": "<|user|>What is 0?<|end|><|assistant|>It is 0.<|end|>"
        "<|user|>What is 0?<|end|><|assistant|>It is 0.<|end|>",
    }.items():
        plan = plan_of(data, tmp_path / "made", loss_on=loss_on)
        labels = open_samples(plan, "train")[0]["labels"]
        learned = processor.tokenizer.decode(labels[labels != -100])
        assert learned.removeprefix("<|user|>") == wanted.removeprefix("<|user|>")


def test_images_stand_where_records_say(tmp_path: Path) -> None:
    LLAVA.make_processor(tmp_path / "made")
    one, part = png(seed=3), {"type": "image"}
    parts = [part, {"type": "text", "text": "Look."}]
    alike = write(
        tmp_path / "alike.jsonl",
        record(content=parts, images=[one]),
        record(content=[{**part, "image": one}, parts[1]]),
        record(images=[one]),  # as TRL puts them: before the first question
        record(image=one),
        record(content="<image>Look.", image=one),
    )
    samples = open_samples(plan_of(alike, tmp_path / "made"), "train")
    first = samples[0]
    for index in range(1, len(samples)):
        assert all(torch.equal(first[name], tensor) for name, tensor in samples[index].items())
    other = write(tmp_path / "other.jsonl", record(content=parts[::-1], images=[one]))
    behind = open_samples(plan_of(other, tmp_path / "made"), "train")[0]
    assert torch.equal(behind["pixel_values"], first["pixel_values"])
    assert not torch.equal(behind["input_ids"], first["input_ids"])


def test_parquet_has_images_as_bytes(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    LLAVA.make_processor(tmp_path / "made")
    ((messages, own),) = image_text.conversations(1)
    given = [{"bytes": image_text.as_png(image), "path": None} for image in own]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "images": given}]), path)
    found = open_samples(plan_of(path, tmp_path / "made"), "train")[0]
    data = image_text.write_records(tmp_path / "data", 1)
    wanted = open_samples(plan_of(data, tmp_path / "made"), "train")[0]
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


REFUSED = {
    "images are never read from the network": record(images=["https://example.org/a.png"]),
    "image .*absent.png: No such file": record(images=["absent.png"]),
    "is none of PNG": record(images=[{"bytes": base64.b64encode(b"no image").decode()}]),
    "no base64": record(images=[{"bytes": "???"}]),
    "no image: under data.images": record(),
    "1 images, and 2 parts": record(content=[{"type": "image"}] * 2, images=[png()]),
    "2 marks <image>": record(content="<image> and <image>", images=[png()]),
    "parts that are text, not video": record(content=[{"type": "video"}], images=[png()]),
    "give one of them": record(content=[{"type": "image", "image": png()}], images=[png()]),
    "no image: ": {"text": "words alone", "images": [png()]},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_seen_is_refused(why: str, tmp_path: Path) -> None:
    LLAVA.make_processor(tmp_path / "made")
    path = write(tmp_path / "rows.jsonl", record(images=[png()]), REFUSED[why])
    with pytest.raises(ConfigError, match=why) as error:
        prepare(plan_of(path, tmp_path / "made"))
    assert "rows.jsonl:2" in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        record(images=[png()]),
        record(image="a.png"),
        record(content=[{"type": "image"}]),
        record(images=[{"bytes": None, "path": "a.png"}]),
        {"prompt": "<image>What?", "completion": "This.", "images": [png()]},
    ],
)
def test_images_are_not_left_out_silently(given: dict[str, Any], tmp_path: Path) -> None:
    LLAVA.make_processor(tmp_path / "made")
    path = write(tmp_path / "rows.jsonl", given)
    with pytest.raises(ConfigError, match=r"data\.images=true"):
        prepare(plan_of(path, tmp_path / "made", images=False))


@pytest.mark.parametrize(
    "given",
    [
        record(image="https://example.org/a.png"),
        record(image={"bytes": None, "path": None}),
        {"prompt": "What?", "completion": "This.", "images": [png()]},
    ],
)
def test_columns_that_a_text_does_not_show_are_left_out(
    given: dict[str, Any], tmp_path: Path
) -> None:
    LLAVA.make_processor(tmp_path / "made")
    path = write(tmp_path / "rows.jsonl", given)
    assert prepare(plan_of(path, tmp_path / "made", images=False)).count("train") > 0


def test_a_column_of_parquet_that_no_text_shows_is_not_read(tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    LLAVA.make_processor(tmp_path / "made")
    rows = [record(image={"bytes": None, "path": None}), record(image={"bytes": b"", "path": "u"})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prepared = prepare(plan_of(tmp_path / "rows.parquet", tmp_path / "made", images=False))
    assert prepared.count("train") > 0
    assert any("image" in note.text for note in prepared.notes)
    marked = [record(content="<image>Look.", image={"bytes": b"x", "path": None})]
    pq.write_table(pa.Table.from_pylist(marked), tmp_path / "marked.parquet")
    with pytest.raises(ConfigError, match=r"data\.images=true"):
        prepare(plan_of(tmp_path / "marked.parquet", tmp_path / "made", images=False))


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ({"bytes": [300]}, "of type list"),
        ("a\0b.png", "null byte"),
        ({"bytes": "\u00e9"}, "no base64"),
        ("pipe", "no regular file"),
        ("deep.png", "more than 8 bits for a colour"),
        ("page.eps", "is none of PNG"),
        ("A" * 5000, "5,000 characters are no path"),
        ("huge.png", "pixels"),
    ],
)
def test_foreign_images_are_bad_records(
    image: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image as pillow

    monkeypatch.setattr(images, "MOST_PIXELS", 10_000)
    LLAVA.make_processor(tmp_path / "made")
    os.mkfifo(tmp_path / "pipe")
    pillow.new("I;16", (8, 8)).save(tmp_path / "deep.png")
    pillow.new("RGB", (8, 8)).save(tmp_path / "page.eps")
    pillow.new("RGB", (400, 400)).save(tmp_path / "huge.png")
    path = write(tmp_path / "rows.jsonl", record(images=[png()]), record(images=[image]))
    with pytest.raises(ConfigError, match=why):
        prepare(plan_of(path, tmp_path / "made"))


def test_texts_around_images_are_in_the_text_and_marks_beside_parts_are_text(
    tmp_path: Path,
) -> None:
    GEMMA3.make_processor(tmp_path / "made")
    parts = ["Compare <image> tags", png(), "with", png(seed=1)]
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts
    ]
    given = record(content=content, images=[parts[1], parts[3]])
    prepared = prepare(plan_of(write(tmp_path / "rows.jsonl", given), tmp_path / "made"))
    assert not [note for note in prepared.notes if "not in the text" in note.text]


def test_a_systems_column_and_the_order_of_parts(tmp_path: Path) -> None:
    LLAVA.make_processor(tmp_path / "made")
    given = record(images=[png()]) | {"system": "Be brief."}
    prepared = prepare(plan_of(write(tmp_path / "rows.jsonl", given), tmp_path / "made"))
    assert "Be brief." in bytes(b for b in prepared.tokens("train") if b < 256).decode("latin-1")
    parts = [{"type": "image", "index": n} for n in (1, 0)]
    given = record(content=parts, images=[png(), png(seed=1)])
    with pytest.raises(ConfigError, match="image 1 stands where image 0 is to be"):
        prepare(plan_of(write(tmp_path / "turned.jsonl", given), tmp_path / "made"))


def test_a_sample_is_not_cut_within_its_images(tmp_path: Path) -> None:
    LLAVA.make_processor(tmp_path / "made")
    path = write(tmp_path / "rows.jsonl", record(images=[png(), png()]))
    plan = plan_of(path, tmp_path / "made", seq_len=30)
    with pytest.raises(ConfigError, match="at least 33: 1 samples would be cut"):
        open_samples(plan, "train")
    samples = open_samples(replace(plan, seq_len=33), "train")
    assert isinstance(samples, ImageSamples)
    assert samples[0]["input_ids"].shape == (33,)


def test_another_image_in_the_place_of_one_is_told(tmp_path: Path) -> None:
    LLAVA.make_processor(tmp_path / "made")
    data = image_text.write_records(tmp_path / "data", 1)
    samples = open_samples(plan_of(data, tmp_path / "made"), "train")
    (other,) = image_text.pictures(1, seed=9)
    (tmp_path / "data/pictures/0-0.png").write_bytes(image_text.as_png(other))
    with pytest.raises(ColotrainError, match="another one than was prepared") as told:
        samples[0]
    _, _, entry = str(told.value.fix).partition("remove ")
    shutil.rmtree(entry.partition(":")[0])
    assert open_samples(plan_of(data, tmp_path / "made"), "train")[0]  # with the other image


def test_the_same_records_beside_other_images_are_other_data(tmp_path: Path) -> None:
    """The images of a copy whose first folder is gone, and of the same names with other pixels."""
    folder = LLAVA.make(tmp_path / "model")
    found = []
    for name, seed in (("one", 0), ("other", 1)):
        image_text.write_records(tmp_path / name, 2, seed=seed)
        text = (tmp_path / "one" / "train.jsonl").read_text()
        (tmp_path / name / "train.jsonl").write_text(text)
        plan = plan_of(tmp_path / name / "train.jsonl", folder)
        found.append(open_samples(plan, "train")[0]["pixel_values"])
    assert not torch.equal(*found)


def test_a_processor_that_joins_samples_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LLAVA.make_processor(tmp_path / "made")
    kind = type(images.open_processor(str(tmp_path / "made")))
    own = kind.__call__

    def reversed_(self: Any, **given: Any) -> Any:
        found = own(self, **given)
        if len(given["text"]) > 1:
            found["pixel_values"] = found["pixel_values"][::-1]
        return found

    monkeypatch.setattr(kind, "__call__", reversed_)
    with pytest.raises(ConfigError, match="makes pixel_values of two samples in a way not known"):
        images.find_joins(str(tmp_path / "made"))


def test_what_the_processor_needs_is_told(tmp_path: Path) -> None:
    assert "has none of" in str(images.check_processor(str(tmp_path)))
    (tmp_path / "processor_config.json").write_text("{}")
    assert images.check_processor(str(tmp_path)) is None
    with pytest.raises(ConfigError, match="processor"):
        images.open_processor(str(tmp_path))
