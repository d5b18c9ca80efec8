"""Conversations in every shape that files have them, against transformers' own rendering.

For each shape stands by hand which messages it means. The reference renders them with
`AutoTokenizer.apply_chat_template`: up to each answer, and with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colotrain.data.prepare.conversations import CHATML
from colotrain.data.prepare.tokens import prepare
from colotrain.spec.plan import DataPlan
from tests import chat_tokenizers

transformers = pytest.importorskip("transformers")

Row = tuple[list[int], list[int]]
"""The tokens of a sample, and 1 for every token that is trained on."""


def said(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


ASK, SUNNY = said("user", "Weather in Rome?"), said("assistant", "Sunny.")
WHY = said("user", "Why?")
SO = said("assistant", "Because it says so, at 21 degrees: é 😀.")
SYSTEM = said("system", "You tell the weather.")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say the weather <in> a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALLED = [ASK, {"role": "assistant", "tool_calls": [CALL]}, said("tool", "21, sunny"), SUNNY]
THOUGHT = said("assistant", "Sunny.", reasoning_content="It is said to be so.")


def as_text(call: dict[str, Any]) -> dict[str, Any]:
    inner = call["function"]
    return {**call, "function": {**inner, "arguments": json.dumps(inner["arguments"])}}


SHAPES: dict[str, dict[str, Any]] = {
    "messages": {"record": {"messages": [SYSTEM, ASK, SUNNY, WHY, SO]}},
    "parts of text": {
        "record": {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "Sunny."}]},
            ]
        },
        "messages": [ASK, SUNNY],
    },
    "ShareGPT with a system": {
        "record": {
            "id": "7",
            "system": SYSTEM["content"],
            "conversations": [
                {"from": "human", "value": ASK["content"]},
                {"from": "gpt", "value": SUNNY["content"]},
                {"from": "human", "value": WHY["content"]},
                {"from": "gpt", "value": SO["content"]},
            ],
        },
        "messages": [SYSTEM, ASK, SUNNY, WHY, SO],
    },
    "ShareGPT with tools": {
        "record": {
            "conversations": [
                {"from": "human", "value": ASK["content"]},
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "21, sunny"},
                {"from": "gpt", "value": SUNNY["content"]},
            ],
            "tools": json.dumps([TOOL]),
        },
        "messages": CALLED,
        "tools": [TOOL],
    },
    "Alpaca": {
        "record": {"instruction": "Weather?", "input": "Rome", "output": "Sunny."},
        "messages": [said("user", "Weather?\n\nRome"), SUNNY],
    },
    "Alpaca with system and history": {
        "record": {
            "system": SYSTEM["content"],
            "history": [[ASK["content"], SUNNY["content"]]],
            "instruction": WHY["content"],
            "input": "",
            "output": SO["content"],
        },
        "messages": [SYSTEM, ASK, SUNNY, WHY, SO],
    },
    "question and answer": {
        "record": {"question": ASK["content"], "answer": SUNNY["content"]},
        "messages": [ASK, SUNNY],
    },
    "prompt and completion of messages": {
        "record": {"prompt": [ASK, SUNNY, WHY], "completion": [SO]},
        "messages": [ASK, SUNNY, WHY, SO],
        "trained": [3],
    },
    "tools with arguments as text": {
        "record": {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "tool_calls": [as_text(CALL)]},
                *CALLED[2:],
            ],
            "tools": [TOOL],
        },
        "messages": CALLED,
        "tools": [TOOL],
    },
    "OpenAI's functions": {
        "record": {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {"role": "function", "name": "weather", "content": "21, sunny"},
                SUNNY,
            ],
            "functions": [TOOL["function"]],
        },
        "messages": [*CALLED[:2], said("tool", "21, sunny", name="weather"), SUNNY],
        "tools": [TOOL],
    },
    "messages that are not trained on": {
        "record": {
            "messages": [
                ASK,
                {**SUNNY, "weight": 0},
                WHY,
                {**SO, "weight": 1},
                said("user", "And?"),
                said("assistant", "No more.", train=False),
            ]
        },
        "messages": [ASK, SUNNY, WHY, SO, said("user", "And?"), said("assistant", "No more.")],
        "trained": [3],
    },
    "reasoning": {
        "record": {"messages": [ASK, THOUGHT, WHY, {**SO, "thinking": "Why, indeed?"}]},
        "messages": [ASK, THOUGHT, WHY, {**SO, "reasoning_content": "Why, indeed?"}],
    },
    "settings of the template": {
        "record": {"messages": [ASK, SUNNY], "chat_template_kwargs": {"enable_thinking": False}},
        "messages": [ASK, SUNNY],
        "settings": {"enable_thinking": False},
    },
    "a preference pair with a system": {
        "record": {
            "system": SYSTEM["content"],
            "prompt": [ASK, SUNNY, WHY],
            "chosen": [SO],
            "rejected": [said("assistant", "No idea.")],
        },
        "messages": [SYSTEM, ASK, SUNNY, WHY, SO],
        "rejected": [SYSTEM, ASK, SUNNY, WHY, said("assistant", "No idea.")],
        "trained": [4],
    },
}
TOKENIZERS: dict[str, Callable[[Path], Any]] = {
    "with BOS": chat_tokenizers.with_bos,
    "with reasoning": chat_tokenizers.with_reasoning,
    "without a template": chat_tokenizers.without_template,
}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    found = TOKENIZERS[request.param](folder)
    found.folder = folder
    return found


def reference(tokenizer: Any, messages: list[Any], trained: list[int], **given: Any) -> list[Row]:
    """Each answer after what the model is given for it: in one sample where that is a part of the
    whole conversation, otherwise in one of its own."""
    given["chat_template"] = tokenizer.chat_template or CHATML

    def render(count: int, *, prompt: bool = False) -> list[int]:
        found = tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt=prompt, return_dict=False, **given
        )
        return list(found)

    newline = tokenizer.encode("\n", add_special_tokens=False)
    turns = []
    for index in trained:
        before, upto = render(index, prompt=True), render(index + 1)
        assert upto[: len(before)] == before
        stop = len(upto)
        if given["chat_template"] == CHATML:  # its marks end before the newline
            assert upto[-len(newline) :] == newline
            stop -= len(newline)
        turns.append((upto, len(before), stop))
    whole = render(len(messages))
    if not all(whole[: len(upto)] == upto for upto, _, _ in turns):
        return [
            (upto, [int(start <= at < stop) for at in range(len(upto))])
            for upto, start, stop in turns
        ]
    mask = [int(any(start <= at < stop for _, start, stop in turns)) for at in range(len(whole))]
    return [(whole, mask)]


SAID = "{% for m in messages %}<|start|>{{ m.role }}<|sep|>HERE<|eot|>{% endfor %}"
MARKED = {
    "answers": "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
    "everybody": "{% generation %}{{ m.content }}{% endgeneration %}",
    "the last turn": "{% if loop.last %}{%- generation -%}{{ m.content }}!{%- endgeneration -%}"
    "{% else %}{{ m.content }}{% endif %}",
    "two blocks of a turn": "{% generation %}{{ m.content }}{% endgeneration %} and "
    "{% generation %}{{ m.role }}{% endgeneration %}",
    "the end of a word": "wea{% generation %}ther{{ m.content }}\n{% endgeneration %}\n\n",
}


@pytest.mark.parametrize("marks", list(MARKED))
def test_the_mask_is_transformers_own_where_the_template_has_marks(
    marks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    tokenizer = chat_tokenizers.with_bos(tmp_path / "tokenizer")
    tokenizer.folder = tmp_path / "tokenizer"
    template = tmp_path / "marks.jinja"
    template.write_text(SAID.replace("HERE", MARKED[marks]))
    messages = [SYSTEM, ASK, SUNNY, WHY, SO]
    path = write(tmp_path, "jsonl", {"messages": messages})
    found = tokenizer.apply_chat_template(
        messages,
        chat_template=template.read_text(),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    expected = [(found["input_ids"], found["assistant_masks"])]
    assert any(expected[0][1])
    plan = plan_of(path, tokenizer, chat_template=str(template))
    assert prepared_rows(plan) == expected


def prepared_rows(plan: DataPlan) -> list[Row]:
    found = prepare(plan)
    tokens, targets = found.tokens("train").tolist(), found.targets("train")
    assert targets is not None
    stops = found.document_ends("train")
    assert stops is not None
    starts = [0, *stops[:-1].tolist()]
    return [
        (tokens[start:stop], targets[start:stop].tolist())
        for start, stop in zip(starts, stops.tolist(), strict=True)
    ]


def plan_of(path: Path, tokenizer: Any, **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        "source": "path",
        "paths": (str(path),),
        "seq_len": 400,
        "tokenizer": str(tokenizer.folder),
        "chat_template": None if tokenizer.chat_template else "chatml",
        "shuffle": True,
        "validation_fraction": 0.0,
        "workers": 1,
    }
    return DataPlan(**{**settings, **changes})


def write(folder: Path, ending: str, record: dict[str, Any]) -> Path:
    path = folder / f"rows.{ending}"
    if ending == "jsonl":
        path.write_text(json.dumps(record) + "\n")
        return path
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist([record]), path)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_tokens_and_targets_are_those_of_transformers(
    shape: str, ending: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    case = SHAPES[shape]
    messages = case.get("messages", case["record"].get("messages"))
    trained = case.get("trained", [i for i, m in enumerate(messages) if m["role"] == "assistant"])
    given = {**case.get("settings", {}), "tools": case.get("tools")}
    expected = reference(tokenizer, messages, trained, **given)
    if "rejected" in case:
        expected += reference(tokenizer, case["rejected"], trained, **given)
    plan = plan_of(write(tmp_path, ending, case["record"]), tokenizer, pairs="rejected" in case)
    assert prepared_rows(plan) == expected
