"""Data of people's own formats, through the real launcher: the same samples after a resume."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import read_whole
from tests.dist.conftest import SMALL, Colotrain
from tests.formats import WRITERS, random_texts, write_jsonl, write_megatron
from tests.representatives import representatives


def write_chat(path: Path, count: int) -> None:
    rows = []
    for i in range(count):
        turns = random.randint(1, 3)
        rows.append(
            {
                "messages": [
                    {"role": role, "content": f"{role} {i} " + "ab" * random.randint(1, 9)}
                    for _ in range(turns)
                    for role in ("user", "assistant")
                ]
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def losses(summary: dict) -> list[float]:
    return [loss for _, loss in summary["loss"]["history"]]


def samples(colotrain: Colotrain, name: str) -> dict[int, list[int]]:
    """Step → the samples that all ranks used, of the attempt that counts."""
    found: dict[int, dict[int, list[int]]] = {}
    for event in colotrain.events(name):
        if event.kind == "step":
            found.setdefault(event.fields["step"], {})[event.rank or 0] = event.fields["samples"]
    return {step: sorted(i for ids in ranks.values() for i in ids) for step, ranks in found.items()}


def test_a_run_on_chats_goes_on_exactly_where_it_was_stopped(colotrain: Colotrain) -> None:
    write_chat(colotrain.cwd / "chat.jsonl", 60)
    settings = (
        *SMALL,
        "plugin=zero3",
        "data.corpus=null",
        "data.path=chat.jsonl",
        "data.chat_template=chatml",
        "data.packing=whole",
        "data.isolate=true",
        "data.seq_len=128",
        "optim.schedule.name=constant",
    )
    straight = colotrain.run(*settings, "train.max_steps=8", "name=straight")
    colotrain.run(*settings, "train.max_steps=3", "name=part")
    result = colotrain("resume", "part", "train.max_steps=8", "cluster.procs_per_node=1", "--json")
    assert result.code == 0, result.err
    assert samples(colotrain, "part") == samples(colotrain, "straight")
    assert losses(result.json) == pytest.approx(losses(straight), abs=1e-5)
    assert straight["loss"]["last"] < straight["loss"]["first"]


def write_nanogpt(place: Path, dtype: str) -> str:
    path = place / {"u2": "a.bin", "u4": "a.u32.bin"}[dtype]
    np.random.default_rng().integers(0, 256, 1600).astype(f"<{dtype}").tofile(path)
    return f"data.path={path.name}"


def write_text(place: Path) -> str:
    (place / "text").mkdir()
    for i, text in enumerate(random_texts(40)):
        (place / "text" / f"{i}.txt").write_text(text)
    return "data.path=text"


def write_records(kind: str, place: Path) -> str:
    return f"data.path={WRITERS[kind](place, [{'text': t} for t in random_texts(60)]).name}"


def write_answers(place: Path) -> str:
    rows = [{"prompt": text, "completion": text[::-1]} for text in random_texts(40)]
    return f"data.path={write_jsonl(place / 'answers.jsonl', rows).name}"


def write_chats(place: Path) -> str:
    write_chat(place / "chat.jsonl", 40)
    return "data.path=chat.jsonl"


def write_pairs(place: Path) -> str:
    draw = np.random.default_rng()
    documents = [draw.integers(0, 256, draw.integers(2, 60)) for _ in range(60)]
    write_megatron(place / "pair", documents, 8, "<u2")
    return "data.path=pair"


def write_mixture(place: Path) -> str:
    write_chats(place)
    write_nanogpt(place, "u2")
    return "data.mixture=[{path:chat.jsonl,weight:2},{path:a.bin,weight:1}]"


FORMATS: dict[str, Callable[[Path], str]] = {
    "text": write_text,
    **{kind: functools.partial(write_records, kind) for kind in WRITERS},
    "prompt and completion": write_answers,
    "chat": write_chats,
    "nanogpt 16 bit": functools.partial(write_nanogpt, dtype="u2"),
    "nanogpt 32 bit": functools.partial(write_nanogpt, dtype="u4"),
    "megatron": write_pairs,
    "mixture": write_mixture,
}
"""Writes random data into a folder; the setting that trains on them."""


@pytest.mark.parametrize("kind", representatives(FORMATS, kept=["text", "chat", "mixture"]))
def test_in_the_middle_of_any_format_a_run_goes_on_bit_for_bit(
    colotrain: Colotrain, kind: str
) -> None:
    """Over more than an epoch; the checkpoint is taken up by another run."""
    setting = FORMATS[kind](colotrain.cwd)
    options = (*SMALL, "plugin=zero2", "data.corpus=null", setting)
    options += ("data.chat_template=chatml",) if kind in ("chat", "mixture") else ()
    options += ("data.seq_len=96",) if kind == "chat" else ()  # the answers begin behind 32 tokens
    straight = colotrain.run(*options, "train.max_steps=8", "checkpoint.every=3", "name=straight")
    half = colotrain.rundir("straight").checkpoint(6)
    rest = colotrain.run(*options, "train.max_steps=8", f"checkpoint.resume={half}", "name=rest")
    assert losses(rest) == losses(straight)[6:]
    used = samples(colotrain, "straight")
    assert samples(colotrain, "rest") == {step: used[step] for step in (7, 8)}
    ends = [read_whole(colotrain.rundir(name).checkpoint(8)) for name in ("straight", "rest")]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def test_a_mixture_gives_every_number_of_ranks_the_same_samples(colotrain: Colotrain) -> None:
    write_chat(colotrain.cwd / "chat.jsonl", 40)
    np.random.default_rng(1).integers(0, 256, 9000).astype(np.uint16).tofile(
        colotrain.cwd / "tokens.bin"
    )
    (colotrain.cwd / "text").mkdir()
    (colotrain.cwd / "text" / "a.txt").write_text("some text of mine " * 300)
    mixture = "[{path:chat.jsonl,weight:2},{path:tokens.bin,weight:1},{path:text,weight:1}]"
    found = []
    for ranks in (1, 2):
        colotrain.run(
            *SMALL,
            "plugin=zero2",
            "data.corpus=null",
            f"data.mixture={mixture}",
            "data.chat_template=chatml",
            f"cluster.procs_per_node={ranks}",
            "train.max_steps=4",
            f"name=ranks-{ranks}",
        )
        found.append(samples(colotrain, f"ranks-{ranks}"))
    assert found[0] == found[1]
    assert len(found[0][4]) == 8


def test_bad_records_and_cut_documents_are_told_at_the_start(colotrain: Colotrain) -> None:
    write_chat(colotrain.cwd / "chat.jsonl", 30)
    with (colotrain.cwd / "chat.jsonl").open("a") as file:
        file.write("nothing\n")
    settings = (*SMALL, "data.corpus=null", "data.path=chat.jsonl", "data.chat_template=chatml")
    settings = (*settings, "data.seq_len=96")
    stopped = colotrain("run", *settings, "train.max_steps=1")
    assert stopped.code == 2
    assert "chat.jsonl:31: expected a record that can be used (not JSON" in stopped.err
    result = colotrain("run", *settings, "train.max_steps=1", "data.on_bad=skip")
    assert result.code == 0, result.err
    assert "warning: 1 bad records are left out" in result.err
    assert "documents are cut at data.seq_len=96" in result.err


def test_samples_without_a_token_to_train_on_are_told_and_never_all_there_is(
    colotrain: Colotrain,
) -> None:
    long, short = ({"prompt": "p" * n, "completion": "c"} for n in (90, 9))
    path = colotrain.cwd / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [long] * 40))
    settings = (*SMALL, "data.corpus=null", "data.path=answers.jsonl", "train.max_steps=1")
    settings = (*settings, "data.validation_fraction=0", "train.eval_steps=0")
    refused = colotrain("run", *settings)
    assert refused.code == 2
    assert "data.seq_len=32: expected samples with a token to train on" in refused.err
    path.write_text("".join(json.dumps(row) + "\n" for row in [long, short, short] * 10))
    result = colotrain("run", *settings)
    assert result.code == 0, result.err
    assert "10 of them end before their first token that is trained on" in result.err


def test_the_python_api_trains_looks_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = Path(__file__).parents[2] / "scripts" / "notebook_example.py"
    done = subprocess.run(
        [sys.executable, str(script), "picture.png"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "finished: loss" in done.stdout
    assert "embed.weight                     frozen" in done.stdout
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert done.stderr == ""
