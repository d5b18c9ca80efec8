"""Stages that pass activations on compute what one process computes."""

from __future__ import annotations

from collections import Counter
from json import dumps, loads
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.cli.main import guarded
from colotrain.engine.build.sequence import find_sequence
from colotrain.engine.comms.groups import Groups
from colotrain.engine.pipeline.stage import Passed, keep_stage_
from colotrain.events.fold import follow
from colotrain.models.llm import LLM
from colotrain.rundir import RunDir
from colotrain.spec.axes import DP_SHARD, PP, Ranks
from colotrain.spec.plugins import ROWS
from colotrain.verify import runner
from tests.dist import hf
from tests.dist.test_changed_axes import assert_equal_states
from tests.dist.test_run import losses
from tests.dist.test_transport import run
from tests.running import SMALL, Colotrain

OWN = ("freeze.patterns=[blocks.0.*]", "train.grad_clip=0.1", "model.args.tie_embeddings=true")
PREFIX = ("freeze.patterns=[embed*,blocks.0.*,blocks.1.*]", "mesh.pp_split=[2,1]", "mesh.pp=2")

CHUNKS = ("mesh.pp_schedule=interleaved", "model.args.num_layers=4")
HALF = (
    "freeze.patterns=[embed*,blocks.0.*,blocks.1.*,blocks.2.*]",
    "mesh.pp=2",
    "mesh.pp_split=[1,1,1,1]",
)


def verified(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    guarded(["verify", *SMALL, *options, "--steps", "2", "--json"])
    cases: list[dict[str, Any]] = loads(capsys.readouterr().out)["cases"]
    return cases


@pytest.mark.parametrize(
    "options",
    [OWN, PREFIX, (*OWN, *CHUNKS), (*HALF, *CHUNKS)],
    ids=["tied", "a frozen stage", "tied, interleaved", "frozen chunks, interleaved"],
)
def test_two_stages_equal_one_process(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    axes = ("--world-sizes", "2", "--pp", "2", "--plugins", "zero1,zero3", "--accumulation", "4")
    cases = verified(capsys, *axes, *options)
    assert [(case["plugin"], case["pp"]) for case in cases] == [("zero1", 2), ("zero3", 2)]
    for case in cases:
        assert case["passed"], case["difference"]
        assert case["max_abs_gradient"] <= 1e-6


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        ("--pp", "2,4", "model.args.num_layers=4", "train.grad_clip=0.1"),
        ("--pp", "2", "--tp", "2", *OWN, "train.activation_checkpointing=full"),
        ("--pp", "2", "--cp", "2", *OWN, "train.precision=bf16"),
        ("--pp", "2", "--tp", "2", *OWN, "mesh.sequence_parallel=true"),
        ("--pp", "2", *OWN, *CHUNKS, "train.activation_checkpointing=full"),
        ("--pp", "4", *OWN, CHUNKS[0], "model.args.num_layers=9"),
        ("--pp", "2", "--tp", "2", *OWN, *CHUNKS, "train.precision=bf16"),
    ],
    ids=[
        "2 and 4 stages",
        "divided matrices, recomputed",
        "divided samples, bf16",
        "divided tokens",
        "interleaved, recomputed",
        "4 stages, interleaved",
        "interleaved, divided matrices, bf16",
    ],
)
def test_every_plugin_equals_one_process_on_four_ranks(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = verified(capsys, "--world-sizes", "4", "--accumulation", "4", *options)
    assert {case["plugin"] for case in cases} == set(ROWS)
    assert not [case["difference"] for case in cases if not case["passed"]]


@pytest.mark.slow
def test_compiled_blocks_of_stages_equal_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    axes = ("--world-sizes", "2", "--pp", "2", "--plugins", "zero3", "--accumulation", "4")
    (case,) = verified(capsys, *axes, "--freeze", "none", *CHUNKS, "train.compile=true")
    assert case["passed"], case["difference"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "axes"), [("gpt2", ("2", "1")), ("llama", ("4", "2"))])
