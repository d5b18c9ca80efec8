"""Tokenising a generated corpus: rate and peak memory, of one process and of several.

    python benchmarks/tokenise.py --documents 1000000 --workers 1,2

Documents are JSON lines of 10 to 100 made-up words, written shard by shard; the tokenizer is
byte-level BPE that was trained on some of them before. Memory is the sum of the proportional set
sizes of this process and those below it, looked at ten times a second; the corpus's size stands
beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from pathlib import Path

import psutil

from colotrain.data.prepare.tokens import prepare
from colotrain.spec.plan import DataPlan

SHARDS = 16


def write_corpus(folder: Path, documents: int) -> int:
    """Write the shards; returns their bytes."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(20_000)]
    lines = []
    for _ in range(2_000):
        text = " ".join(draw.choices(words, k=draw.randint(10, 100)))
        lines.append(text)
    folder.mkdir()
    per_shard = -(-documents // SHARDS)
    for shard in range(SHARDS):
        with (folder / f"{shard:03}.jsonl").open("w") as file:
            for number in range(shard * per_shard, min((shard + 1) * per_shard, documents)):
                text = f"{number} {lines[draw.randrange(len(lines))]}"
                file.write(json.dumps({"text": text}) + "\n")
    return sum(path.stat().st_size for path in folder.iterdir())


class Memory:
    """The most memory this process and its children have held together."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._done.wait(0.1):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except (psutil.Error, FileNotFoundError):
                    continue
            self.peak = max(self.peak, total)


def plan_of(path: Path, **changes: object) -> DataPlan:
    settings = {
        "source": "path",
        "paths": (str(path),),
        "seq_len": 256,
        "shuffle": True,
        "validation_fraction": 0.01,
        **changes,
    }
    return DataPlan(**settings)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--workers", default="1,2", help="numbers of processes, as in 1,2")
    parser.add_argument("--folder", help="where to write the corpus (by default the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder)
        write_corpus(place / "few", 2_000)
        tokenizer = prepare(plan_of(place / "few", tokenizer="bpe-8000"), cache=place / "c0")
        size = write_corpus(place / "many", options.documents)
        print(f"{options.documents:,} documents, {size / 2**20:,.0f} MiB in {SHARDS} shards")
        for workers in map(int, options.workers.split(",")):
            plan = plan_of(place / "many", tokenizer=str(tokenizer.tokenizer), workers=workers)
            began, cpu = time.perf_counter(), time.process_time()
            with Memory() as memory:
                made = prepare(plan, cache=place / f"cache-{workers}")
            seconds = time.perf_counter() - began
            rate = (made.num_train + made.num_validation) / seconds
            facts = f"{seconds:.0f} s, {options.documents / seconds:,.0f} documents/s"
            facts += f", {rate / 1e6:.2f} M tokens/s, peak memory {memory.peak / 2**20:,.0f} MiB"
            if workers == 1:
                rate *= seconds / (time.process_time() - cpu)
                facts += f"; {rate / 1e6:.2f} M tokens per second of processor time"
            print(f"workers={workers}: {facts}", flush=True)


if __name__ == "__main__":
    main()
