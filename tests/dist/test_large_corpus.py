"""A corpus of 400,000 documents is tokenised in bounded memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENTS, SHARDS = 400_000, 8
MORE_MIB = 16
"""For ten times as many documents, 34 MiB more of them."""
TOKENISE = """
import json, resource, sys, time
from pathlib import Path
from colotrain.data.prepare.tokens import prepare
from colotrain.spec.plan import DataPlan

began = time.perf_counter()
made = prepare(
    DataPlan(source="path", paths=(sys.argv[1],), seq_len=64, tokenizer="bytes", shuffle=True,
             validation_fraction=0.01, workers=1),
    cache=Path(sys.argv[1] + "-cache"),
)
seconds = time.perf_counter() - began
ends = {split: made.document_ends(split) for split in ("train", "validation")}
print(json.dumps({
    "tokens": made.num_train + made.num_validation,
    "documents": sum(map(len, ends.values())),
    "seconds": seconds,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def write_corpus(folder: Path, documents: int) -> int:
    """JSON lines in shards; the number of their bytes and separators as tokens."""
    draw, num_tokens = random.Random(), 0
    folder.mkdir()
    for shard in range(SHARDS):
        with (folder / f"{shard:02}.jsonl").open("w") as file:
            for number in range(shard * documents // SHARDS, (shard + 1) * documents // SHARDS):
                text = f"{number} " + "word " * draw.randint(1, 30)
                num_tokens += len(text) + 1
                file.write(json.dumps({"text": text}) + "\n")
    return num_tokens


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_times_as_many_documents_take_no_more_memory(tmp_path: Path) -> None:
    found = []
    for documents in (DOCUMENTS // 10, DOCUMENTS):
        corpus = tmp_path / str(documents)
        num_tokens = write_corpus(corpus, documents)
        size_mib = sum(path.stat().st_size for path in corpus.iterdir()) / 2**20
        command = [sys.executable, "-c", TOKENISE, str(corpus)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=True)
        told = json.loads(done.stdout)
        rate = told["documents"] / told["seconds"]
        print(f"{told}, corpus {size_mib:.0f} MiB, {rate:,.0f} documents/s")
        assert (told["documents"], told["tokens"]) == (documents, num_tokens)
        found.append(told["peak_mib"])
    assert found[1] - found[0] < MORE_MIB
