"""A scheduler is one row: its name is the same in the registry, the schema and conf/cluster."""

from __future__ import annotations

import inspect
import typing
from dataclasses import replace

import pytest

from colotrain.config.schema_cluster import Cluster
from colotrain.config.shipped import shipped
from colotrain.records import field_types, to_plain
from colotrain.schedulers import hosts, registry
from colotrain.schedulers.job import Answers, JobState, Submitted
from colotrain.schedulers.registry import SCHEDULERS, Commands, Nodes, scheduler_of
from colotrain.spec import schedulers


def test_every_scheduler_has_a_row_a_section_and_a_file() -> None:
    named, _ = typing.get_args(field_types(Cluster)["scheduler"])
    assert typing.get_args(named) == tuple(SCHEDULERS)
    assert set(schedulers.SCHEDULERS) <= set(SCHEDULERS)
    for name, row in SCHEDULERS.items():
        assert row.name == name
        assert f"scheduler: {name}\n" in (shipped("conf") / "cluster" / f"{name}.yaml").read_text()
        assert field_types(Cluster)[name] is row.settings
        shared = {"gpus_per_node", "cpus_per_task", "python"}
        shared |= {"runs_dir"} if row.is_elsewhere else {"container", "snapshot"}
        assert shared <= set(field_types(row.settings))
        assert (row.nodes is not None) == ("partition" in field_types(row.settings))


@pytest.mark.parametrize("protocol", [Commands, Nodes])
def test_a_schedulers_module_has_every_command(protocol: type) -> None:
    wanted = {n: f for n, f in vars(protocol).items() if inspect.isfunction(f) and n[0] != "_"}
    modules = [s.commands if protocol is Commands else s.nodes for s in SCHEDULERS.values()]
    for module in filter(None, modules):
        for command, declared in wanted.items():
            given = inspect.signature(getattr(module, command))
            assert len(given.parameters) == len(inspect.signature(declared).parameters) - 1


class Other:
    """Commands of another scheduler, of which every job runs."""

    cancelled: typing.ClassVar[list[str]] = []

    @staticmethod
    def ask(jobs: list[Submitted]) -> Answers:
        return Answers(states={job.job: JobState(state="RUNNING", asked="other") for job in jobs})

    @staticmethod
    def cancel(job: Submitted) -> None:
        Other.cancelled.append(job.job)


def test_each_job_is_asked_of_its_own_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SCHEDULERS["slurm"]
    other = replace(slurm, name="other", commands=Other)
    monkeypatch.setitem(SCHEDULERS, "other", other)
    monkeypatch.setattr(
        slurm.commands, "ask", lambda jobs: Answers(states={jobs[0].job: JobState(state="PENDING")})
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


@pytest.mark.parametrize(
    ("looked", "state"),
    [
        (("UNKNOWN",), "UNKNOWN"),  # it may be training
        (("UNKNOWN", "RUNNING"), "RUNNING"),
        (("UNKNOWN", "PREEMPTED"), "NODE_FAIL"),
        (("COMPLETED", "COMPLETED"), "COMPLETED"),
    ],
)
def test_a_host_that_is_not_reached_has_not_ended(
    looked: tuple[str, ...], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_look", lambda job, host, rank: (looked[rank], ""))
    names = [f"node-{rank}" for rank in range(len(looked))]
    job = Submitted(job="1", script="job.sh", scheduler="hosts", settings={"names": names})
    assert hosts.ask([job]).states["1"].state == state
