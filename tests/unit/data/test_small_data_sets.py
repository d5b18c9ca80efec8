"""Small data sets as users have them: each says what is unread, left out, cut or never learned.

What `data inspect` says of a data set is what the first lines of a run say: both print the same
notes (`test_a_run_says_what_inspect_says`).
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from colotrain.cli.main import guarded
from colotrain.errors import ConfigError
from colotrain.runs.data_preparation import prepare_data
from colotrain.runs.resolving import plan_from
from tests import chat_tokenizers

pytest.importorskip("transformers")

ROWS = 30
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
IGNORES_CALLS = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message.role }}<|sep|>\n"
    "{{ message.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|sep|>\n{% endif %}"
)
ENDED_BY_THE_NEXT_ROLE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKS_FINAL_ANSWERS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not message.tool_calls %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>"
    "{% endif %}\n{% endfor %}"
)


def said(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def asked(number: int) -> dict[str, Any]:
    return said("user", f"the weather in Rome at {number}?")


def answered(number: int, **others: Any) -> dict[str, Any]:
    return said("assistant", f"sunny at {number}", **others)


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        said("user", "the weather in Rome?"),
        said("assistant", None, tool_calls=[call]),
        said("tool", "21 degrees"),
        said("assistant", "it is sunny"),
    ]


def lines(name: str, row: Callable[[int], Any], count: int = ROWS) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(count)))

    return write


def parquet(name: str, row: Callable[[int], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([row(number) for number in range(ROWS)]), path)

    return write


def text(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(content)

    return write


def together(*writers: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for writer in writers:
            writer(folder)

    return write


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set, and what is said of it."""

    write: Callable[[Path], None]
    path: str = "data"
    tokenizer: str = "reasoning"
    template: str | None = None
    settings: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    """Patterns, each of which a note matches."""
    refuses: str | None = None
    """Pattern of the error with which preparing ends; None: it does not."""
    splits: tuple[int, int] | None = None
    packing: str | None = None
    learns: tuple[str, ...] = ()
    """Texts that are trained on in the first sample."""
    reads: tuple[str, ...] = ()
    """Texts in the first sample that are not trained on."""
    never: tuple[str, ...] = field(default=())
    """Texts that are not in the first sample."""


def prose(number: int) -> dict[str, Any]:
    return {"text": f"the weather in Rome says {number} degrees " * 3}


