"""LocalExecutor: real worker processes on this machine, one per GPU slot.

A "GPU" of a local node is a slot for one process. Inference is a demand signal here (see inference_placement).
What was begun is written down first (see local_records), every process bears the mark of the run root, and an
executor that takes a run root over ends all marked processes before it does anything else. So a controller may
die at any point: no generation is begun twice, and no two generations of a job ever run beside each other. What the
disk of the run root refuses is tried again at each look or converge; other runs do not wait for it.
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
"""The named points at which `at` is called, so that a test can end the controller there."""

_KILL_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.02
_RENDEZVOUS_COMMAND = (sys.executable, "-m", "scheduler.worker.rendezvous")
_AGENT_COMMAND = (sys.executable, "-m", "scheduler.worker.node_agent")
_PRELOAD_MODULES = ("scheduler.trainer.preload",)


class LocalExecutor:
    """`url` is where workers reach the API, `secret` what their tokens are signed with; without them they have none.

    `preload` names the modules that an agent loads before it starts ranks, where the job's command can use them.
    The rendezvous store starts with the first job, and ranks wait for it from one converge to the next. `observe`
    also ends what is left of a run that has failed, so that no rank waits for a dead one.
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
        self._patience = timeouts or RunTimeouts()
        self._at = on_crash_point
        self._refusals = DeferredDiskWrites()
        self._runs: dict[tuple[str, int], LocalRun] = {}
        self._desired = Snapshot()
        self._converged_generation = 0
        self._down: set[str] = set()
        self._taken_over = False

    def observe(self) -> Observation:
        """See the protocol. The first call of an executor's life ends what an earlier controller left running.

        Raises:
            RunRootTakenError: another living controller works in the same run root.
            TimeoutError: a process of an earlier controller outlives being killed.
        """
        self._take_over()
        now_s = self._now()
        self._poll(now_s)
        self._at("during-observe")
        for run in self._runs.values():
            if not run.is_live and run.reported_at_generation is None:
                run.reported_at_generation = self._converged_generation
        runs = tuple(run.to_run() for run in self._runs.values())
        return Observation(now_s, self._converged_generation, runs, place_inference(self._desired, down=self._down))

    def converge(self, desired: Snapshot) -> None:
        """See the protocol. A state older than the last one is ignored.

        Raises:
            RunRootTakenError, TimeoutError: as `observe`.
        """
        self._take_over()
        if desired.generation < self._converged_generation:
            logger.warning("state %d is older than state %d", desired.generation, self._converged_generation)
            return
        self._at("before-first-effect")
        now_s = self._now()
        self._desired = desired
        self._poll(now_s)
        self._drop_settled_runs()
        self._agents.retain(self._wanted_agents())
        for job in desired.jobs.values():
            self._prepare_agents(job, now_s)
        for run in self._live_runs():
            self._converge_run(run, now_s)
        for job in desired.jobs.values():
            with self._refusals.defer_on_error(f"the start of {job.id} generation {job.allocation.generation}"):
                self._start_if_wanted(job, now_s)
        self._converged_generation = desired.generation
        self._at("after-last-effect")

    def may_lead(self) -> bool:
        """Whether the run root is this executor's: it is that of one living process, also of one that was stopped.
        What runs there only that one may touch, so nobody else leads before it is gone."""
        try:
            self._root.lock()
        except RunRootLockedError:
            return False
        return True

    def has_pending_changes(self) -> bool:
        """Whether a rank was started or has ended since the last look, so that a tick should come soon. Cheap."""
        return self._agents.has_pending_reports or any(run.is_closing for run in self._runs.values())

    def close(self, *, grace_s: float | None = None) -> None:
        """Ask all runs to leave, kill what is left after `grace_s` (default: `Patience.close_s`), and end the
        rendezvous. Waits for all of it."""
        grace_s = self._patience.close_s if grace_s is None else grace_s
        if not self._taken_over:
            self._root.unlock()
            return
        now_s = self._now()
        for run in self._live_runs():
            with self._refusals.defer_on_error(f"the notice to {run.name}"):
                run.request_leave("leave", leave_by_s=now_s + grace_s, now_s=now_s)
        self._wait_for_ends(within_s=grace_s)
        for run in self._live_runs():
            run.kill("it ended with its controller")
        self._wait_for_ends(within_s=_KILL_TIMEOUT_S)
        self._agents.close()
        self._rendezvous.close()
        # A rank may have started something in a group of its own: the mark finds that too.
        kill_marked_processes(self._root.path, timeout_s=_KILL_TIMEOUT_S)
        self._root.unlock()
        self._taken_over = False

    def fail_node(self, name: str) -> None:
        """Make a node fail, for tests and demonstrations: what runs there dies, and it is down until restored.

        Raises:
            ValueError: the last desired state does not know the node.
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
        """Once in an executor's life: end the processes of earlier controllers, then see what they had begun."""
        if self._taken_over:
            return
        self._at("before-take-over")
        self._root.lock()
        ended = kill_marked_processes(self._root.path, timeout_s=_KILL_TIMEOUT_S)
        if ended:
            logger.warning("ended %d processes that an earlier controller left behind", ended)
        for folder in self._root.list_unsettled():
            run = LocalRun.recover(folder, reason="it ended with its controller")
            self._runs[run.record.job_id, run.record.generation] = run
        self._taken_over = True
        self._at("after-take-over")

    def _live_runs(self) -> list[LocalRun]:
        return [run for run in self._runs.values() if run.is_live]

    def _wanted_agents(self) -> set[tuple[str, str]]:
        """(job, node) where the desired state wants ranks, or where there still are some."""
        wanted = {(job.id, node) for job in self._desired.jobs.values() for node in job.allocation.target}
        return wanted | {(run.record.job_id, node) for run in self._live_runs() for node in run.record.gpus}

    def _poll(self, now_s: float) -> None:
        self._agents.poll()
        for run in self._live_runs():
            with self._refusals.defer_on_error(f"the end of {run.name}"):
                run.poll(now_s)

    def _drop_settled_runs(self) -> None:
        """Drop ended runs of jobs that are gone, and those that a committed state has taken in and moved on from."""
        for key, run in list(self._runs.items()):
            job = self._desired.jobs.get(key[0])
            taken_in = run.reported_at_generation is not None and self._desired.generation > run.reported_at_generation
            if not run.is_live and (job is None or (taken_in and not _is_wanted(run, job))):
                self._at("before-settled")
                with self._refusals.defer_on_error(f"settling {run.name}"):
                    run.settle()
                    del self._runs[key]

    def _converge_run(self, run: LocalRun, now_s: float) -> None:
        job = self._desired.jobs.get(run.record.job_id)
        if job is None:
            run.kill("its job is gone")
        elif not (_is_wanted(run, job) or self._can_keep_running(run, job, now_s)):
            by_s = job.allocation.leave_by_s
            action = "replan" if job.allocation.target else "leave"
            with self._refusals.defer_on_error(f"the notice to {run.name}"):
                run.request_leave(action, leave_by_s=math.inf if by_s is None else by_s, now_s=now_s)
            run.kill_if_late(now_s)
        elif (wish := job.pending_checkpoint_request) is not None and wish.generation == run.record.generation:
            with self._refusals.defer_on_error(f"the notice to {run.name}"):
                run.request_checkpoint(wish)

    def _can_keep_running(self, run: LocalRun, job: Job, now_s: float) -> bool:
        """A run that has no GPU to give back need not stop before its next generation can start at once."""
        target = job.allocation.target
        gives_back = not target or gpu_sets.difference(run.record.gpus, target)
        return not run.is_leaving and not gives_back and self._agents.should_wait_for_agents(job, now_s)

    def _prepare_agents(self, job: Job, now_s: float) -> None:
        """Start the agents of a generation that is still to be begun: they load while the run before it goes on."""
        allocation = job.allocation
        begun = (job.id, allocation.generation) in self._runs or self._root.folder(job.id, allocation.generation).exists
        if not begun:
            self._agents.prepare(job, allocation.target.keys() - self._down, now_s=now_s)

    def _start_if_wanted(self, job: Job, now_s: float) -> None:
        """Start the job's generation, once, when its GPUs and its nodes are free for it."""
        allocation = job.allocation
        if not allocation.target or (job.id, allocation.generation) in self._runs:
            return
        if self._down.intersection(allocation.target) or any(_blocks(run, job) for run in self._runs.values()):
            return
        folder = self._root.folder(job.id, allocation.generation)
        if folder.exists:
            self._runs[job.id, allocation.generation] = LocalRun.recover(folder, reason="it was begun once before")
        elif self._launcher.is_ready:
            self._start(job, now_s)

    def _start(self, job: Job, now_s: float) -> None:
        allocation = job.allocation
        assert allocation.plan is not None, "a target comes with its plan"
        self._at("before-started-record")
        record = StartedRecord(
            job_id=job.id,
            generation=allocation.generation,
            gpus=allocation.target,
            world_size=allocation.target_gpus,
            snapshot_generation=self._desired.generation,
            started_at_s=now_s,
        )
        folder = self._root.begin(record, allocation.plan)
        self._at("after-started-record")
        run = LocalRun(record, folder, timeouts=self._patience, on_crash_point=self._at)
        self._runs[job.id, allocation.generation] = run
        run.start(self._launcher.launch(job, self._desired))
        run.poll(now_s)
        logger.info("started %s generation %d on %s", job.id, allocation.generation, gpu_sets.format_gpus(record.gpus))

    def _wait_for_ends(self, *, within_s: float) -> None:
        limit_s = time.monotonic() + within_s
        while self._live_runs() and time.monotonic() < limit_s:
            time.sleep(_POLL_INTERVAL_S)
            self._poll(self._now())

    def _check_node(self, name: str) -> None:
        if name not in self._desired.nodes:
            raise ValueError(f"node: got {name!r}, allowed are {', '.join(sorted(self._desired.nodes))}")


def _is_wanted(run: LocalRun, job: Job) -> bool:
    return bool(job.allocation.target) and run.record.generation == job.allocation.generation


def _blocks(run: LocalRun, job: Job) -> bool:
    """The job is not to be started beside this run: it is the job's own, it has finished the job, or it sits there."""
    if run.record.job_id == job.id:
        return run.end is None or run.end.phase is RunPhase.SUCCEEDED
    return run.is_live and bool(gpu_sets.intersection(run.occupied_gpus, job.allocation.target))
