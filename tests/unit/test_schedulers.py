"""A batch system is one row: its name is the same in the registry, the variables and the schema."""

from __future__ import annotations

import inspect
import typing

import pytest

from colotrain.config.schema_cluster import Cluster
from colotrain.records import field_types, to_plain
from colotrain.schedulers import registry
from colotrain.schedulers.job import Answers, JobState, Submitted
from colotrain.schedulers.registry import SCHEDULERS, Commands, Scheduler, scheduler_of
from colotrain.spec import schedulers


def test_every_scheduler_has_a_row_variables_and_a_section() -> None:
    named, _ = typing.get_args(field_types(Cluster)["scheduler"])
    assert set(typing.get_args(named)) == set(SCHEDULERS) == set(schedulers.SCHEDULERS)
    for name, row in SCHEDULERS.items():
        assert row.name == name
        assert field_types(Cluster)[name] is row.settings
        shared = {"partition", "gpus_per_node", "cpus_per_task", "container", "python", "snapshot"}
        assert shared <= set(field_types(row.settings))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedulers_module_has_every_command(name: str) -> None:
    wanted = {n: f for n, f in vars(Commands).items() if inspect.isfunction(f) and n[0] != "_"}
    for command, declared in wanted.items():
        given = inspect.signature(getattr(SCHEDULERS[name].commands, command))
        assert len(given.parameters) == len(inspect.signature(declared).parameters) - 1, command


class Other:
    """Commands of another scheduler, of which every job runs."""

    cancelled: typing.ClassVar[list[str]] = []

    @staticmethod
    def ask(jobs: list[str]) -> Answers:
        return Answers(states={job: JobState(state="RUNNING", asked="other") for job in jobs})

    @staticmethod
    def cancel(job: str) -> None:
        Other.cancelled.append(job)


def test_each_job_is_asked_of_its_own_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SCHEDULERS["slurm"]
    other = Scheduler(name="other", settings=slurm.settings, render=slurm.render, commands=Other)  # type: ignore[arg-type]
    monkeypatch.setitem(SCHEDULERS, "other", other)
    monkeypatch.setattr(
        slurm.commands, "ask", lambda jobs: Answers(states={jobs[0]: JobState(state="PENDING")})
    )
    jobs = [Submitted(job="1", script="x"), Submitted(job="pod-2", script="x", scheduler="other")]
    states = registry.ask(jobs).states
    assert {job: said.state for job, said in states.items()} == {"1": "PENDING", "pod-2": "RUNNING"}
    registry.cancel(jobs[1])
    assert Other.cancelled == ["pod-2"]


def test_a_section_with_settings_names_the_scheduler() -> None:
    plain = to_plain(Cluster())
    assert scheduler_of({"cluster": plain}) is None
    assert scheduler_of({"cluster": plain | {"scheduler": "slurm"}}) is SCHEDULERS["slurm"]
    described = plain | {"slurm": plain["slurm"] | {"partition": "gpu"}}
    assert scheduler_of({"cluster": described}) is SCHEDULERS["slurm"]
