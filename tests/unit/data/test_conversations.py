"""Chat templates, and which tokens of a conversation are learned."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from colotrain.data.prepare.conversations import CHATML, Renderer, renderer_of
from colotrain.data.prepare.records import BadRecord
from colotrain.data.prepare.tokens import prepare
from colotrain.data.read.loader import open_samples
from colotrain.errors import ConfigError
from colotrain.spec.objectives import IGNORE_INDEX
from colotrain.spec.plan import DataPlan

PLAIN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A template that says nothing of generation."""
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' and loop.last %}<think>{% endif %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Renders an answer differently when it is no longer the last."""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))


def conversation(turns: int) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * turns
    return [{"role": role, "content": f"{role} {random.random()}"} for role in roles]


def renderer(template: str, loss_on: str = "answers") -> Renderer:
    return Renderer(columns={}, loss_on=loss_on, template=template, tokens=TOKENS)


def learned(found: Any) -> list[str]:
    return [found.text[start:stop] for start, stop in found.answers]


def test_answers_are_found_by_rendering_what_comes_before_them() -> None:
    messages = conversation(random.randint(1, 5))
    (found,) = renderer(PLAIN).documents({"messages": messages})
    answers = [m["content"] + "</s>" for m in messages if m["role"] == "assistant"]
    assert learned(found) == answers
    assert found.text.startswith("<s>[user]user ")


def test_a_template_may_say_itself_what_is_generated() -> None:
    messages = conversation(3)
    (found,) = renderer(CHATML).documents({"messages": messages})
    assert learned(found) == [m["content"] + "<|im_end|>" for m in messages[1::2]]
    first = messages[0]["content"]
    assert found.text.startswith(f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [PLAIN, CHATML])
def test_the_loss_may_be_on_the_last_answer_or_on_everything(template: str) -> None:
    messages = conversation(3)
    (last,) = renderer(template, "last").documents({"messages": messages})
    assert len(last.answers) == 1
    assert learned(last)[0].startswith(messages[-1]["content"])
    (whole,) = renderer(template, "all").documents({"messages": messages})
    assert learned(whole) == [whole.text]


def test_a_template_that_rewrites_earlier_answers_makes_a_sample_of_each() -> None:
    messages = conversation(2)
    first, second = renderer(FORGETFUL).documents({"messages": messages})
    question, answer, follow_up, last = (m["content"] for m in messages)
    assert (first.text, learned(first)) == (
        f"[user]{question};[assistant]<think>{answer};",
        [f"<think>{answer};"],
    )
    assert (second.text, learned(second)) == (
        f"[user]{question};[assistant]{answer};[user]{follow_up};[assistant]<think>{last};",
        [f"<think>{last};"],
    )
    assert any("each answer is a sample of its own" in note for note in first.notes)
    (found,) = renderer(FORGETFUL, "last").documents({"messages": messages})
    assert found.text == second.text
    assert not found.notes


def test_other_names_for_messages_are_understood() -> None:
    rows = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    (found,) = renderer(PLAIN).documents({"conversations": rows})
    assert found.text == "<s>[user]Hi</s>[assistant]Hello</s>"


def test_a_mistyped_role_is_refused_unless_the_template_knows_it() -> None:
    record = {"messages": conversation(2)}
    record["messages"][1]["role"] = "asistant"
    with pytest.raises(BadRecord, match=r"message 2: the role 'asistant' is unknown.* assistant"):
        renderer(PLAIN).documents(record)
    knows = "{% if messages[1].role == 'asistant' %}{% endif %}" + PLAIN
    (found,) = renderer(knows).documents(record)
    assert learned(found) == [record["messages"][3]["content"] + "</s>"]


