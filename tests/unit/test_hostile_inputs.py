"""What others wrote into data, tokenizers, models and YAML: an error in bounded time and memory."""

from __future__ import annotations

import json
import mmap
import random
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from colotrain.cli.main import guarded
from colotrain.config import files, values
from colotrain.config.compose import gather
from colotrain.config.files import read_file
from colotrain.data.prepare import records, templates, vocabulary
from colotrain.data.prepare.conversations import Renderer
from colotrain.data.prepare.megatron_index import document_ends
from colotrain.data.prepare.records import BadRecord
from colotrain.data.prepare.sources import find_sources
from colotrain.data.prepare.tokens import prepare
from colotrain.data.prepare.vocabulary import check_tokenizer
from colotrain.errors import ColotrainError, ConfigError, Problem, fix_of
from colotrain.models.stored import StoredTensors
from colotrain.spec.plan import DataPlan, ModelPlan
from tests.dist import hf
from tests.formats import random_texts, write_dataset, write_megatron, write_parquet
from tests.unit.test_hostile_runs import bounds

TWO = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
ENDLESS = 1 << 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def plan_of(*paths: Path, **changes: Any) -> DataPlan:
    settings: dict[str, Any] = {
        **{"source": "path", "paths": tuple(map(str, paths)), "seq_len": 16},
        **{"tokenizer": "bytes", "shuffle": True, "validation_fraction": 0.0, "workers": 1},
    }
    return DataPlan(**{**settings, **changes})


def refused(path: Path, **changes: Any) -> str:
    with bounds(), pytest.raises(ColotrainError) as caught:
        prepare(plan_of(path, **changes))
    (line,) = caught.value.lines()
    return line


def read_all(place: Path) -> None:
    for source in find_sources(plan_of(place)).files:
        for block in records.blocks(source, frozenset({"text"})):
            list(records.parse(block))


# Data


@pytest.mark.parametrize("counts", [(1 << 63, 0), ((1 << 64) - 1, (1 << 64) - 1), (1 << 40, 3)])
def test_an_index_of_megatrons_that_claims_too_much(
    tmp_path: Path, counts: tuple[int, int]
) -> None:
    write_megatron(tmp_path / "c", [np.arange(30), np.arange(9)], 8, "<u2")
    index = tmp_path / "c.idx"
    content = index.read_bytes()
    index.write_bytes(content[:18] + struct.pack("<QQ", *counts) + content[34:])
    assert "an index of Megatron's, version 1, that is whole" in refused(tmp_path / "c")
    with index.open("ab") as file:
        file.truncate(ENDLESS)
    with bounds(), pytest.raises((ConfigError, MemoryError)):
        document_ends(index)


@pytest.mark.parametrize("mark", [-1, -(1 << 63), 1 << 62, 5])
def test_an_index_of_megatrons_whose_documents_are_elsewhere(tmp_path: Path, mark: int) -> None:
    write_megatron(tmp_path / "c", [np.arange(30), np.arange(9)], 8, "<u2")
    index = tmp_path / "c.idx"
    content = index.read_bytes()
    index.write_bytes(content[:-16] + struct.pack("<q", mark) + content[-8:])
    assert "an index of Megatron's, version 1, that is whole" in refused(tmp_path / "c")


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
@pytest.mark.parametrize("size", [50 << 20, ENDLESS])
def test_a_line_without_an_end_is_refused_with_its_number(
    tmp_path: Path, ending: str, size: int
) -> None:
    path = tmp_path / f"rows.{ending}"
    begin = {"jsonl": '{"text": "a"}\n{"text": "', "csv": 'text,other\na,"'}[ending]
    with path.open("w") as file:
        file.write(begin)
        file.truncate(size)
    with bounds(), pytest.raises(ConfigError, match=":2: expected a line of at most 32 MiB"):
        read_all(path)


def test_a_value_of_json_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    with path.open("w") as file:
        file.write('[{"text": "a"}, {"text": "')
        file.write("x" * (130 << 20))
    line = refused(path)
    assert "record 2: expected values of at most 64 MiB" in line
    assert "write a record a line (JSONL)" in line


@pytest.mark.parametrize(
    "record",
    [
        '{"messages": [{"role": "user", "content": ' + "[" * 900 + "]" * 900 + "}]}",
        '{"messages": ' + json.dumps("[" * 100_000) + "}",
        '{"text": ' + "[" * 100_000,
        '{"text": ' + "9" * 10_000 + "}",
        json.dumps({"messages": TWO, "tools": "[" * 100_000}),
        json.dumps(
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}],
                    }
                ]
            }
        ),
    ],
)
def test_a_deep_record_is_a_bad_one(tmp_path: Path, record: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "a"}}\n{record}\n')
    found = prepare(plan_of(path, chat_template="chatml", on_bad="skip"))
    assert found.num_bad <= 1


