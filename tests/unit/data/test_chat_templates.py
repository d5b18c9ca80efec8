"""Which tokens are trained on under templates of every kind, and what is told about the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from colotrain.data.prepare import templates
from colotrain.data.prepare.conversations import CHATML, Rendered, Renderer
from colotrain.data.prepare.records import BadRecord
from colotrain.data.prepare.tokens import notes_of, prepare_shards
from colotrain.data.read.packing import packing_of
from colotrain.errors import ColotrainError, ConfigError
from colotrain.spec.plan import DataPlan

Messages = list[dict[str, Any]]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def rendered(template: str | None, loss_on: str = "answers", **record: Any) -> list[Rendered]:
    renderer = Renderer(columns={}, loss_on=loss_on, template=template, tokens=TOKENS)
    return renderer.documents(record)


def marked(found: Rendered) -> str:
    """The text, with what is trained on in angle brackets."""
    text, at = "", 0
    assert found.answers is not None
    for start, stop in found.answers:
        text += f"{found.text[at:start]}<{found.text[start:stop]}>"
        at = stop
    return text + found.text[at:]


TWO = [user("one?"), answer("1"), user("two?"), answer("2")]
PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
"""As Phi 3's: the conversation ends with a token that no earlier turn has."""
MISTRAL = (
    "{% set system = messages[0].content if messages[0].role == 'system' else none %}"
    "{% set rest = messages[1:] if system else messages %}{{ bos_token }}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "[INST] {{ system + '\n\n' if system and loop.last else '' }}{{ m.content }}[/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""As Mistral's: the system message stands in the last question, and nowhere once it is answered."""
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "[assistant]{{ m.content.split('</think>')[-1] }};{% else %}[{{ m.role }}]{{ m.content }};"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
"""As DeepSeek R1's: answers lose their reasoning, although generation begins with it."""
QWEN_3 = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}(no thought)"
    "{% endif %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""As Qwen 3's: it writes a thought before the last answer alone."""
GLM = (
    "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<{{ m.role }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As Llama 3's: the text begins with the first message, and without one with its prompt alone."""
LAST = (
    "{% for m in messages %}[{{ m.role }}]{% if loop.last %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
EVERYBODY = (
    "{% for m in messages %}[{{ m.role }}]{% generation %}{{ m.content }};{% endgeneration %}"
    "{% endfor %}"
)
TWO_BLOCKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}|{% generation %};{% endgeneration %}"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
NO_END = TWO_BLOCKS.replace("{% generation %};{% endgeneration %}", ";")

CASES: list[tuple[str, Messages, list[str], str]] = [
    (
        PHI_3,
        TWO,
        [
            "<|user|>\none?<|end|>\n<|assistant|>\n<1<|end|>\n</s>>",
            "<|user|>\none?<|end|>\n<|assistant|>\n1<|end|>\n"
            "<|user|>\ntwo?<|end|>\n<|assistant|>\n<2<|end|>\n</s>>",
        ],
        "each answer is a sample of its own",
    ),
    (
        MISTRAL,
        [{"role": "system", "content": "Be."}, *TWO],
        [
            "<s>[INST] Be.\n\none?[/INST]< 1</s>>",
            "<s>[INST] one?[/INST] 1</s>[INST] Be.\n\ntwo?[/INST]< 2</s>>",
        ],
        "each answer is a sample of its own",
    ),
    (MISTRAL, TWO, ["<s>[INST] one?[/INST]< 1</s>>[INST] two?[/INST]< 2</s>>"], ""),
    (
        R1,
        [user("one?"), answer("<think>I count.</think>1"), user("two?"), answer("2")],
        ["[user]one?;[assistant]<1;>[user]two?;[assistant]<2;>"],
        "content of messages of the role assistant is not in the text",
    ),
    (R1, TWO, ["[user]one?;[assistant]<1;>[user]two?;[assistant]<2;>"], "beginning of a part of"),
    (
        QWEN_3,
        [user("one?"), answer("1"), answer("2")],
        [
            "[user]one?;[assistant]<(no thought)1;>",
            "[user]one?;[assistant](no thought)1;[assistant]<(no thought)2;>",
        ],
        "each answer is a sample of its own",
    ),
    (
        GLM,
        TWO,
        ["[gMASK]<|user|>\none?<|assistant|>\n<1><|user|>\ntwo?<|assistant|>\n<2>"],
        "without a token that ends them",
    ),
    (
        LLAMA_3,
        [answer("0"), *TWO[:2]],
        ["<s><assistant><0;><user>one?;<assistant><1;>"],
        "",
    ),
    (LAST, TWO, ["[user]one?;[assistant]1;[user]two?;[assistant]<2;>"], ""),
    (EVERYBODY, TWO, ["[user]<one?;>[assistant]<1;>[user]<two?;>[assistant]<2;>"], ""),
    (
        EVERYBODY,
        [TWO[0], {**TWO[1], "weight": 0}, *TWO[2:]],
        ["[user]<one?;>[assistant]1;[user]<two?;>[assistant]<2;>"],
        "",
    ),
    (TWO_BLOCKS, TWO, ["[user]one?;[assistant]<1>|<;>[user]two?;[assistant]<2>|<;>"], ""),
    (
        NO_END,
        TWO,
        ["[user]one?;[assistant]<1>|;[user]two?;[assistant]<2>|;"],
        "without a token that ends them",
    ),
    (
        PLAIN,
        [{"role": "developer", "content": "Be."}, *TWO[:2]],
        ["[system]Be.;[user]one?;[assistant]<1;>"],
        "rendered as system",
    ),
    (
        PLAIN,
        [user("one?"), answer("1", reasoning_content="I count.")],
        ["[user]one?;[assistant]<1;>"],
        "the reasoning_content of messages of the role assistant is not in the text",
    ),
    (
        PLAIN,
        [{**user("one?"), "train": True}, answer("1")],
        ["[user]one?;[assistant]<1;>"],
        "`train` of another role has no effect",
    ),
]


@pytest.mark.parametrize(("template", "messages", "expected", "note"), CASES)
def test_what_is_trained_on_and_what_is_told(
    template: str, messages: Messages, expected: list[str], note: str
) -> None:
    found = rendered(template, messages=messages)
    assert [marked(one) for one in found] == expected
    told = {text for one in found for text in one.notes}
    assert bool(told) == bool(note)
    assert not note or any(note in text for text in told)


@pytest.mark.parametrize("template", [PLAIN, CHATML, TWO_BLOCKS])
@pytest.mark.parametrize("flag", ["weight", "train", "loss_mask"])
def test_a_message_that_is_not_to_be_trained_on_is_not(template: str, flag: str) -> None:
    without = [TWO[0], {**TWO[1], flag: 0}, *TWO[2:]]
    (found,), (whole,) = (rendered(template, messages=m) for m in (without, TWO))
    assert found.text == whole.text
    assert found.answers == whole.answers[-len(whole.answers) // 2 :]
    (everything,) = rendered(template, "all", messages=without)
    start, stop = everything.answers[0][1], everything.answers[1][0]
    assert everything.text[start:stop].strip().removeprefix("[assistant]")[0] == "1"
    with pytest.raises(BadRecord, match="every answer is marked as not to be trained on"):
        rendered(template, messages=[TWO[0], {**TWO[1], flag: 0}])
    with pytest.raises(BadRecord, match=f"message 2: {flag}: expected 0 or 1, not 0.5"):
        rendered(template, messages=[TWO[0], {**TWO[1], flag: 0.5}])


CALLS = PLAIN.replace(
    "{{ m.content }};", "{% for c in m.tool_calls %}SHOWN{% endfor %}{{ m.content }};"
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ c.function.name + c.function.arguments }}", 'add{"a": "x", "b": 2}'),
        ("{{ c.function.name }}{{ c.function.arguments }}", 'add{"a": "x", "b": 2}'),
        ("{{ c.function.name }}{{ c.function.arguments | tojson }}", 'add{"a": "x", "b": 2}'),
        (
            "{{ c.function.name }}{{ c.function.arguments | tojson(separators=(',', ':')) }}",
            'add{"a":"x","b":2}',
        ),
        (
            "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>"
            "{% endfor %}",
            "add<a=x><b=2>",
        ),
    ],
)
@pytest.mark.parametrize("arguments", [{"a": "x", "b": 2}, '{"a": "x", "b": 2}'])
@pytest.mark.parametrize("content", [None, ""])
def test_a_template_gets_the_arguments_of_calls_as_it_can_render_them(
    shown: str, expected: str, arguments: Any, content: str | None
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [user("?"), answer(content, tool_calls=[call])]
    (found,) = rendered(CALLS.replace("SHOWN", shown), messages=messages)
    assert marked(found) == f"[user]?;[assistant]<{expected};>"
    assert not found.notes


def test_an_answer_of_which_nothing_is_rendered_is_refused() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "x"}}}
    messages = [user("?"), answer(None, tool_calls=[call]), {"role": "tool", "content": "3"}]
    messages.append(answer("three"))
    why = r"message 2: the chat template renders nothing of this answer \(tool_calls\).*chatml"
    with pytest.raises(BadRecord, match=why):
        rendered(PLAIN, messages=messages)
    (found,) = rendered(
        PLAIN, messages=[*messages[:1], {**messages[1], "weight": 0}, *messages[2:]]
    )
    assert any("tool_calls of messages" in note for note in found.notes)


