"""Data on disk in the formats that people have, written without colotrain."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WORDS = [
    "the",
    "cat",
    "naïve",
    "😀",
    "a\tb.",
    "12345",
    "\n",
    "日本語",
    "'ll",
    '"quoted"',
    "\\",
    "end",
]


def random_texts(count: int) -> list[str]:
    return [
        f"{i} " + " ".join(random.choices(WORDS, k=random.randint(1, 40))) for i in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = [json.dumps(row, ensure_ascii=random.random() < 0.5) for row in rows]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def write_dataset(folder: Path, rows: list[dict[str, Any]], num_files: int = 2) -> Path:
    """What `Dataset.save_to_disk` leaves: Arrow streams, state.json, dataset_info.json."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{num_files:05}.arrow" for i in range(num_files)]
    size = -(-len(rows) // num_files)
    for i, name in enumerate(names):
        table = pa.Table.from_pylist(rows[i * size : (i + 1) * size])
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as w,
        ):
            w.write_table(table, max_chunksize=5)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_megatron(prefix: Path, documents: list[np.ndarray], code: int, dtype: str) -> Path:
    """Documents of one or two sequences, as the description of the format says."""
    sequences, marks = [], [0]
    for document in documents:
        cut = len(document) // 2
        sequences += [document[:cut], document[cut:]] if cut else [document]
        marks.append(len(sequences))
    lengths = np.array([len(s) for s in sequences], "<i4")
    width = np.dtype(dtype).itemsize
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * width
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(marks))
    index += lengths.tobytes() + starts.astype("<i8").tobytes() + np.array(marks, "<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    np.concatenate(sequences).astype(dtype).tofile(prefix.with_name(prefix.name + ".bin"))
    return prefix


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "jsonl": lambda place, rows: write_jsonl(place / "rows.jsonl", rows),
    "parquet": lambda place, rows: write_parquet(place / "rows.parquet", rows),
    "arrow": lambda place, rows: write_dataset(place / "saved", rows),
}
