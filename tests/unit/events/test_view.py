"""RunView: one picture of a run, whatever the order in which its files are read."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from colotrain.events.event import Event
from colotrain.events.fold import Fold, fold, follow
from colotrain.events.kinds import Step
from colotrain.events.log import EventWriter, json_safe
from colotrain.events.view import RunView, mfu, summary, unit
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.show.progress import step_line, summary_rows
from colotrain.spec.plan import RunPlan

MIB = 1 << 20


def plan_of(*, max_steps: int = 10, world_size: int = 2, log_every: int | str = 5) -> RunPlan:
    document = {
        "name": "tiny",
        "recipe": "tiny",
        "world_size": world_size,
        "plugin": {
            "name": "zero2",
            "reason": "asked for",
            "parameters_live": "step",
            "gradients": "sharded",
            "mesh": [world_size],
        },
        "model": {"target": "colotrain.models.llm:build"},
        "data": {
            "source": "corpus",
            "seq_len": 8,
            "tokenizer": "bytes",
            "shuffle": True,
            "validation_fraction": 0.1,
        },
        "batch": {
            "global_batch": 8,
            "micro_batch": 2,
            "accumulation_steps": 2,
            "data_parallel": world_size,
        },
        "train": {
            "max_steps": max_steps,
            "seed": 0,
            "precision": "fp32",
            "grad_clip": 1.0,
            "activation_checkpointing": "none",
            "compile": False,
            "eval_every": 5,
            "eval_steps": 1,
            "on_nonfinite": "stop",
        },
        "optim": {
            "name": "adamw",
            "lr": 1e-3,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "schedule": "cosine",
            "warmup_steps": 1,
            "final_ratio": 0.1,
        },
        "freeze": {},
        "cluster": {
            "nodes": 1,
            "procs_per_node": world_size,
            "device": "cpu",
            "threads_per_rank": 1,
            "memory_bytes": 1 << 30,
        },
        "elastic": {"max_restarts": 3, "hang_timeout_s": 60},
        "checkpoint": {"enabled": True, "every": 5, "keep": 2, "resume": "auto"},
        "observe": {"log_every": log_every, "grads_every": 0},
        "parameters": {"total": 100, "trainable": 80, "frozen": 20},
        "memory": {"parameters": 400, "gradients": 320, "optimizer": 640},
        "flops_per_token": 600.0,
    }
    return RunPlan.from_json(json.dumps(document))


def worker(kind: str, t: float, *, rank: int = 0, attempt: int = 0, **fields: Any) -> Event:
    return Event(kind=kind, t=t, rank=rank, attempt=attempt, fields=fields)


def launcher(kind: str, t: float, **fields: Any) -> Event:
    return Event(kind=kind, t=t, fields=fields)


def step(number: int, *, t: float | None = None, rank: int = 0, **fields: Any) -> Event:
    """A step's record; rank 0's has the loss 1/number unless another is given."""
    shared = {
        "loss": 1 / number,
        "tokens_per_s": 100.0,
        "grad_norm": 0.5,
        "clip_ratio": 1.0,
        "lr": 1e-3,
        "optimizer_steps": number,
        "total_micro_batches": 4 * number,
        "skipped": False,
    }
    own = {"step": number, "step_s": 0.5, "data_s": 0.1, "rss": 90 * MIB, "peak": 100 * MIB}
    attempt = fields.pop("attempt", 0)
    fields = own | (shared if rank == 0 else {}) | fields
    at = 100.0 + number if t is None else t
    return worker("step", at, rank=rank, attempt=attempt, **fields)


def restarted_run() -> list[list[Event]]:
    """The files of a run of two ranks: killed after step 6, resumed from step 4, finished at 8."""
    files: list[list[Event]] = [
        [
            launcher("launch", 100.0, world_size=2, pid=1, host="h"),
            launcher("restart", 107.5, attempt=1, cause="rank 1 was killed"),
            launcher("done", 120.0, status="finished", exit_code=0, cause=""),
        ]
    ]
    for rank in (0, 1):
        first = [worker("started", 100.5, rank=rank, world_size=2, step=0)]
        first += [step(n, rank=rank, peak=(200 + rank) * MIB) for n in range(1, 7)]
        again = [worker("started", 109.0, rank=rank, attempt=1, world_size=2, step=4)]
        again += [
            step(n, t=105.0 + n, rank=rank, attempt=1, rss=(70 + rank) * MIB) for n in range(5, 9)
        ]
        if rank == 0:
            first.insert(5, worker("eval", 104.1, step=4, loss=2.0))
            first.insert(6, worker("checkpoint", 104.2, step=4, path="/c/4", seconds=0.1))
            first.append(worker("eval", 106.1, step=6, loss=1.5))
            again.insert(1, worker("resumed", 109.1, attempt=1, step=4, path="/c/4"))
            again.append(worker("checkpoint", 114.0, attempt=1, step=8, path="/c/8", seconds=0.2))
        else:
            first.append(
                worker("failed", 107.0, rank=1, phase="data", step=7, error="E", traceback="")
            )
        files += [first, again]
    return files


def interleaved(files: Sequence[Sequence[Event]], seed: int) -> list[Event]:
    """All events in a random order that keeps the order inside each file."""
    chance, rest = random.Random(seed), [list(file) for file in files]
    out = []
    while any(rest):
        out.append(chance.choice([file for file in rest if file]).pop(0))
    return out


def view_of(*events: Event, **options: Any) -> RunView:
    return fold(events, **options)


def steps_of(pairs: Iterable[tuple[int, float]]) -> list[int]:
    return [number for number, _ in pairs]


@pytest.mark.parametrize("seed", range(30))
def test_any_interleaving_of_the_files_gives_the_same_view(seed: int) -> None:
    files = restarted_run()
    expected = fold([event for file in files for event in file], max_steps=8)
    assert fold(interleaved(files, seed), max_steps=8) == expected


@pytest.mark.parametrize("seed", range(10))
def test_looking_between_the_events_does_not_change_the_view(seed: int) -> None:
    files, looked_at = restarted_run(), Fold()
    for event in interleaved(files, seed):
        looked_at.add([event]).view()
    assert looked_at.view() == fold([event for file in files for event in file])


def told(step_number: int, *, t: float, what: str = "step", done: float = 0.25) -> Event:
    fields = {"what": what, "micro_batch": 2, "micro_batches": 4, "done": done, "seconds": 30.0}
    return worker("progress", t, step=step_number, **fields)


def test_a_step_that_takes_long_says_how_far_it_is_and_when_the_run_will_end() -> None:
    view = fold([told(1, t=130.0)], max_steps=3)
    assert view.progress is not None
    assert (view.progress.micro_batch, view.progress.eta_s) == (2, 90.0)
    assert view.eta_s == 3 * 120.0


@pytest.mark.parametrize("end", [step(1, t=140.0), worker("eval", 140.0, step=1, loss=1.0)])
def test_what_is_over_has_no_progress(end: Event) -> None:
    assert fold([told(1, t=130.0), end]).progress is None


def test_the_progress_of_an_evaluation_is_not_the_pace_of_steps() -> None:
    view = fold([told(0, t=130.0, what="evaluation")], max_steps=3)
    assert view.progress is not None
    assert view.eta_s is None


def test_after_a_restart_the_later_attempt_replaces_the_earlier() -> None:
    view = view_of(
        worker("started", 1, step=0),
        *(step(n, loss=1.0) for n in range(1, 8)),
        worker("started", 200, attempt=1, step=3),
        step(4, attempt=1, loss=2.0),
        step(5, attempt=1, loss=2.0),
    )
    assert view.loss == ((1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0))
    assert (view.steps, view.attempt) == (5, 1)


def test_steps_above_the_resumed_one_are_forgotten_as_soon_as_an_attempt_starts() -> None:
    events = [worker("started", 1, step=0), *(step(n) for n in range(1, 8))]
    events += [worker("eval", 105, step=3, loss=1.0), worker("eval", 107, step=6, loss=1.0)]
    view = view_of(*events, worker("started", 200, rank=1, attempt=1, step=4))
    assert steps_of(view.loss) == [1, 2, 3, 4]
    assert steps_of(view.evals) == [3]
    assert (view.steps, view.optimizer_steps, view.micro_batches) == (4, 4, 16)


def test_an_attempt_that_starts_from_nothing_forgets_everything_before() -> None:
    view = view_of(
        worker("started", 1, step=0), step(1), step(2), worker("started", 9, attempt=1, step=0)
    )
    assert (view.steps, view.loss) == (0, ())


def test_what_an_earlier_attempt_did_stays_forgotten_however_late_it_is_read() -> None:
    live = Fold().add([worker("started", 9, attempt=1, step=0)])
    assert live.view().steps == 0
    assert live.add([step(1), step(2)]).view().loss == ()
    assert live.add([step(1, attempt=1, loss=5.0), step(3)]).view().loss == ((1, 5.0),)


def test_a_lost_start_is_made_up_for_by_the_first_step_of_the_attempt() -> None:
    view = view_of(step(1), step(2), step(3), step(4), step(3, attempt=1, loss=9.0))
    assert view.loss[-1] == (3, 9.0)
    assert view.steps == 3


def test_the_whole_picture_of_a_restarted_run() -> None:
    view = fold([event for file in restarted_run() for event in file], max_steps=8)
    assert (view.status, view.cause, view.exit_code) == ("finished", None, 0)
    assert steps_of(view.loss) == list(range(1, 9))
    assert view.evals == ((4, 2.0),)
    assert (view.restarts, view.restart_causes) == (1, ("rank 1 was killed",))
    assert (view.resumed, view.world_size, view.attempt) == ((4,), 2, 1)
    assert view.checkpoint is not None
    assert (view.checkpoint.step, view.checkpoint.path) == (8, "/c/8")
    assert view.peak_by_rank == (200 * MIB, 201 * MIB)
    assert view.rss_by_rank == (70 * MIB, 71 * MIB)
    assert (view.optimizer_steps, view.micro_batches) == (8, 32)
    assert (view.time_to_first_step_s, view.ended_at) == (1.0, 120.0)
    assert view.failure is None  # of the latest attempt


def test_a_run_is_starting_until_a_worker_has_started() -> None:
    launch = launcher("launch", 10, world_size=2)
    assert view_of().status == "starting"
    assert view_of(launch).status == "starting"
    assert view_of(launch, worker("started", 11, step=0)).status == "running"


def test_a_run_that_is_launched_again_is_starting_again() -> None:
    events = [
        launcher("launch", 10),
        worker("started", 11, step=0),
        step(1, t=12),
        launcher("done", 13, status="preempted", exit_code=75),
    ]
    assert view_of(*events).status == "preempted"
    again = [*events, launcher("launch", 20)]
    assert (view_of(*again).status, view_of(*again).ended_at) == ("starting", None)
    assert view_of(*again, worker("started", 21, attempt=1, step=1)).status == "running"


def test_an_unknown_ending_is_a_failure() -> None:
    assert view_of(launcher("done", 1, status="???")).status == "failed"


def test_the_first_rank_to_fail_is_the_failure() -> None:
    failures = [
        worker("failed", 5.0 + rank, rank=rank, phase="reduce", step=3, error=f"E{rank}")
        for rank in (2, 0, 1)
    ]
    view = view_of(worker("started", 1, step=0), *failures)
    assert view.failure is not None
    assert (view.failure.rank, view.failure.error) == (0, "E0")
    assert view.cause == "rank 0, reduce, step 3: E0"


def test_the_launchers_word_on_the_cause_comes_first() -> None:
    failed = worker("failed", 5, rank=1, phase="reduce", step=3, error="connection closed")
    done = launcher("done", 6, status="failed", exit_code=1, cause="rank 0 was killed by SIGKILL")
    view = view_of(failed, done)
    assert (view.status, view.cause, view.exit_code) == (
        "failed",
        "rank 0 was killed by SIGKILL",
        1,
    )


def test_the_reason_of_a_stop_is_its_cause() -> None:
    done = launcher("done", 3, status="preempted", exit_code=75, cause="")
    view = view_of(worker("stopped", 2, step=1, reason="SIGTERM"), done)
    assert (view.status, view.cause) == ("preempted", "SIGTERM")


def test_a_checkpoint_that_was_resumed_from_is_the_last_one() -> None:
    view = view_of(
        worker("checkpoint", 1, step=4, path="/c/4", seconds=1.0),
        worker("checkpoint", 2, step=6, path="/c/6-damaged", seconds=1.0),
        worker("resumed", 3, attempt=1, step=4, path="/c/4"),
    )
    assert view.checkpoint is not None
    assert (view.checkpoint.step, view.checkpoint.seconds) == (4, None)


def test_speed_and_eta_come_from_the_last_steps_of_the_attempt() -> None:
    slow = [step(n, t=10.0 * n, tokens_per_s=1.0) for n in range(1, 31)]
    fast = [step(n, t=1000.0 + n, attempt=1, tokens_per_s=50.0) for n in range(31, 41)]
    view = view_of(*slow, *fast, max_steps=100)
    assert view.tokens_per_s_smooth == 50.0
    assert (view.pace_s, view.lost_s) == (1.0, 731.0)
    assert view.eta_s == pytest.approx(60 * (1.0 + 731 / 40))  # restarts go on as they came


def test_the_time_between_two_launches_is_not_lost_to_a_restart() -> None:
    before, after = [step(n) for n in (1, 2)], [step(n, t=9000.0 + n, attempt=1) for n in (3, 4)]
    view = view_of(*before, launcher("launch", 8000.0), *after, max_steps=10)
    assert (view.lost_s, view.eta_s) == (0.0, 6.0)


def test_one_step_is_enough_for_an_eta_and_none_is_not() -> None:
    assert view_of(step(1), max_steps=11).eta_s == pytest.approx(5.0)
    assert view_of(max_steps=10).eta_s is None
    assert view_of(step(1)).eta_s is None
    assert view_of(step(1), launcher("done", 9, status="failed"), max_steps=10).eta_s is None


def test_the_first_step_of_an_attempt_is_no_throughput() -> None:
    speeds = {1: 1.0, 2: 10.0, 3: 12.0}
    first = [step(n, tokens_per_s=speed) for n, speed in speeds.items()]
    again = [step(4, attempt=1, tokens_per_s=2.0), step(5, attempt=1, tokens_per_s=11.0)]
    assert view_of(*first, *again).throughput == ((2, 10.0), (3, 12.0), (5, 11.0))


def test_a_loss_that_is_not_a_number_is_kept_as_what_it_is() -> None:
    view = view_of(step(1, loss=math.nan), step(2, loss=math.inf, skipped=True), step(3))
    assert steps_of(view.loss) == [1, 2, 3]
    assert math.isnan(view.loss[0][1])
    assert view.skipped_steps == (2,)
    assert json.loads(json.dumps(json_safe(to_plain(view)), allow_nan=False))["loss"][0][1] == "nan"


@pytest.mark.parametrize("junk", [None, "text", [], {}, math.nan, True, -1])
@pytest.mark.parametrize("kind", ["started", "step", "eval", "checkpoint", "failed", "done"])
def test_fields_that_make_no_sense_break_nothing(kind: str, junk: Any) -> None:
    names = ["step", "loss", "rss", "peak", "world_size", "path", "status", "exit_code", "t"]
    fields = dict.fromkeys(names, junk)
    source = {} if kind == "done" else {"rank": 0, "attempt": 0}
    view = fold([Event(kind=kind, t=1.0, fields=fields, **source), step(1), step(2)], max_steps=9)
    assert view.steps == 2


def test_ten_thousand_steps_are_folded_quickly_while_they_are_watched() -> None:
    live, started = Fold(max_steps=10_000), time.perf_counter()
    for number in range(1, 10_001):
        live.add([step(number), step(number, rank=1)])
        if number % 50 == 0:
            live.view()
    view = live.view()
    assert (view.steps, len(view.loss)) == (10_000, 10_000)
    assert time.perf_counter() - started < 10  # quadratic work takes minutes


def write_files(rundir: RunDir, files: Sequence[Sequence[Event]]) -> None:
    for file in files:
        rank, attempt = file[0].rank, file[0].attempt
        known = rank is not None and attempt is not None
        path = rundir.event_file(rank=rank or 0, attempt=attempt or 0)
        with EventWriter(path if known else rundir.launcher_events) as writer:
            for event in file:
                writer.write_record(event.kind, t=event.t, **event.fields)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def test_following_a_directory_gives_the_same_view(rundir: RunDir) -> None:
    rundir.write_plan(plan_of(max_steps=8))
    write_files(rundir, restarted_run())
    assert follow(rundir) == fold([e for file in restarted_run() for e in file], max_steps=8)


def test_following_needs_no_plan(rundir: RunDir) -> None:
    write_files(rundir, restarted_run())
    rundir.plan_file.write_text("{")
    assert (follow(rundir).steps, follow(rundir).max_steps) == (8, 0)


def test_following_reads_past_the_limit_of_one_poll(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colotrain.events.log.LINE_LIMIT", 600)
    monkeypatch.setattr("colotrain.events.log.POLL_LIMIT", 700)
    write_files(rundir, restarted_run())
    assert steps_of(follow(rundir).loss) == list(range(1, 9))


def test_the_summary_is_the_document_of_the_design(rundir: RunDir) -> None:
    flops = worker("peak_flops", 100.6, flops_per_s=1e6, what="float32 matmul")
    events = [event for file in restarted_run() for event in file]
    document = summary(fold([*events, flops]), plan_of(), rundir)
    assert document == {
        "status": "finished",
        "steps": 8,
        "optimizer_steps": 8,
        "micro_batches": 32,
        "loss": {"first": 1.0, "last": 0.125, "history": [[n, 1 / n] for n in range(1, 9)]},
        "validation_loss": 2.0,
        "tokens_per_s": 100.0,
        "unit": "tokens",
        "mfu": 600.0 * 100.0 / (2 * 1e6),
        "memory": {
            "peak_by_rank": [200 * MIB, 201 * MIB],
            "ledger": {
                "parameters": 400,
                "gradients": 320,
                "optimizer": 640,
                "activations": 0,
                "gathered": 0,
                "buffers": 0,
                "baseline": 0,
            },
            "predicted_peak": 1360,
            "measured_peak": 210763776,
            "error": 1360 / 210763776 - 1,
        },
        "time": {"step_s": 0.5, "predicted_step_s": 0.0, "error": None},
        "restarts": 1,
        "goodput": {
            "share": 0.2,  # 8 steps of 0.5 s in the 20 s of the launch
            "useful_s": 4.0,
            "wall_s": 20.0,
            "lost_steps": 2,
            "restart_s": 2.5,
            "recoveries": [{"lost_steps": 2, "lost_s": 5.5, "restart_s": 2.5}],
        },
        "plugin": "zero2",
        "time_to_first_step_s": 1.0,
        "run_dir": str(rundir.path),
    }


def test_the_time_of_a_step_is_the_median_by_its_own_clock(rundir: RunDir) -> None:
    seconds = [9.0, 0.25, 0.5, 7.0, 0.5]  # warming up, and one step that hung
    events = [step(n + 1, step_s=s, tokens_per_s=1.0) for n, s in enumerate(seconds)]
    assert summary(view_of(*events), plan_of(), rundir)["time"]["step_s"] == 0.5


def test_the_overall_speed_is_the_median_step_without_warm_up(rundir: RunDir) -> None:
    speeds = [1.0, 100.0, 5.0, 101.0, 102.0]  # warming up, and one step that hung
    view = view_of(*(step(n + 1, tokens_per_s=speed) for n, speed in enumerate(speeds)))
    assert summary(view, plan_of(), rundir)["tokens_per_s"] == 100.5
    assert summary(view_of(step(1)), plan_of(), rundir)["tokens_per_s"] == 100.0


def test_the_summary_of_a_run_that_did_nothing_has_the_same_keys(rundir: RunDir) -> None:
    empty = summary(view_of(launcher("done", 1, status="failed")), plan_of(), rundir)
    full = summary(fold([e for f in restarted_run() for e in f]), plan_of(), rundir)
    assert empty.keys() == full.keys()
    assert empty["loss"] == {"first": None, "last": None, "history": []}
    assert (empty["mfu"], empty["tokens_per_s"]) == (0.0, 0.0)


def test_a_preference_pair_is_the_tokens_of_its_two_answers() -> None:
    plan = plan_of()
    pairs = dataclasses.replace(plan, data=dataclasses.replace(plan.data, pairs=True))
    view = view_of(worker("peak_flops", 0.0, flops_per_s=1e6, what="float32 matmul"))
    assert mfu(view, pairs, 100.0) == 2 * plan.data.seq_len * mfu(view, plan, 100.0) > 0.0


def test_a_summary_with_losses_that_are_not_numbers_is_valid_json(rundir: RunDir) -> None:
    document = summary(view_of(step(1), step(2, loss=math.nan)), plan_of(), rundir)
    assert json.loads(json.dumps(document, allow_nan=False))["loss"]["last"] == "nan"


def test_a_view_is_immutable() -> None:
    live = Fold().add([step(1)])
    before = live.view()
    live.add([step(2)])
    assert steps_of(before.loss) == [1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.steps = 5  # type: ignore[misc]


def test_a_save_in_flight_and_one_that_failed_are_told() -> None:
    events = [
        launcher("launch", 100.0, world_size=1),
        worker("started", 100.5, world_size=1, step=0),
        step(1),
        worker("checkpoint_started", 102.0, step=1, bytes=9),
    ]
    assert fold(events).saving == (1, 102.0)
    saved = worker("checkpoint", 103.0, step=1, path="/c/1", seconds=1.0, stall_s=0.1)
    view = fold([*events, saved])
    assert (view.saving, view.save_failure) == (None, None)
    failed = worker("checkpoint_failed", 103.0, step=1, error="rank 1: no space")
    view = fold([*events, failed])
    assert view.saving is None
    assert view.save_failure == "checkpoint of step 1 failed: rank 1: no space"


def test_a_rollback_forgets_what_is_done_again() -> None:
    events = [launcher("launch", 100.0, world_size=1), worker("started", 100.5, step=0)]
    events += [step(n) for n in (1, 2, 3, 4)]
    events += [worker("resumed", 105.0, step=2, path="/c/2"), step(3, t=106.0, loss=7.0)]
    assert fold(events).loss == ((1, 1.0), (2, 0.5), (3, 7.0))


def test_what_each_rank_held_at_its_peak_is_told_by_category(rundir: RunDir) -> None:
    sizes = {"parameters": 40, "optimizer": 80, "baseline": 50, "activations": 7}
    told = [
        worker("memory", 100.7, rank=rank, step=1, **sizes | {"gradients": 10 * rank})
        for rank in (0, 1)
    ]
    view = fold([*(event for file in restarted_run()[:2] for event in file), *told])
    assert {rank: breakdown.total for rank, breakdown in view.memory_by_rank.items()} == {
        0: 177,
        1: 187,
    }
    measured = summary(view, plan_of(), rundir)["memory"]["measured"]
    assert (measured["gradients"], measured["activations"], measured["gathered"]) == (10, 7, 0)


def test_on_a_gpu_the_plan_and_the_peak_are_compared_without_the_context(rundir: RunDir) -> None:
    """The allocator's peak has no CUDA context, and the plan's is no measurement."""
    plan = plan_of()
    memory = dataclasses.replace(plan.memory, baseline=800 * MIB)
    cluster = dataclasses.replace(plan.cluster, device="cuda")
    plan = dataclasses.replace(plan, memory=memory, cluster=cluster)
    told = [
        worker("device_memory", 100.7, rank=rank, step=1, reserved=9 + rank, free=5, outside=3)
        for rank in (0, 1)
    ]
    view = fold([*(event for file in restarted_run()[:2] for event in file), *told])
    found = summary(view, plan, rundir)["memory"]
    assert found["measured_peak"] == max(view.peak_by_rank)
    assert found["predicted_peak"] == plan.memory.total - 800 * MIB
    assert found["device"] == {
        "reserved_by_rank": [9, 10],
        "free_by_rank": [5, 5],
        "outside_by_rank": [3, 3],
    }


def test_time_to_the_first_step_is_that_of_the_newest_command() -> None:
    first = [launcher("launch", 10, began_at=5), worker("started", 11, step=0), step(1, t=15)]
    assert view_of(*first).time_to_first_step_s == 10
    again = [launcher("launch", 1000, began_at=995), worker("started", 1001, attempt=1, step=0)]
    assert view_of(*first, *again).time_to_first_step_s == 10  # nothing was idle time of a start
    again.append(step(1, attempt=1, t=1002))
    assert view_of(*first, *again).time_to_first_step_s == 7
    restart = step(1, attempt=2, t=2000)
    assert view_of(*first, *again, restart).time_to_first_step_s == 7


@pytest.mark.parametrize(
    ("source", "per_sample", "expected"),
    [("corpus", 1, "tokens"), ("target", 1, "samples"), ("target", 99, "targets")],
)
def test_what_is_counted_has_its_name(source: Any, per_sample: int, expected: str) -> None:
    plan = plan_of()
    plan = dataclasses.replace(plan, data=dataclasses.replace(plan.data, source=source))
    view = view_of(step(1, tokens=per_sample * plan.batch.global_batch))
    assert unit(view, plan) == expected
    assert summary(view, plan, RunDir("x"))["unit"] == expected
    assert f" {expected}_per_s=100 " in step_line(Step.of(step(1)), view, plan)
    assert f"{expected}/s" in dict(summary_rows(summary(view, plan, RunDir("x")), plan, view))