def test_a_table_of_very_many_columns_takes_seconds(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    names = [f"c{n}" for n in range(100_000)]
    path.write_text(f"{','.join(names)},c7\n")
    assert "two are called 'c7'" in refused(path)


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "..", "a/b.arrow"])
def test_a_saved_dataset_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    folder = write_dataset(tmp_path / "data", [{"text": "one"}, {"text": "two"}])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "whose files are in its folder" in refused(folder)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("write", [write_parquet, write_dataset])
def test_damaged_columns_are_an_error_or_rows(
    tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], Path], seed: int
) -> None:
    chance = random.Random(seed)
    rows = [{"text": text} for text in random_texts(20)]
    place = write(tmp_path / f"rows{'.parquet' if write is write_parquet else ''}", rows)
    (file,) = [place] if place.is_file() else [sorted(place.glob("*.arrow"))[0]]
    content = file.read_bytes()
    for _ in range(40):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 1, 4, 64))):
            damaged[chance.randrange(len(damaged))] = chance.choice((0, 255, chance.randrange(256)))
        cut = chance.choice((len(damaged), len(damaged), chance.randrange(len(damaged))))
        file.write_bytes(damaged[:cut])
        with bounds():
            try:
                read_all(place)
            except ColotrainError as error:
                assert len(error.lines()) == 1  # noqa: PT017


def write_rows(path: Path) -> None:
    write_parquet(path, [{"text": "a"}])


def write_whole_tokenizer(path: Path) -> None:
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(path))


def read_yaml(path: Path) -> None:
    problems: list[Problem] = []
    read_file(path, problems)
    if problems:
        raise ConfigError(problems)


READERS = {
    "rows.parquet": (write_rows, read_all),
    "tokenizer.json": (write_whole_tokenizer, vocabulary.load),
    "settings.yaml": (lambda path: path.write_text("a: 1\n"), read_yaml),
    "model.safetensors": (
        lambda path: save_file({"a": torch.zeros(1)}, path),
        lambda path: StoredTensors([path]),
    ),
}


@contextmanager
def no_more_files() -> Iterator[None]:
    """Context in which this process may open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("name", READERS)
def test_a_machine_out_of_open_files_does_not_make_a_file_damaged(
    tmp_path: Path, name: str
) -> None:
    write, read = READERS[name]
    path = tmp_path / name
    write(path)
    read(path)
    vocabulary._load_version.cache_clear()
    with no_more_files(), pytest.raises((ColotrainError, OSError)) as caught:
        read(path)
    said = f"{caught.value}; {fix_of(caught.value, 'none')}"
    assert "Too many open files" in said
    assert "ulimit -n" in said
    assert not any(word in said for word in ("again", "damaged", "correct", "saved by"))


def test_no_memory_is_told_apart_from_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path)

    def without_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("malloc of size 4096 failed")

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", without_memory)
    assert "(malloc of size 4096 failed); free memory" in refused(path)


# Chat templates


@pytest.mark.parametrize(
    "template",
    [
        "{% for _ in range(10**9) %}a{% endfor %}",
        "{% for _ in range(99999) %}{% for _ in range(99999) %}a{% endfor %}{% endfor %}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set ns = namespace(n=10) %}{% for _ in range(60) %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}{{ ns.n }}",
        "{{ ('f' * 10**8) | int(base=16) // 7 }}",
        "{{ 'a' * 10**11 }}",
        "{{ 'a' | center(10**11) }}",
        "{{ '%099999999999d' | format(1) }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{% set ns = namespace(t='a') %}{% for _ in range(60) %}{% set ns.t = ns.t + ns.t %}"
        "{% endfor %}{{ ns.t }}",
    ],
)
def test_a_template_has_three_seconds_and_a_gibibyte(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    renderer = Renderer(columns={}, loss_on="answers", template=template, tokens={})
    with bounds(), pytest.raises((ConfigError, BadRecord)):
        renderer.documents({"messages": TWO})


def test_a_rendering_that_fills_memory_is_ended_without_a_limit_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(**_: object) -> object:
        kept = []
        for _ in range(1000):
            kept.append(mmap.mmap(-1, 1 << 21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            kept[-1].write(bytes([1] * (1 << 21)))
        return [""], []

    monkeypatch.setattr(templates, "MOST_BYTES", 64 << 20)
    monkeypatch.setattr(templates, "SECONDS", 60)
    monkeypatch.setattr(templates, "_transformers_renderer", lambda: fill)
    renderer = Renderer(columns={}, loss_on="all", template="filling", tokens={})
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(ConfigError, match="renders a conversation in 64 MiB"):
        renderer.documents({"messages": TWO})
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert signal.getsignal(signal.SIGVTALRM) == handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_templates_compute_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """jinja2's own operators come back, and small numbers are computed as in Python."""
    from jinja2.sandbox import SandboxedEnvironment as Sandbox

    before = Sandbox.intercepted_binops, dict(Sandbox.default_binop_table)
    sums = "|".join(f"{{{{ 7 {sign} 2 }}}}" for sign in templates.ARITHMETIC)
    text = f"{sums}|{{{{ '-' * 3 }}}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    renderer = Renderer(columns={}, loss_on="all", template=text, tokens={})
    (found,) = renderer.documents({"messages": TWO})
    assert found.text == "14|49|3|1|3.5|---?!"
    assert (Sandbox.intercepted_binops, Sandbox.default_binop_table) == before