@pytest.mark.parametrize("loss_on", ["answers", "last"])
def test_a_conversation_whose_answers_are_empty_is_refused(loss_on: str) -> None:
    messages = conversation(2)
    messages[3]["content"] = ""
    if loss_on == "answers":  # one empty answer is learned: the model may say nothing
        renderer(PLAIN).documents({"messages": messages})
        messages[1]["content"] = ""
    with pytest.raises(BadRecord, match="every answer is empty"):
        renderer(PLAIN, loss_on).documents({"messages": messages})


def test_prompt_and_completion_may_be_messages() -> None:
    record = {"prompt": conversation(2)[:3], "completion": conversation(1)[1:]}
    (found,) = renderer(PLAIN).documents(record)
    assert learned(found) == [record["completion"][0]["content"] + "</s>"]


def test_a_template_cannot_reach_python() -> None:
    bad = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(BadRecord, match="refuses it"):
        renderer(bad).documents({"messages": conversation(1)})


def test_a_template_may_refuse_a_conversation() -> None:
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(BadRecord, match="no system"):
        renderer(strict).documents({"messages": conversation(1)})


def test_a_template_that_is_none_is_a_problem_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*Jinja"):
        renderer("{% if %}").documents({"messages": conversation(1)})


def plan_of(path: Path, **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        "source": "path",
        "paths": (str(path),),
        "seq_len": 400,
        "tokenizer": "bytes",
        "shuffle": True,
        "validation_fraction": 0.0,
    }
    return DataPlan(**{**settings, **changes})


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_tokenizer(folder: Path, **settings: Any) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant 0.123 the quick [user] 4567" * 9], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENS, **settings}))
    return folder


def learned_text(sample: dict[str, Any], decode: Any) -> str:
    labels = sample["labels"]
    return str(decode(labels[labels != IGNORE_INDEX].tolist()))


def test_exactly_the_answers_tokens_are_labels(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = make_tokenizer(tmp_path / "model", chat_template=PLAIN)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [{"messages": conversation(random.randint(1, 3))} for _ in range(12)]
    path = write(tmp_path / "chat.jsonl", rows)
    samples = open_samples(plan_of(path, tokenizer=str(folder)), "train")

    assert len(samples) == 12
    for i, row in enumerate(rows):
        answers = [m["content"] + "</s>" for m in row["messages"] if m["role"] == "assistant"]
        whole = "<s>" + "".join(f"[{m['role']}]{m['content']}</s>" for m in row["messages"])
        sample = samples[i]
        wanted = tokenizer.encode(whole, add_special_tokens=False).ids
        assert sample["input_ids"][: len(wanted)].tolist() == wanted

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=False)

        assert learned_text(sample, decode).replace(" ", "") == "".join(answers).replace(" ", "")


def test_the_completion_and_the_end_are_learned_and_the_prompt_is_not(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i}? é", "completion": f" It is ü{i}."} for i in range(10)]
    path = write(tmp_path / "pairs.jsonl", rows)
    samples = open_samples(plan_of(path), "train")
    for i, row in enumerate(rows):
        found = learned_text(samples[i], lambda ids: bytes(ids).decode())
        assert found == row["completion"] + "\0"


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model", chat_template="from the settings")
    path = write(tmp_path / "chat.jsonl", [])
    plan = plan_of(path, tokenizer=str(folder))
    assert renderer_of(plan).template == "from the settings"
    (folder / "chat_template.jinja").write_text(PLAIN)
    assert renderer_of(plan).template == PLAIN
    (tmp_path / "mine.jinja").write_text("mine")
    assert renderer_of(plan_of(path, chat_template=str(tmp_path / "mine.jinja"))).template == "mine"


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": PLAIN}]
    folder = make_tokenizer(tmp_path / "model", chat_template=named)
    plan = plan_of(tmp_path, tokenizer=str(folder))
    assert renderer_of(plan).template == PLAIN