CASES: dict[str, Case] = {
    "files named train and eval": Case(
        write=together(lines("train.jsonl", prose, 80), lines("eval.jsonl", prose, 20)),
        splits=(80, 20),
    ),
    "files with split words at their ends": Case(
        write=together(
            lines("my-data.train.jsonl", prose, 40), lines("my-data.holdout.jsonl", prose, 10)
        ),
        splits=(40, 10),
    ),
    "a test file beside data": Case(
        write=together(lines("data.jsonl", prose, 40), lines("test.jsonl", prose, 10)),
        splits=(40, 10),
        says=("10 of 10 validation documents are trained on, too",),
    ),
    "stray files beside Parquet": Case(
        write=together(
            parquet("train-0.parquet", prose),
            text("loader.py", "import os\n" * 90),
            text("NOTICE", "a notice\n"),
            text("stats.json", '{"rows": 30}'),
        ),
        says=("loader.py", "NOTICE", "stats.json"),
        never=("import os",),
    ),
    "a JSON array": Case(
        write=text(
            "alpaca.json",
            json.dumps(
                [
                    {"instruction": f"say {i}", "input": "", "output": f"so {i}"}
                    for i in range(ROWS)
                ],
                indent=1,
            ),
        ),
        path="alpaca.json",
        learns=("so ",),
    ),
    "a table": Case(
        write=text(
            "table.csv",
            "prompt,completion\n"
            + "".join(f'"say, ""{i}""\nnow",so it is {i}\n' for i in range(ROWS)),
        ),
        path="table.csv",
        learns=("so it is ",),
        reads=('say, "',),
    ),
    "tools as JSON text": Case(
        write=parquet(
            "a.parquet",
            lambda i: {"messages": [asked(i), answered(i)], "tools": json.dumps([TOOL])},
        ),
        reads=('"name": "weather"',),
    ),
    "arguments as JSON text": Case(
        write=lines("a.jsonl", lambda i: {"messages": called('{"city": "Rome"}'), "tools": [TOOL]}),
        learns=('"arguments": {"city": "Rome"}',),
    ),
    "nulls of Parquet": Case(
        write=parquet(
            "a.parquet",
            lambda i: {
                "messages": called({"city": "Rome", "x": None} if i else {"city": None, "x": "y"})
            },
        ),
        never=("null", "None"),
    ),
    "a template without tool calls": Case(
        write=lines("a.jsonl", lambda i: {"messages": called({"city": "Rome"})}),
        tokenizer="bos",
        template=IGNORES_CALLS,
        refuses=r"renders nothing of this answer \(tool_calls\)",
    ),
    "a template without tools": Case(
        write=lines("a.jsonl", lambda i: {"messages": [asked(i), answered(i)], "tools": [TOOL]}),
        tokenizer="bos",
        template=IGNORES_CALLS,
        says=("tools",),
    ),
    "chatml with tools": Case(
        write=lines("a.jsonl", lambda i: {"messages": called({"city": "Rome"}), "tools": [TOOL]}),
        tokenizer="plain",
        settings=("data.chat_template=chatml", "data.seq_len=512"),
        reads=('"name": "weather"', "21 degrees"),
        learns=('"arguments": {"city": "Rome"}', "it is sunny"),
    ),
    "ShareGPT's system": Case(
        write=lines(
            "a.jsonl",
            lambda i: {
                "system": "in Rome",
                "conversations": [
                    {"from": "human", "value": "why?"},
                    {"from": "gpt", "value": "because"},
                ],
            },
        ),
        reads=("in Rome", "why?"),
        learns=("because",),
    ),
    "ShareGPT's calls": Case(
        write=lines(
            "a.jsonl",
            lambda i: {
                "conversations": [
                    {"from": "human", "value": "why?"},
                    {
                        "from": "function_call",
                        "value": '{"name": "weather", "arguments": {"city": "Rome"}}',
                    },
                    {"from": "observation", "value": "21 degrees"},
                    {"from": "gpt", "value": "because"},
                ],
                "tools": json.dumps([TOOL]),
            },
        ),
        tokenizer="plain",
        settings=("data.chat_template=chatml", "data.seq_len=512"),
        reads=("21 degrees",),
        learns=("because", '"city": "Rome"'),
    ),
    "Alpaca's system and history": Case(
        write=lines(
            "a.jsonl",
            lambda i: {
                "instruction": "why?",
                "input": "",
                "output": "because",
                "system": "in Rome",
                "history": [["and?", "so"]],
            },
        ),
        tokenizer="bos",
        reads=("in Rome", "and?", "why?"),
        learns=("because",),
    ),
    "the system of preference pairs": Case(
        write=lines(
            "a.jsonl",
            lambda i: {
                "system": "in Rome",
                "prompt": f"why {i}?",
                "chosen": "because",
                "rejected": "so",
            },
        ),
        settings=("train.objective=dpo",),
        reads=("in Rome",),
        learns=("because", "so"),
    ),
    "the role developer": Case(
        write=lines(
            "a.jsonl",
            lambda i: {"messages": [said("developer", "in Rome"), asked(i), answered(i)]},
        ),
        says=("developer",),
        reads=("in Rome",),
    ),
    "thinking that the template leaves out": Case(
        write=lines(
            "a.jsonl", lambda i: {"messages": [asked(i), answered(i, thinking="it is day")]}
        ),
        tokenizer="bos",
        says=("thinking",),
        never=("it is day",),
    ),
    "a name that the template leaves out": Case(
        write=lines(
            "a.jsonl",
            lambda i: {"messages": [said("user", "why?", name="Zoe Q"), answered(i)]},
        ),
        says=("name",),
        never=("Zoe Q",),
    ),
    "messages of weight 0": Case(
        write=lines(
            "a.jsonl",
            lambda i: {
                "messages": [
                    asked(i),
                    said("assistant", "wrong", weight=0),
                    said("user", "no"),
                    answered(i),
                ]
            },
        ),
        tokenizer="bos",
        reads=("wrong",),
        learns=("sunny at",),
    ),
    "messages with train: false": Case(
        write=lines(
            "a.jsonl",
            lambda i: {
                "messages": [
                    asked(i),
                    said("assistant", "wrong", **({"train": False} if i % 2 else {"loss_mask": 0})),
                    said("user", "no"),
                    answered(i),
                ]
            },
        ),
        tokenizer="bos",
        reads=("wrong",),
        learns=("sunny at",),
    ),
    "answers labelled bad": Case(
        write=lines(
            "a.jsonl", lambda i: {"prompt": "why?", "completion": "so", "label": bool(i % 2)}
        ),
        refuses=r"label: false",
    ),
    "a template that rewrites earlier turns": Case(
        write=lines("a.jsonl", lambda i: {"messages": [asked(i), answered(i)] * 3}),
        says=("each answer is a sample of its own",),
        splits=(3 * ROWS, 0),
        settings=("data.validation_fraction=0",),
    ),
    "marks around final answers": Case(
        write=lines("a.jsonl", lambda i: {"messages": called({"city": "Rome"})}),
        template=MARKS_FINAL_ANSWERS,
        reads=("21 degrees", '"city": "Rome"'),
        learns=("it is sunny<|im_end|>",),
    ),
    "a template of another tokenizer": Case(
        write=lines("a.jsonl", lambda i: {"messages": [asked(i), answered(i)]}),
        tokenizer="bos",
        settings=("data.chat_template=chatml",),
        says=(r"<\|im_start\|>, <\|im_end\|> of the chat template are no tokens",),
    ),
    "turns that the next role ends": Case(
        write=lines("a.jsonl", lambda i: {"messages": [asked(i), answered(i)] * 2}),
        template=ENDED_BY_THE_NEXT_ROLE,
        says=("learn to stop",),
    ),
    "text that ends with the end-of-text token": Case(
        write=lines("a.jsonl", lambda i: {"text": f"sunny at {i}<|im_end|>"}),
        settings=("data.seq_len=32",),
        never=("<|im_end|><|im_end|>",),
    ),
    "question and answer": Case(
        write=lines("a.jsonl", lambda i: {"question": "why?", "answer": "because"}),
        reads=("why?",),
        learns=("because",),
    ),
    "tokens": Case(
        write=lines(
            "a.jsonl",
            lambda i: {
                "input_ids": [70, 71, 72, 73],
                "labels": [-100, -100, 72, 73],
                "attention_mask": [1] * 4,
            },
        ),
        splits=(ROWS, 0),
        settings=("data.validation_fraction=0",),
    ),
    "tokens that the vocabulary lacks": Case(
        write=lines("a.jsonl", lambda i: {"input_ids": [70, 71, 9_999]}),
        refuses="9999|9,999",
    ),
    "all tokens of conversations": Case(
        write=lines("a.jsonl", lambda i: {"messages": [asked(i), answered(i)]}),
        settings=("data.loss_on=all",),
        packing="none",
    ),
    "a tokenizer that begins texts": Case(
        write=lines("a.jsonl", prose), tokenizer="bos", reads=("<|begin|>",)
    ),
    "prompts that end within a token": Case(
        write=lines(
            "a.jsonl", lambda i: {"prompt": "the weather in ", "completion": f"Rome is {i}"}
        ),
        says=("a token spans",),
    ),
    "answers behind the end of a sample": Case(
        write=lines(
            "a.jsonl",
            lambda i: {"messages": [said("user", "why? " * (200 * (i % 2))), answered(i)]},
        ),
        settings=("data.seq_len=64",),
    ),
    "empty answers": Case(
        write=lines("a.jsonl", lambda i: {"messages": [asked(i), said("assistant", "")]}),
        refuses="answer is empty",
    ),
    "columns that nothing reads": Case(
        write=lines(
            "a.jsonl", lambda i: {"messages": [asked(i), answered(i)], "id": i, "origin": "web"}
        ),
        says=("^id", "^origin"),
    ),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    chat_tokenizers.with_bos(folder / "bos")
    chat_tokenizers.with_reasoning(folder / "reasoning")
    chat_tokenizers.without_template(folder / "plain")
    return folder


def arguments(case: Case, folder: Path, tokenizers: Path) -> list[str]:
    (folder / "data").mkdir()
    case.write(folder / "data" if case.path == "data" else folder)
    found = [
        "recipe=llm-tiny",
        "data.corpus=null",
        f"data.path={folder / case.path}",
        f"data.tokenizer={tokenizers / case.tokenizer}",
        "model.args.vocab_size=512",
        *case.settings,
    ]
    if case.template is not None:
        (folder / "template.jinja").write_text(case.template)
        found.append(f"data.chat_template={folder / 'template.jinja'}")
    return found


def texts(segments: Iterable[dict[str, Any]], *, in_loss: bool) -> str:
    return "\x00".join(s["text"] for s in segments if s["in_loss"] is in_loss)


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_of_data(
    name: str,
    tokenizers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    code = guarded(["data", "inspect", *arguments(case, tmp_path, tokenizers), "--json"])
    printed = capsys.readouterr()
    if case.refuses is not None:
        assert code == 2
        assert re.search(case.refuses, printed.err)
        return
    assert code == 0, printed.err
    document = json.loads(printed.out)
    (part,) = document["parts"]
    notes = [note["text"] for note in part["notes"]]
    for pattern in case.says:
        assert any(re.search(pattern, note) for note in notes), (pattern, notes)
    if case.splits is not None:
        counts = part["documents"]
        assert (counts["train"], counts["validation"]) == case.splits
    if case.packing is not None:
        assert part["packing"] == case.packing
    segments = document["sample"]["segments"]
    whole = "".join(segment["text"] for segment in segments)
    for expected in case.learns:
        assert expected in texts(segments, in_loss=True), whole
    for expected in case.reads:
        assert expected in texts(segments, in_loss=False), whole
    for unwanted in case.never:
        assert unwanted not in whole


@pytest.mark.parametrize(
    ("validation", "why"),
    [
        ("\n", "nothing to read in validation.jsonl"),
        (None, "data.validation_fraction=0.05 keeps none"),
    ],
)
def test_a_run_says_why_there_is_no_validation(
    tmp_path: Path, validation: str | None, why: str
) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "The cat sat."}\n')
    if validation is not None:
        (tmp_path / "validation.jsonl").write_text(validation)
    given = ["recipe=llm-tiny", "data.corpus=null", f"data.path={tmp_path}", "data.tokenizer=bytes"]
    plan = plan_from(given, here=False)
    printed = io.StringIO()
    prepare_data(plan, Console(file=printed, width=100))
    assert f"there is no validation: {why}" in printed.getvalue()
    best = replace(plan, checkpoint=replace(plan.checkpoint, best_metric="validation_loss"))
    with pytest.raises(ConfigError, match="there are no validation samples"):
        prepare_data(best, Console(file=printed, width=100))


def test_a_part_of_a_mixture_with_an_empty_validation_file_is_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 99)
    (tmp_path / "held.jsonl").write_text("")
    one, two, held = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "held"))
    parts = f"[{{path: {one}, weight: 3, validation_path: {held}}}, {{path: {two}, weight: 1}}]"
    given = ["recipe=llm-tiny", "data.corpus=null", f"data.mixture={parts}", "data.tokenizer=bytes"]
    printed = io.StringIO()
    prepare_data(plan_from(given, here=False), Console(file=printed, width=100))
    assert "there is no validation: nothing to read in held.jsonl" in printed.getvalue()


def test_a_run_says_what_inspect_says(tokenizers: Path, tmp_path: Path) -> None:
    cases = (CASES[name] for name in ("the role developer", "turns that the next role ends"))
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        plan = plan_from(arguments(case, folder, tokenizers), here=False)
        printed = io.StringIO()
        prepare_data(plan, Console(file=printed, width=100))
        for pattern in case.says:
            assert re.search(f"warning: {ROWS} records: .*{pattern}", printed.getvalue())