@pytest.mark.parametrize(
    ("record", "asked"),
    [
        ({"input": "one?", "output": "1"}, "one?"),
        ({"inputs": "one?", "targets": "1"}, "one?"),
        ({"question": "one?", "context": "Two.", "answer": "1"}, "one?\n\nTwo."),
        ({"prompt": "one?", "response": "1", "system_prompt": ""}, "one?"),
        ({"Q": "one?", "response": "1"}, "one?"),
    ],
)
def test_a_question_and_its_answer_are_a_conversation(record: dict[str, str], asked: str) -> None:
    named = Renderer(
        columns={"question": "Q"} if "Q" in record else {}, loss_on="last", template=PLAIN
    )
    (found,) = named.documents(record)
    assert marked(found) == f"[user]{asked};[assistant]<1;>"
    assert not found.notes
    assert not found.unread


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add up"}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(one) for one in TOOLS]])
def test_tools_may_be_json_text(tools: Any) -> None:
    (found,) = rendered(CHATML, messages=TWO, tools=tools)
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in found.text
    assert not found.notes
    (found,) = rendered(PLAIN, messages=TWO, tools=tools)
    assert found.notes == ("tools are not in the text: the chat template does not render them",)


@pytest.mark.parametrize(
    ("record", "note"),
    [
        ({"documents": [{"title": "Notes", "text": "A b."}]}, "documents are not in the text"),
        ({"chat_template_kwargs": {"deep": True}}, "deep of chat_template_kwargs is nothing"),
        ({"chat_template_kwargs": '{"deep": true}'}, "deep of chat_template_kwargs is nothing"),
        ({"completion": "another"}, "the column completion is not read"),
    ],
)
def test_a_field_without_effect_is_told(record: dict[str, Any], note: str) -> None:
    (found,) = rendered(PLAIN, messages=TWO, **record)
    assert [text.startswith(note) for text in found.notes] == [True]


