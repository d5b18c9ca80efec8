"""Trackers: TensorBoard, W&B and MLflow, fed with the events that the dashboard shows.

They run in the launcher on a thread of their own: a tracker that is missing, fails or hangs causes
a warning, but never delays a step.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from colotrain.events.event import Event
from colotrain.events.gradients import Gradients, Parameters, record_of
from colotrain.events.kinds import Evaluation, Step, WorkerStarted
from colotrain.events.view import unit_of
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.show.thread_warnings import ThreadWarnings
from colotrain.spec.observing import TRACKERS
from colotrain.spec.plan import RunPlan

CLOSE_S = 20.0
"""Seconds that the end of a run waits for the trackers."""
MOST_WAITING = 10_000
"""Maximum number of event batches that wait for a slow tracker; later ones are dropped."""

_STEP = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "clip_ratio": "train/clip_ratio",
    "step_s": "speed/step_s",
    "data_s": "speed/data_s",
    "rss": "memory/rss_bytes",
    "peak": "memory/peak_bytes",
}


class Tracker(Protocol):
    """Destination of logged numbers. Any method may raise; the tracker is not used after that."""

    def log(self, step: int, t: float, values: dict[str, float]) -> None: ...

    def rewind(self, step: int, t: float) -> None:
        """Handle a restart: values logged for steps after `step` will be logged again."""

    def close(self) -> None: ...


class Trackers:
    """Feeds the trackers that a plan names. Use as a context manager around the launch."""

    def __init__(self, plan: RunPlan, rundir: RunDir) -> None:
        self._plan, self._rundir = plan, rundir
        self._waiting: queue.SimpleQueue[Sequence[Event] | None] = queue.SimpleQueue()
        self._warnings = ThreadWarnings()
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        self._dropped = False

    def __enter__(self) -> Trackers:
        if self._plan.observe.trackers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, events: Sequence[Event]) -> list[Event]:
        """Queue `events` without waiting; return warnings as events of kind `note`."""
        if self._thread.is_alive() and events:
            if self._waiting.qsize() < MOST_WAITING:
                self._waiting.put(events)
            elif not self._dropped:
                self._dropped = True
                self._warnings.add("trackers cannot keep up: they miss events from here on")
        return self._warnings.take()

    def close(self) -> list[Event]:
        """Let the trackers finish what is queued; return warnings."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._warnings.add(f"trackers were left behind: not done after {CLOSE_S:.0f} s")
        return self._warnings.take()

    def _work(self) -> None:
        """Body of the thread."""
        trackers = {}
        for name in self._plan.observe.trackers:
            if (tracker := self._try(name, partial(self._open, name))) is not None:
                trackers[name] = tracker
        names: Parameters | None = None
        while (events := self._waiting.get()) is not None:
            for event in events:
                tokens = Step.of(event).tokens if event.kind == Step.KIND else None
                unit = unit_of(tokens, self._plan)
                if event.kind == Parameters.KIND and event.rank == 0:
                    names = Parameters.of(event)
                for name, tracker in list(trackers.items()):
                    if self._try(name, partial(feed, tracker, event, names, unit)) is None:
                        del trackers[name]
        for name, tracker in trackers.items():
            self._try(name, tracker.close)

    def _open(self, name: str) -> Tracker:
        return MADE_BY[name](self._plan, self._rundir)

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        """Return the result of `action` (True for None), or None with a warning if it raises."""
        try:
            result = action()
        except ImportError as error:
            fix = f"pip install 'colotrain[{name}]'"
            self._warnings.add(f"observe.trackers: {name} is not installed ({error}); {fix}")
        except Exception as error:
            self._warnings.add(
                f"observe.trackers: {name} failed and is left out from here on ({error})"
            )
        else:
            return True if result is None else result
        return None


def feed(tracker: Tracker, event: Event, names: Parameters | None, unit: str) -> None:
    """Log the values of an event of rank 0; `names` are the attempt's parameters.

    `unit` is what the speed of a step counts: tokens, samples or targets.
    """
    if event.rank != 0:
        return
    if event.kind == WorkerStarted.KIND and event.attempt:
        tracker.rewind(WorkerStarted.of(event).step, event.t)
    elif values := values_of(event, names, unit):
        tracker.log(Step.of(event).step, event.t, values)


