"""Images of conversations: where they are, and what a directory's own processor makes of them.

A record's images are processed twice. When the data are prepared, they give the number of their
placeholders; of the pixels nothing is kept. When the sample is read, they give its pixels. A
prepared document has the images' paths, or their bytes. No torch here.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from colotrain.data.prepare.records import BadRecord
from colotrain.errors import ColotrainError, ConfigError, Problem, message_of, shortened
from colotrain.offline import offline
from colotrain.rundir import regular
from colotrain.spec.quantities import format_size

FORMAT = 1
"""Number of the form of `packed`: a change makes earlier entries of the cache unused."""
COLUMNS = ("images", "image")
"""Columns with the images of a record."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a directory with a processor of images; it has at least one of them."""
SIZES = ((64, 48), (40, 72), (56, 56))
"""Width and height of images whose batches show how a processor puts samples together."""
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of Pillow that are read: others, such as EPS, call programs."""
MOST_CHARACTERS = 4096
"""Of a path."""
MOST_BYTES, MOST_PIXELS = 256 << 20, 80_000_000
NETWORK = ("http://", "https://", "ftp://", "s3://", "gs://", "hf://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image of a record: a file, or the bytes of one."""

    path: str = ""
    content: bytes = b""

    def read(self) -> bytes:
        """The bytes of the image's file. Raises `BadRecord` where there is none."""
        if self.content:
            return self.content
        try:
            with open(self.path, "rb", opener=regular) as file:
                content = file.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise BadRecord(f"image {self}: {why}") from error
        if len(content) > MOST_BYTES:
            raise BadRecord(f"image {self}: more than {format_size(MOST_BYTES)}")
        return content

    def __str__(self) -> str:
        return shortened(self.path, 200) or f"{len(self.content):,} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """A text whose placeholders the processor has replaced, as tokens."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """Characters of each token in the text with the replacements."""
    replaced: list[tuple[int, int]]
    """Spans of the replacements there."""
    gains: list[tuple[int, int]]
    """End of each placeholder in the given text, and the characters that its replacement adds."""

    def moved(self, position: int) -> int:
        """Where a position of the given text is in the text with the replacements."""
        return position + sum(gain for end, gain in self.gains if end <= position)


def read_images(value: Any, folder: Path) -> list[Image]:
    """The images of a column, or of a part of a message. Raises `BadRecord`.

    An image is a path relative to `folder`, or an object with `bytes` (in JSON as base64) or a
    `path`, as the datasets library writes images.
    """
    values = value if isinstance(value, list) else [value]
    return [_image(one, folder) for one in values]


def shows(value: Any) -> bool:
    """Whether a column's value is of images, and no address of one."""
    if isinstance(value, list):
        return any(map(shows, value))
    is_address = isinstance(value, str) and value.lower().startswith(NETWORK)
    is_unread = value is ...  # of Parquet and Arrow files
    return not (is_empty(value) or is_address or is_unread)


def is_empty(value: Any) -> bool:
    """Whether a column has no image: empty, or an image whose bytes and path are null."""
    if isinstance(value, Mapping):
        return not any(value.get(name) for name in ("bytes", "path"))
    return value in (None, "", [])


def _image(value: Any, folder: Path) -> Image:
    if isinstance(value, bytes):
        return Image(content=value)
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
        if isinstance(content, str):
            try:
                content = base64.b64decode(content, validate=True)
            except ValueError as error:
                raise BadRecord(f"an image: its bytes are no base64 ({error})") from error
        if content is not None and not isinstance(content, bytes):
            raise BadRecord(f"an image: its bytes are of type {type(content).__name__}")
        if content:
            return Image(content=bytes(content))
        value = path
    if not isinstance(value, str) or not value:
        raise BadRecord("an image: expected a path, or an object with bytes or a path")
    if value.lower().startswith(NETWORK):
        raise BadRecord(
            f"image {value[:80]}: images are never read from the network: download it, and give "
            "its path"
        )
    if value.startswith("data:"):
        raise BadRecord('an image as a data URI: give {"bytes": BASE64} or a path')
    if len(value) > MOST_CHARACTERS:
        why = f"{len(value):,} characters are no path"
        raise BadRecord(f'an image: {why}: give {{"bytes": BASE64}} or a path')
    return Image(path=str(folder / value))