def test_fields_without_a_meaning_are_listed_as_unread() -> None:
    messages = [{**user("one?"), "rating": 3, "tags": ["zz"]}, answer("1", note=None)]
    (found,) = rendered(PLAIN, messages=messages, id=3, label=2, empty=None, prompt="one?")
    assert found.unread == ("rating of messages", "tags of messages", "id", "label", "prompt")
    assert not found.notes


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": TWO, "tools": "[{"}, "tools: not JSON"),
        ({"messages": TWO, "tools": [3]}, "tools: expected a list of objects"),
        ({"messages": TWO, "documents": ["x"]}, "documents: expected a list of objects"),
        ({"messages": TWO, "chat_template_kwargs": {"tools": []}}, "tools has a field of its own"),
        ({"messages": [user("?"), {"from": "function_call", "value": "add"}]}, "not JSON"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "history: expected a list of"),
        ({"prompt": "a", "completion": "b", "label": False}, "label: false"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "label: false"),  # as CSV has it
        ({"prompt": "a", "completion": "b", "label": 0}, "label: 0"),
        ({"prompt": "a", "completion": "b", "label": "0"}, "label: 0"),
        ({"prompt": [user("a")], "completion": [answer("b")], "kto_tag": False}, "kto_tag: false"),
        ({"question": "a", "answer": 3}, "answer: expected text, not int"),
    ],
)
def test_what_cannot_be_read_is_refused(record: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRecord, match=why):
        rendered(PLAIN, **record)


def test_contents_are_parts_for_a_template_that_reads_nothing_else() -> None:
    parts = PLAIN.replace(
        "{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"
    )
    (found,) = rendered(parts, messages=TWO)
    assert marked(found) == "[user]one?;[assistant]<1;>[user]two?;[assistant]<2;>"
    assert not found.notes


def test_an_empty_content_beside_a_call_is_no_content_that_a_template_shows() -> None:
    parts = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content or [] %}"
        "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    result = {"role": "tool", "content": "It rains."}
    chat = [user("Sunny?"), answer(None, tool_calls=[call]), result, answer("Not now.")]
    (found,) = rendered(parts, messages=chat)
    assert "[user]Sunny?;" in marked(found)
    assert marked(found).endswith("[tool]It rains.;[assistant]<Not now.;>")


@pytest.mark.parametrize(
    "record",
    [
        {"system": "Be brief.", "messages": TWO},
        {"messages": [{"role": "system", "content": "Be brief.", "train": False}, *TWO]},
    ],
)
def test_a_template_may_want_a_question_after_each_system_message(record: dict[str, Any]) -> None:
    strict = "{% if messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}"
    (found,) = rendered(strict + CHATML, **record)
    assert marked(found).count("<1<|im_end|>>") == marked(found).count("<2<|im_end|>>") == 1