def test_a_model_of_transformers_equals_one_process(
    kind: str, axes: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    folder, (ranks, tp) = hf.make_directory(kind, tmp_path / kind), axes
    model = (f"model.hf={folder}", "data.target=tests.dist.hf:samples", "train.micro_batch=1")
    plugins = ("--plugins", "zero3", "--accumulation", "4", "--steps", "2", "--json")
    guarded(["verify", *model, "--world-sizes", ranks, "--pp", "2", "--tp", tp, *plugins])
    cases = loads(capsys.readouterr().out)["cases"]
    assert len(cases) == 3
    assert not [case["difference"] for case in cases if not case["passed"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        ("4", ("--cp", "2", "data.isolate=true", "train.activation_checkpointing=full")),
        ("2", ("data.isolate=true", CHUNKS[0])),
    ],
    ids=["divided samples, recomputed", "documents apart"],
)
def test_stages_of_transformers_layers_attend_as_one_process_does(
    ranks: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    folder = hf.make_directory("llama", tmp_path / "llama", num_hidden_layers=4, vocab_size=300)
    lines = [dumps({"text": "ab cd efgh"[: 2 + at * at % 9]}) for at in range(200)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    data = (f"model.hf={folder}", f"data.path={tmp_path / 'texts.jsonl'}", "data.tokenizer=bytes")
    data += ("data.seq_len=16", "data.packing=whole", "train.micro_batch=1")
    options = ("--plugins", "zero3", "--accumulation", "4", "--steps", "1", "--json")
    guarded(["verify", *data, "--world-sizes", ranks, "--pp", "2", *more, *options])
    cases = loads(capsys.readouterr().out)["cases"]
    assert cases
    assert not [case["difference"] for case in cases if not case["passed"]]


@pytest.mark.parametrize(
    ("mutant", "says"),
    [
        ("loses_a_micro_batch_at_flush", "gradient of"),
        ("weighs_micro_batches_equally", "loss of step 1"),
        ("keeps_tied_gradients_apart", "gradient of embed.weight in step 1: differs by nan"),
        ("clips_by_a_rank", "parameter"),
    ],
)
def test_a_fault_in_a_pipeline_is_found(
    mutant: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    axes = ("--world-sizes", "2", "--pp", "2", "--plugins", "zero2", "--accumulation", "4")
    (case,) = verified(capsys, *axes, *OWN)
    assert not case["passed"]
    assert says in case["difference"]


@pytest.mark.parametrize(
    "mutant",
    [
        "loses_a_chunk_at_flush",
        "loses_a_micro_batch_at_flush",
        "mixes_up_micro_batches",
        "never_reduces_a_chunk",
    ],
)
def test_a_fault_in_an_interleaved_pipeline_is_found(
    mutant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    axes = ("--world-sizes", "2", "--pp", "2", "--plugins", "zero1", "--accumulation", "4")
    (case,) = verified(capsys, *axes, *OWN, *CHUNKS)
    assert not case["passed"]
    assert "gradient of" in case["difference"]


@pytest.mark.slow
def test_a_run_goes_on_without_stages_and_with_other_ones(colotrain: Colotrain) -> None:
    options = (*SMALL, "model.args.tie_embeddings=true", "checkpoint.every=2", "checkpoint.keep=3")
    steady = (*options, "optim.schedule.name=constant", "observe.grads_every=1")
    again = (*steady, "train.on_nonfinite=rollback", "train.max_steps=4")  # it saves step 2 again
    whole = colotrain.run(*steady, "train.max_steps=4", "plugin=zero2", "name=whole")
    staged = colotrain.run(*steady, "train.max_steps=2", "plugin=zero2", "mesh.pp=2", "name=staged")
    saved = [RunDir(colotrain.cwd / "runs" / name).checkpoint(2) for name in ("staged", "plain")]
    plain = colotrain.run(*again, "plugin=zero3", "name=plain", f"checkpoint.resume={saved[0]}")
    other = colotrain.run(
        *again, "mesh.pp=2", "mesh.pp_split=[1,2]", "name=other", f"checkpoint.resume={saved[1]}"
    )
    assert losses(staged) == pytest.approx(losses(whole)[:2], abs=1e-6)
    assert losses(plain) == pytest.approx(losses(whole)[2:], abs=1e-6)
    assert losses(other) == pytest.approx(losses(whole)[2:], abs=1e-6)
    held = follow(colotrain.rundir("staged")).gradients.parameters
    of_names = {row.name: row.stages for row in held}
    assert of_names["embed.weight"] == (0, 1)
    assert of_names["blocks.2.mlp.up.weight"] == (1,)
    of_stages = staged["stages"]
    assert [stage["first_rank"] for stage in of_stages] == [0, 1]
    assert all(0 < stage["wait"] < 1 for stage in of_stages)
    assert_equal_states(*saved)
    assert_equal_states(saved[1], RunDir(colotrain.cwd / "runs" / "other").checkpoint(2))
    seen = [
        [e.fields for e in colotrain.events(name) if e.kind == "gradients"]
        for name in ("whole", "staged")
    ]
    for before, after in zip(*seen, strict=False):
        assert after["status"] == before["status"]
        for column in ("norm", "rms", "max_abs", "zero_fraction", "update_ratio"):
            assert after[column] == pytest.approx(before[column], rel=1e-4, abs=1e-7), column
        assert after["global_norm"] == pytest.approx(before["global_norm"], rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("split", "chunks", "num"),
    [((1, 2, 2), 1, 4), ((1, 2, 1, 1), 2, 4), ((1, 1, 1, 1, 1, 1), 3, 5), ((1,) * 6, 2, 7)],
    ids=["1f1b", "two chunks", "three chunks", "three stages of two chunks"],
)
def test_stages_have_the_gradients_of_the_whole_model_in_float64(
    split: tuple[int, ...], chunks: int, num: int, tied: bool
) -> None:
    run(compare_stages_with_whole, len(split) // chunks, split, chunks, num, tied)


def compare_stages_with_whole(
    rank: int, split: tuple[int, ...], chunks: int, num: int, tied: bool
) -> None:
    """Micro-batches of different numbers of targets, run in the schedule without any sharding."""
    torch.manual_seed(7)
    sizes = {"vocab_size": 40, "d_model": 16, "num_layers": sum(split), "num_heads": 2}
    model = LLM(**sizes, tie_embeddings=tied).double()
    model.init_weights()
    ids = torch.randint(40, (num, 2, 9))
    masked = torch.rand(num, 2, 8) < 0.9 / num * torch.arange(num).view(num, 1, 1)
    labels = torch.where(masked, -100, ids[..., 1:])
    batches = [{"input_ids": i[:, :-1], "labels": n} for i, n in zip(ids, labels, strict=True)]
    count = (labels != -100).sum()
    (sum(model(**batch)[0] for batch in batches) / count).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    sequence = find_sequence(model, batches[0])
    stage = keep_stage_(model, sequence, split, rank, chunks=chunks, compute_dtype=None)
    stages = len(split) // chunks
    stage.connect_(Groups(Ranks({PP: stages, DP_SHARD: 1}), "cpu"))
    calls = Counter[str]()
    for name in sequence.blocks:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    stage.install_(model)
    stage.begin_step({})
    begun: dict[tuple[int, int], Passed] = {}
    for action in stage.order(num):
        at = chunk, index = action.chunk, action.micro_batch
        if not action.is_forward:
            stage.backward(begun.pop(at), chunk)
        elif stage.gives_loss(chunk):
            stage.begin_forward(chunk)
            begun[at] = Passed(model(**batches[index])[0] / count, stage.received)
        else:
            output = stage.forward(model, batches[index], chunk)
            assert output.nbytes == stage.activation_bytes  # as planned: shared memory holds it
            begun[at] = Passed(output, stage.received)
    stage.end_step()
    assert begun == {}
    own_blocks = [name for chunk in range(chunks) for name in stage.blocks_of(chunk)]
    assert {name: calls[name] for name in own_blocks} == dict.fromkeys(own_blocks, num)
    assert stage.exchange is not None
    for before, link in stage.exchange.links.items():
        passing = chunks - (before == stages - 1)
        assert (link.num_sent, link.num_received) == (num * passing,) * 2
    assert len(stage.exchange.links) == (2 if chunks > 1 or 0 < rank < stages - 1 else 1)
    own = {n: p for n, p in model.named_parameters() if stage.holds(n)}
    assert own.keys() == {n for n, p in model.named_parameters() if not p.is_meta}
    for name in (n for n, stages in stage.holders.items() if len(stages) > 1 and stage.holds(n)):
        stage.sum_shared_(name, own[name].grad)
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_run_goes_on_under_another_schedule(colotrain: Colotrain) -> None:
    options = (*SMALL, "model.args.num_layers=4", "model.args.tie_embeddings=true")
    steady = (
        *options,
        "optim.schedule.name=constant",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        "observe.grads_every=1",
    )
    interleaved = ("mesh.pp=2", "mesh.pp_schedule=interleaved", "train.global_batch=12")
    usual = ("mesh.pp=2", "train.global_batch=12")
    alone = ("train.global_batch=12", "train.micro_batch=1")
    whole = colotrain.run(*steady, *alone, "train.max_steps=6", "plugin=zero2", "name=whole")
    found, resume = [], "none"
    for steps, plugin, words in (
        (2, "zero1", interleaved),
        (4, "zero2", usual),
        (6, "zero3", interleaved),
    ):
        name = f"until-{steps}"
        found.append(
            colotrain.run(
                *steady,
                *words,
                f"train.max_steps={steps}",
                f"plugin={plugin}",
                f"name={name}",
                f"checkpoint.resume={resume}",
            )
        )
        resume = str(RunDir(colotrain.cwd / "runs" / name).checkpoint(steps))
    told = [loss for each in found for loss in losses(each)]
    assert told == pytest.approx(losses(whole), abs=1e-6)
    assert found[-1]["validation_loss"] == pytest.approx(whole["validation_loss"], abs=1e-6)
    assert [stage["blocks"] for stage in found[0]["stages"]] == [[[0, 0], [2, 2]], [[1, 1], [3, 3]]]
    assert all(0 < stage["wait"] < 1 for each in found for stage in each["stages"])
    held = {
        row.name: row.stages for row in follow(colotrain.rundir("until-2")).gradients.parameters
    }
    assert held["blocks.2.mlp.up.weight"] == (0,)
    assert held["blocks.1.mlp.up.weight"] == (1,)
    one = RunDir(colotrain.cwd / "runs" / "until-2").checkpoint(2)
    again = ("plugin=zero3", "train.max_steps=6", "name=alone", f"checkpoint.resume={one}")
    assert losses(colotrain.run(*steady, *alone, *again)) == pytest.approx(
        losses(whole)[2:], abs=1e-6
    )