def check_processor(folder: str) -> str | None:
    """What keeps a folder from being that of a processor of images; None where nothing does."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'colotrain[hf]'"
    if importlib.util.find_spec("PIL") is None:
        return "Pillow is not installed: pip install 'colotrain[images]'"
    if not any((Path(folder) / name).is_file() for name in PROCESSOR_FILES):
        return f"{folder} has none of {', '.join(PROCESSOR_FILES)}"
    return None


@lru_cache(maxsize=4)
def open_processor(folder: str) -> Any:
    """The processor of a model's directory, as transformers loads it, without code from there."""
    from transformers import AutoProcessor

    try:
        with offline():
            found = AutoProcessor.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # whatever a class of transformers raises
        needed = [name for name in ("torchvision", "num2words") if name in str(error).lower()]
        fix = f"pip install {needed[0]}" if needed else "correct its files, or take another model"
        why = message_of(error).strip().partition("\n")[0]
        raise _unusable(folder, f"its processor cannot be made: {why}", fix) from error
    parts = ("image_processor", "tokenizer", "image_token")
    missing = [name for name in parts if not hasattr(found, name)]
    if missing:
        raise _unusable(folder, f"its processor has no {missing[0]}", "take another model")
    if found.tokenizer.pad_token_id is None:
        raise _unusable(folder, "its tokenizer has no pad_token", "name one in its files")
    return found


def _unusable(folder: str, why: str, fix: str) -> ConfigError:
    expected = f"a directory with a processor of images that can be used ({why})"
    return ConfigError([Problem(key="data.tokenizer", value=folder, expected=expected, fix=fix)])


def decode(content: bytes, name: str) -> Any:
    """The image, in RGB and upright.

    Raises `BadRecord` for bytes that are no image, or one that is too large, or whose numbers RGB
    would cut off.
    """
    from PIL import Image as pillow
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
            opened = pillow.open(io.BytesIO(content), formats=PICTURE_FORMATS)
        with opened as image:
            if image.width * image.height > MOST_PIXELS:
                raise BadRecord(f"image {name}: more than {MOST_PIXELS:,} pixels")
            if image.mode.startswith(("I", "F")):
                raise BadRecord(f"image {name}: more than 8 bits for a colour ({image.mode})")
            return ImageOps.exif_transpose(image).convert("RGB")
    except BadRecord:
        raise
    except UnidentifiedImageError as error:
        raise BadRecord(f"image {name}: is none of {', '.join(PICTURE_FORMATS)}") from error
    except Exception as error:  # whatever Pillow raises about bytes from anywhere
        raise BadRecord(f"image {name}: cannot be read ({message_of(error)})") from error


def count_placeholders(processor: Any, text: str) -> int:
    return text.count(processor.image_token)