def values_of(event: Event, names: Parameters | None, unit: str) -> dict[str, float]:
    """Return tag → number for an event."""
    if event.kind == Step.KIND:
        step = Step.of(event)
        tags = _STEP | {"tokens_per_s": f"speed/{unit}_per_s"}
        found = {tag: getattr(step, field) for field, tag in tags.items()}
        return {tag: value for tag, value in found.items() if value is not None}
    if event.kind == Evaluation.KIND:
        done = Evaluation.of(event)
        metrics = {f"validation/{name}": value for name, value in (done.metrics or {}).items()}
        return metrics if done.loss is None else {"validation/loss": done.loss, **metrics}
    if event.kind == Gradients.KIND and names is not None:
        return _gradients(Gradients.of(event), names)
    return {}


def _gradients(gradients: Gradients, names: Parameters) -> dict[str, float]:
    values = {}
    for row in record_of(names, gradients).parameters:
        if row.norm is not None and row.status != "frozen":
            values[f"gradient_norm/{row.name}"] = row.norm
        if row.update_ratio is not None and row.status != "frozen":
            values[f"update_ratio/{row.name}"] = row.update_ratio
    return values


def made_folder(rundir: RunDir, name: str) -> Path:
    """Make the folder of a tracker and return it; `OSError` if a tracker might write elsewhere.

    W&B makes links in its folder, to others in it.
    """
    folder, run = rundir.tracker(name), rundir.path.resolve()
    rundir.make_folder(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place) / inner for inner in (*folders, *files)):
            end = path.resolve()
            is_lost = path.is_symlink() and not end.is_relative_to(run)
            if is_lost or (end.exists() and not (end.is_file() or end.is_dir())):
                raise OSError(f"{path}: is a link to a place outside the run, a FIFO or a device")
    return folder


class TensorBoard:
    """Writes event files to the run's `trackers/tensorboard` with tensorboard's own writer."""

    def __init__(self, plan: RunPlan, rundir: RunDir) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(made_folder(rundir, "tensorboard")))

    def log(self, step: int, t: float, values: dict[str, float]) -> None:
        summary = self._summaries.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._writer.add_event(self._events.Event(wall_time=t, step=step, summary=summary))

    def rewind(self, step: int, t: float) -> None:
        """Write a mark at which TensorBoard discards the steps after `step`."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        mark = self._events.Event(wall_time=t, step=step + 1, session_log=start)
        self._writer.add_event(mark)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes a W&B run to the run's `trackers/wandb`: offline, unless `WANDB_MODE` says otherwise.

    `wandb sync` uploads an offline run. `WANDB_PROJECT` names its project.
    """

    def __init__(self, plan: RunPlan, rundir: RunDir) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "colotrain"),
            name=plan.name,
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(made_folder(rundir, "wandb")),
            config=to_plain(plan),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")  # W&B's counter only grows, but steps repeat after restarts
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, t: float, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def rewind(self, step: int, t: float) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Writes an MLflow run to `MLFLOW_TRACKING_URI`, by default the run's `trackers/mlflow`.

    `MLFLOW_EXPERIMENT_NAME` names its experiment; the plan's settings are its parameters.
    """

    MOST = 100
    """Entries that MLflow takes at a time."""

    def __init__(self, plan: RunPlan, rundir: RunDir) -> None:
        import mlflow

        self._mlflow, folder = mlflow, made_folder(rundir, "mlflow")
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute()}/mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "colotrain")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=plan.name).info.run_id
        settings = [
            mlflow.entities.Param(key, str(value)[:500])
            for key, value in _settings(to_plain(plan), "")
        ]
        for start in range(0, len(settings), self.MOST):
            self._client.log_batch(self._run, params=settings[start : start + self.MOST])

    def log(self, step: int, t: float, values: dict[str, float]) -> None:
        at = int(t * 1000)
        metrics = [self._mlflow.entities.Metric(k, v, at, step) for k, v in values.items()]
        for start in range(0, len(metrics), self.MOST):
            self._client.log_batch(self._run, metrics=metrics[start : start + self.MOST])

    def rewind(self, step: int, t: float) -> None:
        pass

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _settings(plain: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each leaf."""
    for key, value in plain.items():
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


MADE_BY: dict[str, Callable[[RunPlan, RunDir], Tracker]] = dict(
    zip(TRACKERS, (TensorBoard, WeightsAndBiases, MLflow), strict=True)
)