def test_a_preference_pair_learns_one_answer_under_any_template() -> None:
    pairs = Renderer(columns={}, loss_on="answers", template=PHI_3, tokens=TOKENS, pairs=True)
    chosen, rejected = pairs.documents(
        {"conversations": TWO[:3], "chosen": answer("2"), "rejected": answer("3")}
    )
    before = (
        "<|user|>\none?<|end|>\n<|assistant|>\n1<|end|>\n<|user|>\ntwo?<|end|>\n<|assistant|>\n"
    )
    assert [marked(one) for one in (chosen, rejected)] == [
        f"{before}<{text}<|end|>\n</s>>" for text in ("2", "3")
    ]
    both = {"prompt": "?", "chosen": TWO[1:], "rejected": [answer("3"), *TWO[2:]]}
    with pytest.raises(BadRecord, match="answers of a pair have to be one text"):
        pairs.documents(both)


def test_the_date_is_fixed_and_has_the_format_that_a_template_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2024, 1, 1)

    formats = ("%d %b %Y", "%Y-%m-%d", "%-d %B, %A", "%y %j %p")
    template = "".join(f"{{{{ strftime_now('{one}') }}}}|" for one in formats) + PLAIN
    (found,) = rendered(template, messages=TWO)
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    expected, _ = chat_template_utils.render_jinja_template([TWO], chat_template=template)
    assert found.text == expected[0]


def test_a_template_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.2)
    loop = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3 + PLAIN
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*within 0\.2 s"):
        rendered(loop, messages=TWO)


def test_rendering_needs_no_torch_and_a_plan_no_transformers() -> None:
    """The launcher stays light: it renders nothing that the cache has."""
    code = (
        "import sys\n"
        "from colotrain.data.prepare import tokens\n"
        "assert not {'torch', 'transformers', 'jinja2'} & {*sys.modules}\n"
        "from colotrain.data.prepare.conversations import CHATML, Renderer\n"
        "chat = [{'role': 'user', 'content': '?'}, {'role': 'assistant', 'content': '!'}]\n"
        "Renderer(columns={}, loss_on='last', template=CHATML).documents({'messages': chat})\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_transformers_conversations_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_template_utils", None)
    templates._transformers_renderer.cache_clear()
    with pytest.raises(ColotrainError, match=r"pip install 'colotrain\[hf\]'"):
        rendered(PLAIN, messages=TWO)
    templates._transformers_renderer.cache_clear()
    assert rendered(None, text="a text needs nothing")


def test_a_template_that_is_no_jinja_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template: expected a Jinja template"):
        rendered("{% if %}", messages=TWO)


def plan_of(path: Path, **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        "source": "path",
        "paths": (str(path),),
        "seq_len": 64,
        "tokenizer": "bytes",
        "chat_template": "chatml",
        "shuffle": True,
        "validation_fraction": 0.0,
        "workers": 1,
    }
    return DataPlan(**{**settings, **changes})


def test_conversations_stay_apart_whatever_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": TWO, "id": n}) + "\n" for n in range(3)))
    plan = plan_of(path, loss_on="all")
    shards = prepare_shards(plan)
    assert packing_of(shards, plan) == "none"
    assert shards[0].targets("train").all()
    (note,) = notes_of(plan, shards)
    assert (note.text, note.count, note.is_unread) == ("id", 3, True)


def test_nulls_of_arrow_are_fields_that_a_record_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))

    def row(arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        tool = {"name": "add", "parameters": {"properties": properties}}
        return {"messages": [user("?"), answer(None, tool_calls=[call])], "tools": [tool]}

    rows = [row({"a": "x"}, {"a": {"type": "string"}}), row({"b": {"c": 1}}, {"b": {"d": 1}})]
    rows = [{**one, "id": 3} for one in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    tables, lines = (
        prepare_shards(plan_of(tmp_path / name))[0] for name in ("rows.parquet", "rows.jsonl")
    )
    assert bytes(tables.tokens("train")) == bytes(lines.tokens("train"))
    assert [(n.text, n.count, n.is_unread) for n in tables.notes] == [("id", 2, True)]
    assert [(n.text, n.count) for n in lines.notes] == [("id", 2)]
    assert b"null" not in bytes(tables.tokens("train"))
    given = row({"a": None}, {})  # a null that somebody wrote stays
    assert '"arguments": {"a": null}' in rendered(CHATML, **given)[0].text
