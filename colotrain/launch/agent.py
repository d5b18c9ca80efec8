"""torch's elastic agent with colotrain's rules: when workers are done, and when a restart helps.

This module imports torch, so `launch.elastic` imports it on the agent's thread only.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from colotrain.addresses import LOOPBACK
from colotrain.callers_script import named_by
from colotrain.launch.copy_keeper import MemoryFiles
from colotrain.launch.node_registry import Left, NotNeeded, Stopped
from colotrain.launch.rendezvous import Rendezvous
from colotrain.launch.server.forkserver import how_server_ended, without_results, work
from colotrain.launch.state import POLL_S, Launch
from colotrain.launch.survivors import end_survivors, failed
from colotrain.launch.worker_exits import clean_exits, processes_of, worker_exits
from colotrain.parent_process import send
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.spec.axes import ranks_on
from colotrain.spec.exit_codes import WORKER_FINAL, WORKER_USAGE

LOST_GRACE_S = 10.0
"""Seconds of grace for workers that wait for a lost rank: they cannot save any more."""


class Agent(LocalElasticAgent):
    """Records why workers died; stops restarting when another attempt cannot help."""

    def __init__(self, launch: Launch, rendezvous: Rendezvous, logs: Path) -> None:
        plan = launch.plan
        self.launch, self.rendezvous, self.logs = launch, rendezvous, logs
        # all nodes have as many ranks: none is read from the store, in which anybody may write
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        self.ended: set[int] = set()
        """Local ranks of this attempt that `end_survivors` has killed."""
        spec = WorkerSpec(
            role="worker",
            local_world_size=plan.cluster.procs_per_node,
            entrypoint=work,
            args=(launch.worker, str(launch.rundir.path), os.getpid(), "", "", (), named_by(plan)),
            rdzv_handler=rendezvous.handler(),
            max_restarts=plan.elastic.max_restarts,
            monitor_interval=0.1,
            local_addr=LOOPBACK,
        )
        known = inspect.signature(LocalElasticAgent).parameters
        timeout: dict[str, Any] = {"shutdown_timeout": 10}  # since torch 2.12
        super().__init__(
            spec=spec,
            logs_specs=_PrivateLogs(launch.rundir, logs),
            start_method="forkserver",
            exit_barrier_timeout=min(300.0, plan.elastic.hang_timeout_s),
            **(timeout if "shutdown_timeout" in known else {}),
        )

    def pids(self) -> dict[int, int]:
        """Local rank → process id of the workers; empty before they are started."""
        return self._pcontext.pids() if self._pcontext else {}

    def first_rank(self) -> int:
        """Rank of this machine's first worker."""
        node = self.get_worker_group().group_rank or 0
        return ranks_on(node, procs_per_node=self.launch.plan.cluster.procs_per_node)[0]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Notice workers that exit with code 0, which torch would wait for, and record failures."""
        if failed(processes_of(self._pcontext), self.launch.plan.cluster.device):
            self._end_survivors()
        result: RunResult = super()._monitor_workers(worker_group)
        left = result.state == WorkerState.HEALTHY and clean_exits(self._pcontext, worker_group)
        if left:
            if not self.launch.have_ended_cleanly(left):
                result = RunResult(state=WorkerState.FAILED, failures=left)
            elif not self.launch.was_regrouped(self.rendezvous):  # else torch checks for nodes
                results = dict.fromkeys(left, 0)
                result = RunResult(state=WorkerState.SUCCEEDED, return_values=results)
        if result.is_failed():
            self._record_failure(result)
        return result

    def _end_survivors(self) -> None:
        """End ranks that compute in vain, or wait for a failed one to begin."""
        self.ended |= end_survivors(
            processes_of(self._pcontext),
            self.launch.rundir,
            first_rank=self.first_rank(),
            has_copies=self.launch.plan.elastic.memory_copy.enabled,
            say=self.launch.say,
        )

    def _record_failure(self, result: RunResult) -> None:
        """Record the exits; allow no further restart where it cannot help."""
        launch = self.launch
        ended = how_server_ended()
        if ended:  # multiprocessing says of every worker that it ended with exit code 255
            launch.watch.end_orphans(f"the fork server, which starts this machine's ranks, {ended}")
        launch.catch_up()
        exits = worker_exits(self.logs, self._pcontext, result.failures, ended=self.ended)
        launch.record_exits(exits)
        final = any(x.exit_code in (WORKER_FINAL, WORKER_USAGE) for x in launch.exits)
        if final or not launch.may_restart() or launch.watch.is_final:
            self._remaining_restarts = 0
        if self._remaining_restarts:
            launch.record_restart()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start workers without torch's queues for results, which ours do not send."""
        self.ended = set()
        spec, places = worker_group.spec, ""
        if self.rendezvous.files.handles:
            places = json.dumps(to_plain(self.rendezvous.copy_places()))
        digests = (self.rendezvous.plan_digest, *self.launch.case_digests)
        spec.args = (*spec.args[:3], places, self.rendezvous.key, digests, spec.args[-1])
        with without_results():
            result: dict[int, Any] = super()._start_workers(worker_group)
            return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Let healthy workers save first, where they restart because nodes join or leave."""
        if worker_group.state == WorkerState.HEALTHY:
            membership = self.rendezvous.membership
            orderly = membership.is_orderly()
            grace_s = self.launch.plan.elastic.grace_s if orderly else LOST_GRACE_S
            reason = membership.regroup()
            time.sleep(2 * POLL_S)  # reports of the other nodes may still arrive
            remote = self.launch.exits_elsewhere()
            self.launch.begin_attempt(self.launch.cause() if remote else reason)
            if not orderly:
                self._end_survivors()
            self._let_save(worker_group, grace_s)
        super()._restart_workers(worker_group)

    def _let_save(self, worker_group: WorkerGroup, grace_s: float) -> None:
        """Send SIGTERM, on which workers save, and wait until they have exited."""
        for pid in self.pids().values():
            send(signal.SIGTERM, pid)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and not clean_exits(self._pcontext, worker_group):
            if super()._monitor_workers(worker_group).state != WorkerState.HEALTHY:
                return
            time.sleep(POLL_S)


class _PrivateLogs(DefaultLogsSpecs):
    """Worker logs where torch has them, but for the user alone, whatever the umask."""

    def __init__(self, rundir: RunDir, folder: Path) -> None:
        super().__init__(log_dir=str(folder), redirects=Std.ALL)
        self._rundir = rundir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = super().reify(envs)
        for file in map(Path, (*logs.stdouts.values(), *logs.stderrs.values())):
            for folder in (file.parent.parent, file.parent):
                folder.chmod(0o700)
            self._rundir.append(file).close()
        return logs


def run_workers(launch: Launch) -> None:
    """Run the launch's workers until they end; raises if they fail."""
    files = MemoryFiles(launch.plan)
    rendezvous = Rendezvous(
        launch.plan,
        launch.rundir,
        launch.node,
        files=files,
        stop=launch.asked_to_stop,
        say=launch.say,
    )
    launch.rendezvous = rendezvous
    logs = _log_folder(launch)
    agent = Agent(launch, rendezvous, logs)
    watch = launch.watch
    watch.pids, watch.first_rank, watch.logs = agent.pids, agent.first_rank, logs
    failed: BaseException | None = None
    try:
        launch.rundir.append(logs / "torch.log").close()
        with torch_logs_to(logs / "torch.log"):  # our events replace its messages
            result = agent.run()
        if result.is_failed():
            raise RuntimeError("workers failed")
    except BaseException as error:
        failed = error
        raise
    finally:
        files.close()
        ends_all = failed is not None and not isinstance(failed, Stopped | Left | NotNeeded)
        rendezvous.end(launch.full_cause() if ends_all else "")


def _log_folder(launch: Launch) -> Path:
    of_node = f"-node{launch.node.rank}" if launch.plan.elastic.max_nodes > 1 else ""
    folder = launch.rundir.logs / (time.strftime("%Y%m%d-%H%M%S") + of_node)
    launch.rundir.make_folder(folder)
    return folder


LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
"""Loggers of the agent, and of the functions that start and end its workers."""


class _File(logging.FileHandler):
    """A file that a full disk leaves incomplete."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # named by logging
        pass


@contextmanager
def torch_logs_to(file: Path) -> Iterator[None]:
    """Write the messages of `LOGGERS` to `file`, and nowhere else, until the end of the block."""
    handler = _File(file, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, before, strict=True):
            logger.propagate = propagates
            logger.removeHandler(handler)
        handler.close()