def test_another_template_is_prepared_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [{"messages": conversation(1)} for _ in range(4)])
    (tmp_path / "a.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    plan = plan_of(path, chat_template=str(tmp_path / "a.jinja"), loss_on="all")
    first = prepare(plan).num_train
    (tmp_path / "a.jinja").write_text("{% for m in messages %}! {{ m.content }}{% endfor %}")
    assert prepare(plan).num_train == first + 4 * 2 * 2


def test_messages_without_any_template_are_an_error_with_a_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [{"messages": conversation(1)}])
    with pytest.raises(ConfigError, match=r"data\.chat_template=chatml"):
        prepare(plan_of(path))


HEADERS = (
    "{{- bos_token }}\n"
    "{%- for message in messages %}\n"
    "    {{- '[' + message['role'] + ']\\n' }}\n"
    "    {%- if message['role'] == 'assistant' %}\n"
    "        {%- generation %}{{- message['content'] | trim + eos_token }}{% endgeneration %}\n"
    "    {%- else %}\n"
    "        {{- message['content'] | trim + eos_token }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '[assistant]\\n' }}\n{%- endif %}\n"
)
"""Laid out with white-space control over several lines, as models' templates are."""


def test_texts_and_learned_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_tokenizer(tmp_path / "model", chat_template=HEADERS)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=HEADERS, **TOKENS
    )
    rows = [{"messages": conversation(random.randint(1, 4))} for _ in range(10)]
    rows[0]["messages"].insert(0, {"role": "system", "content": "  Be brief, ünïcode 😀.  "})
    path = write(tmp_path / "chat.jsonl", rows)
    samples = open_samples(plan_of(path, tokenizer=str(folder), seq_len=600), "train")
    for i, row in enumerate(rows):
        found = theirs.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = found["input_ids"], found["assistant_masks"]
        sample = samples[i]
        assert sample["input_ids"][: len(ids)].tolist() == ids
        wanted = [t if m else IGNORE_INDEX for t, m in zip(ids[1:], mask[1:], strict=True)]
        assert sample["labels"][: len(wanted)].tolist() == wanted


def test_parts_of_a_content_are_its_text() -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "yes"}]
    whole = [{"role": "user", "content": "Say yes"}, {"role": "assistant", "content": "yes"}]
    for answer in ("yes", [{"type": "text", "text": "yes"}], ["y", "es"]):
        given = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        assert renderer(PLAIN).documents({"messages": given}) == renderer(PLAIN).documents(
            {"messages": whole}
        )
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, whole[1]]
    with pytest.raises(BadRecord, match="message 1: expected parts that are text, not image_url"):
        renderer(PLAIN).documents({"messages": picture})


def test_calls_of_tools_without_content_are_learned() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    (found,) = renderer(CHATML).documents({"messages": messages})
    first, second = learned(found)
    body = first.removesuffix("<|im_end|>").strip()
    body = body.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert json.loads(body) == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert second == "It is 3.<|im_end|>"
    assert "None" not in found.text
    call["function"]["arguments"] = '{"a": 1, "b": 2}'  # as OpenAI's files have them
    assert renderer(CHATML).documents({"messages": messages}) == [found]


def test_alpacas_input_is_part_of_the_prompt() -> None:
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    (found,) = renderer(PLAIN).documents(record)
    assert found.text == "<s>[user]Add.\n\n1 and 2</s>[assistant]3</s>"
    assert learned(found) == ["3</s>"]
    without = Renderer(columns={}, loss_on="answers", template=None)
    (found,) = without.documents(record)
    assert found.text == "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n3"
    assert learned(found) == ["3"]
    assert without.documents({**record, "input": ""})[0].text.startswith(
        "### Instruction:\nAdd.\n\n### R"
    )
    named = {"prompt": "instruction", "completion": "output"}
    (found,) = Renderer(columns=named, loss_on="answers", template=None).documents(record)
    assert found.text == "Add.\n\n1 and 23"
    for wrong in ({**record, "output": ""}, {**record, "input": 3}):
        with pytest.raises(BadRecord):
            without.documents(wrong)