def expand(processor: Any, folder: str, text: str, images: Sequence[Any]) -> Expanded:
    """The tokens of a text with images, and where replacements are. Raises `BadRecord`."""
    try:
        found = processor(
            text=[text],
            images=[list(images)],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
    except Exception as error:  # whatever a processor raises
        raise BadRecord(f"the processor refuses it ({message_of(error)})") from error
    if "text_replacement_offsets" not in found or "offset_mapping" not in found:
        why = f"{type(processor).__name__} does not tell what it puts in an image's place"
        raise _unusable(folder, why, "a newer transformers, or another model")
    replacements = found["text_replacement_offsets"][0]
    if len(replacements) != len(images) or any(r["type"] != "image" for r in replacements):
        raise BadRecord(f"the processor replaces {len(replacements)} placeholders of them")
    return Expanded(
        ids=list(found["input_ids"][0]),
        offsets=list(found["offset_mapping"][0]),
        replaced=[tuple(r["new_span"]) for r in replacements],
        gains=[
            (r["span"][1], (r["new_span"][1] - r["new_span"][0]) - (r["span"][1] - r["span"][0]))
            for r in replacements
        ],
    )


def packed(
    text: str,
    images: Sequence[Image],
    decoded: Sequence[Any],
    *,
    needed: int,
    placeholders: int,
) -> bytes:
    """A document's text and images, as they are kept beside its tokens.

    It is a line of JSON, and then the bytes of those images that have no file. `needed`: tokens up
    to the last of the `placeholders` that the processor has put in.
    """
    described = []
    for image, pixels in zip(images, decoded, strict=True):
        kept = {"bytes": len(image.content)} if image.content else {"path": image.path}
        digest = "" if image.content else hashlib.sha256(image.read()).hexdigest()
        described.append({**kept, "sha256": digest, "size": list(pixels.size)})
    about = {"text": text, "needed": needed, "placeholders": placeholders, "images": described}
    header = json.dumps(about)
    return b"".join([header.encode(), b"\n", *(image.content for image in images)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What `packed` has made of a document."""

    text: str
    needed: int
    placeholders: int
    images: tuple[Image, ...]
    digests: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    """Width and height of each image."""

    def decoded(self, entry: Path) -> list[Any]:
        """The images. Raises `ColotrainError` for one that is not as it was prepared in `entry`."""
        found = []
        for image, digest in zip(self.images, self.digests, strict=True):
            try:
                content = image.read()
                if digest and hashlib.sha256(content).hexdigest() != digest:
                    raise BadRecord(f"image {image}: it is another one than was prepared")
                found.append(decode(content, str(image)))
            except BadRecord as error:
                fix = f"put back the file, or remove {entry}: the data are prepared anew"
                raise ColotrainError(str(error), fix) from error
        return found


def unpacked(content: bytes) -> Document:
    header, _, rest = content.partition(b"\n")
    about, images, at = json.loads(header), [], 0
    for one in about["images"]:
        size = one.get("bytes", 0)
        images.append(Image(path=one.get("path", ""), content=rest[at : at + size]))
        at += size
    return Document(
        text=about["text"],
        needed=about["needed"],
        placeholders=about["placeholders"],
        images=tuple(images),
        digests=tuple(one["sha256"] for one in about["images"]),
        sizes=tuple((one["size"][0], one["size"][1]) for one in about["images"]),
    )


def find_joins(folder: str) -> dict[str, bool]:
    """Entry of images → whether the processor joins those of samples along their first dimension.

    Otherwise the entry has a dimension of samples, and is padded. Raises `ConfigError` for a
    processor that makes something else of two samples than either of what it makes of each.
    """
    from PIL import Image as pillow

    processor = open_processor(folder)
    draws = np.random.default_rng(0)
    images = [
        pillow.fromarray(draws.integers(0, 255, (height, width, 3), dtype=np.uint8))
        for width, height in SIZES
    ]
    mark = processor.image_token
    samples = [(f"{mark}{mark} ab", images[:2]), (f"{mark} a", images[2:])]
    apart = [_as_arrays(processor, folder, [sample]) for sample in samples]
    together, joins = _as_arrays(processor, folder, samples), {}
    for name, whole in together.items():
        parts = [found[name] for found in apart]
        joins[name] = len(parts[0]) > 1
        if not joins[name]:  # each has a dimension of one sample
            parts = [part[0] for part in parts]
        most = tuple(np.max([part.shape for part in parts], axis=0))
        most = (0, *most[1:]) if joins[name] else most
        full = [
            np.pad(part, [(0, max(0, n - m)) for m, n in zip(part.shape, most, strict=True)])
            for part in parts
        ]
        made = np.concatenate(full) if joins[name] else np.stack(full)
        if made.shape != whole.shape or not np.array_equal(made, whole):
            why = f"{type(processor).__name__} makes {name} of two samples in a way not known here"
            raise _unusable(folder, why, "take another model")
    return joins


def _as_arrays(processor: Any, folder: str, samples: Sequence[Any]) -> dict[str, Any]:
    """The entries of a batch that are no rows of tokens."""
    texts, images = [text for text, _ in samples], [list(own) for _, own in samples]
    try:
        found = processor(
            text=texts, images=images, padding=True, add_special_tokens=False, return_tensors="np"
        )
    except Exception as error:  # whatever a processor raises
        why = f"its processor makes no batch: {message_of(error).partition(chr(10))[0]}"
        raise _unusable(folder, why, "take another model") from error
    shape = found["input_ids"].shape
    return {name: value for name, value in found.items() if value.shape != shape}
