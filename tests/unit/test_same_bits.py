"""`scripts/same_bits.py` finds and names one bit that differs, and nothing where none does."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.pages import ROOT

RUN = "runs/one"
STEP = f"{RUN}/checkpoints/step-00000001"
EVENTS = f"{RUN}/events/rank00000-attempt0000.jsonl"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield
    for name in ("same_bits", "same_bits_compare", "same_bits_corpus"):
        sys.modules.pop(name, None)


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in content))
    else:
        path.write_text(json.dumps(content))


def parts(weight: torch.Tensor) -> dict[str, Any]:
    """The two halves of a bfloat16 tensor as two ranks write them, and their index."""
    chunks = [
        {"offsets": [row, 0], "sizes": [1, 3], "file": f"__{row}_0.distcp", "start": 0, "length": 6}
        for row in range(2)
    ]
    index = {"tensors": {"model.w": {"dtype": "bfloat16", "shape": [2, 3], "chunks": chunks}}}
    raw = {f"__{row}_0.distcp": weight[row].view(torch.uint8).numpy().tobytes() for row in (0, 1)}
    return {"index.json": index, **raw}


def left_by_a_case(folder: Path, time: float, **changed: Any) -> Path:
    """Write what a run leaves; `time` is what differs between runs of one checkout."""
    steps = [
        {"t": time, "kind": "step", "step": step, "loss": 2.5 / step, "rss": int(time)}
        for step in (1, 2)
    ]
    gradients = [{"t": time, "kind": "gradients", "step": 1, "norm": [0.5, 0.25]}]
    summary = {"status": "finished", "loss": 2.5, "tokens_per_s": time, "time": {"step_s": time}}
    output = {"words": ["run"], "code": 0, "out": json.dumps(summary), "err": f"took {time}"}
    files: dict[str, Any] = {
        f"{RUN}/plan.json": {"plugin": {"name": "zero2"}, "time": {"step_s": 0.1}},
        EVENTS: [*steps, *gradients, {"t": time, "kind": "progress", "step": int(time)}],
        **{f"{STEP}/{name}": content for name, content in parts(WEIGHT).items()},
        f"{RUN}/logs/rank0.log": {"time": time},
        "outputs.json": [output],
    }
    for name, content in (files | changed.get("files", {})).items():
        write(folder, name, content)
    return folder


WEIGHT = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).bfloat16()


def found(tmp_path: Path, **changed: Any) -> str | None:
    from same_bits_compare import difference, facts_of

    old = left_by_a_case(tmp_path / "old", 1.0)
    new = left_by_a_case(tmp_path / "new", 2.0, **changed)
    result: str | None = difference(facts_of(old, Path("/a")), facts_of(new, Path("/b")))
    return result


def test_nothing_is_found_where_only_times_and_memory_differ(tmp_path: Path) -> None:
    assert found(tmp_path) is None


def test_one_bit_of_a_checkpoint_is_named_with_its_tensor_and_place(tmp_path: Path) -> None:
    weight = WEIGHT.clone()
    weight.view(torch.int16)[1, 2] ^= 1  # the last bit of 6.0
    files = {f"{STEP}/{name}": content for name, content in parts(weight).items()}
    said = found(tmp_path, files=files)
    assert said == f"./{STEP}: model.w: element [1, 2]: 6.0 → 6.03125 (1 of 6 differ)"


def test_the_sign_of_a_zero_differs(tmp_path: Path) -> None:
    from same_bits_compare import Stored, differing

    one, other = (
        Stored("float32", (), torch.tensor(value).view(1).view(torch.uint8).numpy().tobytes())
        for value in (0.0, -0.0)
    )
    assert differing(one, other, "x") == "x: element []: 0.0 → -0.0 (1 of 1 differ)"
    assert differing(0.0, -0.0, "x") == "x: 0.0 → -0.0"
    assert differing(float("nan"), float("nan"), "x") is None


def test_the_loss_of_one_step_is_named_before_what_follows_from_it(tmp_path: Path) -> None:
    weight = WEIGHT + 1
    files = {f"{STEP}/{name}": content for name, content in parts(weight).items()}
    rows = [{"t": 0, "kind": "step", "step": s, "loss": 2.5 / s + 1e-15, "rss": 0} for s in (1, 2)]
    rows += [{"t": 0, "kind": "gradients", "step": 1, "norm": [0.5, 0.26]}]
    said = found(tmp_path, files={**files, EVENTS: rows})
    assert said == f"./{EVENTS.removesuffix('.jsonl')}/step/1/loss: 2.5 → 2.500000000000001"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            f"{RUN}/plan.json",
            {"plugin": {"name": "zero3"}, "time": {"step_s": 0.1}},
            "plugin/name: 'zero2' → 'zero3'",
        ),
        (
            f"{RUN}/plan.json",
            {"plugin": {"name": "zero2"}, "time": {"step_s": 0.2}},
            "time/step_s: 0.1 → 0.2",
        ),
        (
            f"{RUN}/plan.json",
            {"plugin": {"name": "zero2", "more": 1}, "time": {"step_s": 0.1}},
            "plugin/more: only NEW has it",
        ),
        (f"{RUN}/samples.jsonl", [{"step": 1}], "samples/row/1: only NEW has it"),
        ("out/model.safetensors", b"abc", "out/model.safetensors: only NEW has it"),
    ],
)
def test_one_key_or_file_is_named(tmp_path: Path, name: str, content: Any, said: str) -> None:
    assert str(found(tmp_path, files={name: content})).endswith(said)


def test_what_a_command_prints_and_how_it_ends_is_compared(tmp_path: Path) -> None:
    summary = {"status": "failed", "loss": 2.5, "tokens_per_s": 0, "time": {"step_s": 0}}
    output = {"words": ["run"], "code": 0, "out": json.dumps(summary), "err": ""}
    said = found(tmp_path / "a", files={"outputs.json": [output]})
    assert said == "./output 1 run/status: 'finished' → 'failed'"
    output |= {"code": 2, "err": "note: x\nerror: no"}
    said = found(tmp_path / "b", files={"outputs.json": [output]})
    assert said == "./output 1 run: exit code: 0 → '2, error: no'"


def fake_checkout(folder: Path, prints: str, *, code: int = 0) -> Path:
    write(folder, "colotrain/__init__.py", b"")
    error = "sys.stderr.write('error: not so\\n'); " if code else ""
    lines = f"import sys; print({prints!r}); {error}sys.exit({code})"
    write(folder, "colotrain/__main__.py", lines.encode())
    return folder


def ends_with(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    same_bits: ModuleType = __import__("same_bits")
    cases = [same_bits.corpus.Case("one", (("plan", "--json"),))]
    monkeypatch.setattr(same_bits.corpus, "cases", lambda: cases)
    monkeypatch.setattr("sys.argv", ["same_bits.py", *words])
    try:
        return int(same_bits.main())
    except SystemExit as error:
        return int(error.code or 0)


def test_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, same, other, refuses = (
        str(fake_checkout(tmp_path / name, prints, code=code))
        for name, prints, code in (
            *(("one", '{"loss": 1.0}', 0), ("same", '{"loss": 1.0}', 0)),
            *(("other", '{"loss": 1.5}', 0), ("refuses", "", 2)),
        )
    )
    assert ends_with(monkeypatch, one, same) == 0
    assert capsys.readouterr().out.endswith("1 cases: 1 same\n")
    assert ends_with(monkeypatch, one, other) == 4
    assert re.search(r"one \(\d+ s\): ./output 1 plan/loss: 1.0 → 1.5\n", capsys.readouterr().out)
    assert ends_with(monkeypatch, refuses, refuses) == 0
    assert re.search(r"refused  one \(\d+ s\): plan: error: not so\n", capsys.readouterr().out)
    assert ends_with(monkeypatch, one, str(tmp_path)) == 2
    assert ends_with(monkeypatch, one, same, "--only", "nothing") == 2


def test_each_pair_of_values_that_is_allowed_is_in_a_case() -> None:
    import same_bits_corpus as corpus

    excluded = {
        frozenset(pair)
        for ones, others, _ in corpus.EXCLUDED
        for pair in itertools.product(ones, others)
    }
    rows = list(corpus.pairwise())
    held = {frozenset(p) for row in rows for p in itertools.combinations(row.values(), 2)}
    wanted = {
        frozenset(pair)
        for one, two in itertools.combinations(corpus.DIMENSIONS.values(), 2)
        for pair in itertools.product(one, two)
    }
    assert held == wanted - excluded
    assert len(rows) <= 100