# Tokenizers


@pytest.mark.parametrize("length", [{"Fixed": 1 << 40}, {"Fixed": 1 << 31}])
def test_a_tokenizer_that_pads_without_end_is_refused(tmp_path: Path, length: Any) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.enable_padding(length=8)
    document = json.loads(tokenizer.to_str())
    document["padding"]["strategy"] = length
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(document))
    with bounds():
        assert "it pads texts to more than" in str(check_tokenizer(str(file)))


@pytest.mark.parametrize("number", [(1 << 32) - 1, 1 << 32, 1 << 63, -1, 1e300])
def test_huge_ids_of_tokens_are_a_large_vocabulary_or_an_error(
    tmp_path: Path, number: float
) -> None:
    vocab = {"type": "WordLevel", "vocab": {"a": 0, "b": number}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": vocab}))
    words = ("recipe=llm-tiny", f"data.tokenizer={tmp_path}", "cluster.procs_per_node=1")
    with bounds():
        assert guarded(["plan", *words]) in (2, 3)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("content", ["[" * 200_000, None])
def test_files_beside_a_tokenizer_are_read_in_bounds(
    tmp_path: Path, name: str, content: str | None
) -> None:
    from tokenizers import Tokenizer, models

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    if content is None:
        with (folder / name).open("w") as file:
            file.truncate(ENDLESS)
    else:
        (folder / name).write_text(content)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 9)
    words = ("recipe=llm-tiny", f"data.tokenizer={folder}", "data.path=[rows.jsonl]")
    with bounds():
        assert guarded(["data", "inspect", *words, "data.source=null"]) in (0, 2)


# YAML


BOMB = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
BOMBS = {
    "lists": f"a0: &a0 [x]\n{BOMB}\n",
    "mappings": "a0: &a0 {x: 1}\n"
    + "".join(
        f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}\n" for n in range(1, 12)
    ),
    "merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
    "itself": "a: &a [*a]\n",
    "deep": "a: " + "[" * 5000 + "\n",
    "long": "a: 1\n" * 300_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_recipe_that_stands_for_billions_of_values(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMBS[name])
    problems: list[Problem] = []
    with bounds():
        read_file(path, problems)
        assert len(problems) == 1
        assert guarded(["plan", f"recipe={path}"]) == 2


@pytest.mark.parametrize("name", BOMBS)
def test_another_tools_file_that_stands_for_billions_of_values(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMBS[name])
    with bounds():
        assert guarded(["import-config", str(path)]) == 2


def test_text_is_not_taken_for_aliases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_VALUES", 50)
    path = tmp_path / "settings.yaml"
    path.write_text(f"a: x & y * z  # &b *b\nc: &c [{', '.join(['1'] * 40)}]\nd: {[*range(60)]}\n")
    problems: list[Problem] = []
    assert len(read_file(path, problems).settings.d) == 60
    assert not problems
    path.write_text(f"{path.read_text()}e: [*c, *c]\n")
    read_file(path, problems)
    assert "its aliases stand for more than 50 values" in str(problems)


