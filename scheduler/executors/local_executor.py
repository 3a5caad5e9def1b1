"""LocalExecutor: worker processes on this machine, one per GPU slot.

A GPU of a local node is a slot for one process; inference is only a demand signal (see inference_placement). Each start
is recorded first (see local_records), and every process carries the mark of the run root. A new executor kills all
marked processes before anything else. So after a crash at any point, no generation starts twice and no two generations
of a job run side by side. Failed disk writes are retried at the next pass and do not delay other runs.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scheduler.domain import gpu_sets
from scheduler.domain.job import Job
from scheduler.domain.observation import Observation, RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.disk_writes import DeferredDiskWrites
from scheduler.executors.inference_placement import place_inference
from scheduler.executors.local_agent import AgentPool
from scheduler.executors.local_launch import Launcher, RendezvousStore
from scheduler.executors.local_records import RunRoot, RunRootLockedError, StartedRecord
from scheduler.executors.local_run import LocalRun, RunTimeouts, kill_marked_processes
from scheduler.executors.log_files import LogLimits

logger = logging.getLogger(__name__)

CRASH_POINTS = (
    "before-take-over",
    "after-take-over",
    "during-observe",
    "before-first-effect",
    "before-agent-start",
    "after-agent-start",
    "before-started-record",
    "after-started-record",
    "between-two-spawns",
    "after-spawn",
    "before-notice",
    "after-notice",
    "before-kill",
    "after-kill",
    "before-settled",
    "after-last-effect",
)
"""Points at which `on_crash_point` is called, so that tests can crash the controller there."""

_KILL_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.02
_RENDEZVOUS_COMMAND = (sys.executable, "-P", "-m", "scheduler.worker.rendezvous")
_AGENT_COMMAND = (sys.executable, "-P", "-m", "scheduler.worker.node_agent")
_PRELOAD_MODULES = ("scheduler.trainer.preload",)


class LocalExecutor:
    """Executor for one machine.

    Args:
        url: API URL for workers. Without `url` and `secret`, workers get no token.
        secret: key that signs worker tokens.
        preload: modules that agents load before ranks start, where the job's command can use them.

    The rendezvous store starts with the first job; ranks wait for it across converges. `observe` also kills the rest of
    a failed run, so that no rank waits for a dead one.
    """

    def __init__(
        self,
        run_root: Path,
        *,
        now: Callable[[], float],
        url: str = "",
        secret: bytes | None = None,
        rendezvous_command: Sequence[str] = _RENDEZVOUS_COMMAND,
        preload: Sequence[str] = _PRELOAD_MODULES,
        timeouts: RunTimeouts | None = None,
        logs: LogLimits | None = None,
        on_crash_point: Callable[[str], None] = lambda point: None,
    ) -> None:
        logs = logs or LogLimits()
        self._root = RunRoot(run_root, logs=logs)
        self._now = now
        self._rendezvous = RendezvousStore(rendezvous_command, run_root=self._root.path)
        self._agents = AgentPool(
            self._root,
            command=(*_AGENT_COMMAND, "--log-bytes", str(logs.bytes_max)),
            preload=preload,
            on_crash_point=on_crash_point,
        )
        self._launcher = Launcher(self._root, self._rendezvous, self._agents, url=url, secret=secret)
        self._timeouts = timeouts or RunTimeouts()
        self._on_crash_point = on_crash_point
        self._deferred_writes = DeferredDiskWrites()
        self._runs: dict[tuple[str, int], LocalRun] = {}
        self._desired = Snapshot()
        self._converged_generation = 0
        self._down: set[str] = set()
        self._taken_over = False

    def observe(self) -> Observation:
        """Observe runs and nodes. The first call kills the processes of an earlier controller.

        Raises:
            RunRootLockedError: another controller uses the run root.
            TimeoutError: a process of an earlier controller survives SIGKILL.
        """
        self._take_over()
        now_s = self._now()
        self._poll(now_s)
        self._on_crash_point("during-observe")
        for run in self._runs.values():
            if not run.is_live and run.reported_at_generation is None:
                run.reported_at_generation = self._converged_generation
        runs = tuple(run.to_run() for run in self._runs.values())
        return Observation(now_s, self._converged_generation, runs, place_inference(self._desired, down=self._down))

    def converge(self, desired: Snapshot) -> None:
        """Take the missing steps towards `desired`. Ignores states older than the last one.

        Raises:
            RunRootLockedError, TimeoutError: see `observe`.
        """
        self._take_over()
        if desired.generation < self._converged_generation:
            logger.warning(
                "ignoring snapshot generation %d: generation %d is already applied",
                desired.generation,
                self._converged_generation,
            )
            return
        self._on_crash_point("before-first-effect")
        now_s = self._now()
        self._desired = desired
        self._poll(now_s)
        self._drop_settled_runs()
        self._agents.retain(self._list_wanted_agents())
        for job in desired.jobs.values():
            self._prepare_agents(job, now_s)
        for run in self._live_runs():
            self._converge_run(run, now_s)
        for job in desired.jobs.values():
            with self._deferred_writes.defer_on_error(f"start of {job.id} generation {job.allocation.generation}"):
                self._start_if_wanted(job, now_s)
        self._converged_generation = desired.generation
        self._on_crash_point("after-last-effect")

    def may_lead(self) -> bool:
        """Return whether this process holds the lock of the run root.

        A stopped process keeps it, because only that process can control what runs there.
        """
        try:
            self._root.lock()
        except RunRootLockedError:
            return False
        return True

    def has_pending_changes(self) -> bool:
        """Return whether a rank started or ended since the last poll. Cheap; a tick should follow soon."""
        return self._agents.has_pending_reports or any(run.is_closing for run in self._runs.values())

    def close(self, *, grace_s: float | None = None) -> None:
        """End all runs and the rendezvous store, and wait.

        Runs have `grace_s` to save and leave (default: `RunTimeouts.close_s`) before they are killed.
        """
        grace_s = self._timeouts.close_s if grace_s is None else grace_s
        if not self._taken_over:
            self._root.unlock()
            return
        now_s = self._now()
        for run in self._live_runs():
            with self._deferred_writes.defer_on_error(f"notice to {run.name}"):
                run.request_leave("leave", leave_by_s=now_s + grace_s, now_s=now_s)
        self._wait_for_ends(within_s=grace_s)
        for run in self._live_runs():
            run.kill("the controller ended")
        self._wait_for_ends(within_s=_KILL_TIMEOUT_S)
        self._agents.close()
        self._rendezvous.close()
        # Ranks may have started processes in other process groups, which only the mark finds.
        kill_marked_processes(self._root.path, timeout_s=_KILL_TIMEOUT_S)
        self._root.unlock()
        self._taken_over = False

    def fail_node(self, name: str) -> None:
        """Fail a node, for tests and demos: kill its processes and report it as down until `restore_node`.

        Raises:
            ValueError: the node is not in the last desired state.
        """
        self._check_node(name)
        self._down.add(name)
        for run in self._live_runs():
            if name in run.record.gpus:
                run.kill(f"node {name} went down")
        self._agents.kill_on_node(name)

    def restore_node(self, name: str) -> None:
        self._check_node(name)
        self._down.discard(name)

    def _take_over(self) -> None:
        """On the first call, kill the processes of earlier controllers and load their runs."""
        if self._taken_over:
            return
        self._on_crash_point("before-take-over")
        self._root.lock()
        killed = kill_marked_processes(self._root.path, timeout_s=_KILL_TIMEOUT_S)
        if killed:
            logger.warning("killed %d processes of an earlier controller", killed)
        for folder in self._root.list_unsettled():
            run = LocalRun.recover(folder, reason="the controller ended")
            self._runs[run.record.job_id, run.record.generation] = run
        self._taken_over = True
        self._on_crash_point("after-take-over")

    def _live_runs(self) -> list[LocalRun]:
        return [run for run in self._runs.values() if run.is_live]

    def _list_wanted_agents(self) -> set[tuple[str, str]]:
        """Return (job, node) pairs that are wanted or still have ranks."""
        wanted = {(job.id, node) for job in self._desired.jobs.values() for node in job.allocation.target}
        return wanted | {(run.record.job_id, node) for run in self._live_runs() for node in run.record.gpus}

    def _poll(self, now_s: float) -> None:
        self._agents.poll()
        for run in self._live_runs():
            with self._deferred_writes.defer_on_error(f"outcome of {run.name}"):
                run.poll(now_s)

    def _drop_settled_runs(self) -> None:
        """Drop ended runs of jobs that are gone, or that a committed state has moved on from."""
        for key, run in list(self._runs.items()):
            job = self._desired.jobs.get(key[0])
            is_applied = (
                run.reported_at_generation is not None and self._desired.generation > run.reported_at_generation
            )
            if not run.is_live and (job is None or (is_applied and not _is_wanted(run, job))):
                self._on_crash_point("before-settled")
                with self._deferred_writes.defer_on_error(f"settling {run.name}"):
                    run.settle()
                    del self._runs[key]

    def _converge_run(self, run: LocalRun, now_s: float) -> None:
        job = self._desired.jobs.get(run.record.job_id)
        if job is None:
            run.kill("its job is gone")
        elif not (_is_wanted(run, job) or self._can_keep_running(run, job, now_s)):
            leave_by_s = job.allocation.leave_by_s
            action = "replan" if job.allocation.target else "leave"
            with self._deferred_writes.defer_on_error(f"notice to {run.name}"):
                run.request_leave(action, leave_by_s=math.inf if leave_by_s is None else leave_by_s, now_s=now_s)
            run.kill_if_late(now_s)
        elif (
            checkpoint_request := job.pending_checkpoint_request
        ) is not None and checkpoint_request.generation == run.record.generation:
            with self._deferred_writes.defer_on_error(f"notice to {run.name}"):
                run.request_checkpoint(checkpoint_request)

    def _can_keep_running(self, run: LocalRun, job: Job, now_s: float) -> bool:
        """Return whether the run may continue: it returns no GPU, and its successor's agents still preload."""
        target = job.allocation.target
        returns_gpus = not target or gpu_sets.difference(run.record.gpus, target)
        return not run.is_leaving and not returns_gpus and self._agents.should_wait_for_agents(job, now_s)

    def _prepare_agents(self, job: Job, now_s: float) -> None:
        """Start the agents of a generation that has not begun. They preload while the previous run continues."""
        allocation = job.allocation
        has_begun = (job.id, allocation.generation) in self._runs or self._root.folder(
            job.id, allocation.generation
        ).exists
        if not has_begun:
            self._agents.prepare(job, allocation.target.keys() - self._down, now_s=now_s)

    def _start_if_wanted(self, job: Job, now_s: float) -> None:
        """Start the job's generation, once, when its GPUs and nodes are free."""
        allocation = job.allocation
        if not allocation.target or (job.id, allocation.generation) in self._runs:
            return
        if self._down.intersection(allocation.target) or any(_blocks(run, job) for run in self._runs.values()):
            return
        folder = self._root.folder(job.id, allocation.generation)
        if folder.exists:
            self._runs[job.id, allocation.generation] = LocalRun.recover(folder, reason="it had already begun")
        elif self._launcher.is_ready:
            self._start(job, now_s)

    def _start(self, job: Job, now_s: float) -> None:
        allocation = job.allocation
        assert allocation.plan is not None, "a job with a target has a plan"
        self._on_crash_point("before-started-record")
        record = StartedRecord(
            job_id=job.id,
            generation=allocation.generation,
            gpus=allocation.target,
            world_size=allocation.target_gpus,
            snapshot_generation=self._desired.generation,
            started_at_s=now_s,
        )
        folder = self._root.begin(record, allocation.plan)
        self._on_crash_point("after-started-record")
        run = LocalRun(record, folder, timeouts=self._timeouts, on_crash_point=self._on_crash_point)
        self._runs[job.id, allocation.generation] = run
        run.start(self._launcher.launch(job, self._desired))
        run.poll(now_s)
        logger.info("started %s generation %d on %s", job.id, allocation.generation, gpu_sets.format_gpus(record.gpus))

    def _wait_for_ends(self, *, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while self._live_runs() and time.monotonic() < deadline_s:
            time.sleep(_POLL_INTERVAL_S)
            self._poll(self._now())

    def _check_node(self, name: str) -> None:
        if name not in self._desired.nodes:
            raise ValueError(f"unknown node {name!r}; the nodes are {', '.join(sorted(self._desired.nodes))}")


def _is_wanted(run: LocalRun, job: Job) -> bool:
    return bool(job.allocation.target) and run.record.generation == job.allocation.generation


def _blocks(run: LocalRun, job: Job) -> bool:
    """Return whether the run prevents the job's start: its own run, its success, or a run on the same GPUs."""
    if run.record.job_id == job.id:
        return run.end is None or run.end.phase is RunPhase.SUCCEEDED
    return run.is_live and bool(gpu_sets.intersection(run.occupied_gpus, job.allocation.target))