def test_aliases_that_stand_for_little_are_read(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("a: &a [1, 2]\nb: *a\nc: {<<: &c {d: 1}, e: *a}\n")
    problems: list[Problem] = []
    found = read_file(path, problems).settings
    assert not problems
    assert (found.b, found.c.d, found.c.e) == ([1, 2], 1, [1, 2])
    assert files.MOST_VALUES == 100_000


# Models


@pytest.mark.parametrize("kind", ["detr", "dpt", "upernet", "maskformer"])
def test_a_model_directory_that_names_another_asks_the_hub_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("transformers")
    from colotrain.models.loading import build

    def connect(*_: object) -> None:
        asked.append(_)
        raise OSError("no network")

    asked: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    config = {"model_type": kind, "backbone": "other/backbone", "use_pretrained_backbone": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_timm_backbone": False}))
    with pytest.raises(ConfigError):
        build(ModelPlan(target="", hf=str(tmp_path)), seed=0)
    assert not asked


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 10**9},
        {"vocab_size": 1 << 50},
        {"vocab_size": 1 << 70},
        {"hidden_size": 1 << 40},
        {"num_hidden_layers": 10**7},
        {"num_hidden_layers": 10**12},
        {"num_attention_heads": 0},
        {"max_position_embeddings": 1 << 50},
        {"vocab_size": -1},
        {"layer_types": ["full_attention"] * 5},
    ],
)
def test_a_model_directory_of_absurd_sizes(tmp_path: Path, changes: dict[str, Any]) -> None:
    from colotrain.models.loading import build

    folder = hf.make_directory("llama", tmp_path / "llama")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with bounds():
        try:
            build(ModelPlan(target="", hf=str(folder)), seed=0)
        except ColotrainError as error:
            assert len(error.lines()) == 1  # noqa: PT017
        else:
            assert "max_position_embeddings" in changes


@pytest.mark.parametrize(
    "argument",
    ["vocab_size=1125899906842624", "num_layers=10000000", "d_model=1099511627776"],
)
def test_a_model_of_absurd_sizes_is_refused_or_does_not_fit(argument: str) -> None:
    words = ("recipe=llm-tiny", f"model.args.{argument}", "cluster.procs_per_node=1")
    with bounds():
        assert guarded(["plan", *words]) in (2, 3)


@pytest.mark.parametrize(
    "content", [b"\xff" * 8, struct.pack("<Q", 1 << 62) + b"{}", b"[" * 300_000, b""]
)
def test_weights_with_an_absurd_header(tmp_path: Path, content: bytes) -> None:
    from colotrain.models.loading import build

    folder = hf.make_directory("llama", tmp_path / "llama")
    (folder / "model.safetensors").write_bytes(content)
    with bounds(), pytest.raises(ColotrainError):
        build(ModelPlan(target="", hf=str(folder)), seed=0)
    (folder / "model.safetensors.index.json").write_bytes(content)
    with bounds(), pytest.raises(ColotrainError):
        build(ModelPlan(target="", hf=str(folder)), seed=0)


# Recipes


REFERENCES = {
    "text": "".join(f"x{n + 1}: '" + f"${{x{n}}}" * 4 + "'\n" for n in range(30)),
    "lists": "".join(f"x{n + 1}: [" + f'"${{x{n}}}",' * 10 + "]\n" for n in range(9)),
    "values": "y: {a: [" + "1," * 9000 + "]}\n" + "".join(f"z{n}: ${{y}}\n" for n in range(900)),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_references_that_stand_for_too_much_are_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "MOST_ITEMS", 20_000)
    monkeypatch.setattr(values, "MOST_REFERENCES", 2_000)
    (tmp_path / "bomb.yaml").write_text(f"x0: aaaaaaaaaa\n{REFERENCES[kind]}")
    began = time.process_time()
    _, problems = gather(["recipe=bomb.yaml"])
    assert problems
    assert time.process_time() - began < 30


@pytest.mark.parametrize("key", ["train.max_steps", "train.seed", "model.args.d_model", "mesh.tp"])
@pytest.mark.parametrize(
    "value", ["1" + "0" * 400, "1e400", "1" + "0" * 5000, "nan", "-1e30", "1e300"]
)
def test_a_number_that_nothing_can_be_computed_with_is_one_line(
    key: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["plan", "recipe=llm-tiny", f"{key}={value}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    told = (f"error: {key}=", "error: model.target=")  # a model refuses some itself
    assert any(line.startswith(told) for line in lines)


def test_a_broken_reference_is_told_where_an_argument_takes_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text("defaults: [llm-tiny]\nmodel: {hf: '${nope}'}\n")
    words = ["plan", "recipe=x.yaml", "model.target=colotrain.models.llm:LLM", "~optim.lr=7"]
    assert guarded(words) == 2
    assert "~optim.lr=7: expected the value it has" in capsys.readouterr().err
