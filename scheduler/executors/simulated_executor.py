"""SimulatedExecutor: a simulated world of jobs and nodes, whose time the caller advances.

It computes when events happen, with the delays and ordering of a real executor. It reads no clock and draws no random
numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from types import MappingProxyType

from scheduler.domain import gpu_sets
from scheduler.domain.fleet import Loan, Node
from scheduler.domain.job import Job
from scheduler.domain.observation import FailureCause, Observation, Run, RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_nodes import SimulatedNodes, UnservedSteps
from scheduler.executors.simulated_run import Delays, RunSpec, RunWork, SimulatedJob, SimulatedRun


def _get_predicted_step_s(job: Job) -> float:
    """Return the step time that the job's plan states."""
    assert job.allocation.plan is not None, "a job with GPUs has a plan"
    return job.allocation.plan.iteration_time_s


class SimulatedExecutor:
    """Executor for simulations, with ground truths that the scheduler cannot see.

    `compute_step_s` returns the true seconds per step of a job with GPUs and a plan. `true_steps` holds job lengths
    that differ from the declared ones.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        delays: Delays | None = None,
        now_s: float = 0.0,
        compute_step_s: Callable[[Job], float] = _get_predicted_step_s,
        true_steps: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.work: list[RunWork] = []
        self._delays = delays or Delays()
        self._compute_step_s = compute_step_s
        self._steps_true = true_steps
        self._now_s = now_s
        nodes = tuple(nodes)
        self._nodes = SimulatedNodes(nodes, drain_s=self._delays.drain_s)
        self._jobs: dict[str, SimulatedJob] = {}
        self._reported_runs: dict[int, SimulatedRun] = {}
        self._last_reports: dict[int, Run] = {}
        self._runs: tuple[Run, ...] | None = ()
        self._changed_runs: dict[int, SimulatedRun] = {}
        self._checkpoints: list[tuple[float, int, SimulatedRun]] = []
        self._desired_jobs: Mapping[str, Job] = {}
        self._loans: Mapping[str, Loan] = {}
        self._converged_generation = 0
        self._events: list[tuple[float, int, SimulatedRun | str]] = []
        self._sequence = count()
        self._observed_runs: list[SimulatedRun] = []
        self._ended: list[SimulatedRun] = []
        self._has_unobserved_change = False
        self._occupied_gpus = 0

    @property
    def now_s(self) -> float:
        return self._now_s

    @property
    def occupied_gpus(self) -> int:
        """GPUs with live workers."""
        return self._occupied_gpus

    def next_event_s(self) -> float:
        """Return the time of the next event, or the current time if there is an unobserved change."""
        if self._has_unobserved_change:
            return self._now_s
        while self._events and self._is_outdated(self._events[0]):
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def advance_to(self, now_s: float) -> None:
        """Process all events up to `now_s`, in order."""
        if now_s < self._now_s:
            raise ValueError(f"now_s is {now_s}, before the current simulated time {self._now_s}")
        while self._events and self._events[0][0] <= now_s:
            event = heapq.heappop(self._events)
            if self._is_outdated(event):
                continue
            self._now_s, _, subject = event
            if isinstance(subject, str):
                self._has_unobserved_change |= self._nodes.finish_drain(subject, self._now_s)
            else:
                subject.advance()
                self._handle_phase_change(subject)
        self._now_s = now_s

    def observe(self) -> Observation:
        self._has_unobserved_change = False
        observation = self.peek()
        self._observed_runs = [run for run in self._changed_runs.values() if run.has_unreported_change(self._now_s)]
        return observation

    def peek(self) -> Observation:
        """Return the current observation without marking changes as observed."""
        while self._checkpoints and self._checkpoints[0][0] <= self._now_s:
            run = heapq.heappop(self._checkpoints)[2]
            if id(run) in self._reported_runs and run.has_unreported_change(self._now_s):
                self._changed_runs[id(run)] = run
        for key, run in self._changed_runs.items():
            if key in self._reported_runs:
                self._last_reports[key], self._runs = run.to_run(self._now_s), None
        if self._runs is None:
            self._runs = tuple(self._last_reports.values())
        return Observation(self._now_s, self._converged_generation, self._runs, self._nodes.get_facts())

    def converge(self, desired: Snapshot) -> None:
        if desired.generation > self._converged_generation:
            for run in self._observed_runs:
                self._settle(run)
        self._observed_runs = []
        if desired.loans is not self._loans and desired.loans != self._loans:
            self._loans, self._has_unobserved_change = desired.loans, True
            for name in self._nodes.apply_loans(desired.loans, desired.pools, self._now_s):
                heapq.heappush(self._events, (self._now_s + self._nodes.drain_s, next(self._sequence), name))
        if desired.jobs is not self._desired_jobs:
            before = self._desired_jobs
            for job in [job for job_id, job in desired.jobs.items() if before.get(job_id) is not job]:
                self._converge_job(job)
            for job_id in self._jobs.keys() - desired.jobs.keys() if len(self._jobs) > len(desired.jobs) else ():
                self._drop_job(job_id)
            self._desired_jobs = desired.jobs
        self._forget_ended()
        self._converged_generation = max(self._converged_generation, desired.generation)

    def close(self) -> None:
        """Do nothing: a simulation owns no resources."""

    def set_demand(self, pool: str, gpus: float) -> None:
        self._nodes.set_demand(pool, gpus, self._now_s)

    def list_unserved_demand(self) -> Mapping[str, UnservedSteps]:
        """Return the demand without a pod that serves, by pool, until now (`SimulatedNodes.list_unserved`)."""
        return self._nodes.list_unserved(self._now_s)

    def fail_node(self, name: str) -> None:
        """Fail the node and all runs with a worker on it."""
        self._nodes.mark_down(name, self._now_s)
        self._has_unobserved_change = True
        for sim_job in list(self._jobs.values()):
            if sim_job.live is not None and name in sim_job.live.spec.gpus:
                self._kill(sim_job.live, RunPhase.LOST, f"node {name} went down")

    def restore_node(self, name: str) -> None:
        self._nodes.mark_up(name, self._now_s)
        self._has_unobserved_change = True

    def crash_job(self, job_id: str) -> bool:
        """Crash the job's workers. Return False if none run."""
        sim_job = self._jobs.get(job_id)
        if sim_job is None or sim_job.live is None:
            return False
        self._kill(sim_job.live, RunPhase.FAILED, "its workers crashed")
        return True

    def run_out_of_memory(self, job_id: str, *, peak_bytes: int) -> bool:
        """Let the job's workers run out of memory at `peak_bytes`. Return False if none run."""
        sim_job = self._jobs.get(job_id)
        if sim_job is None or sim_job.live is None:
            return False
        sim_job.live.cause, sim_job.live.peak_bytes = FailureCause.OUT_OF_MEMORY, peak_bytes
        self._kill(sim_job.live, RunPhase.FAILED, "OutOfMemoryError")
        return True

    def delay_save(self, job_id: str, extra_s: float) -> bool:
        """Delay the job's next save before leaving by `extra_s`. Return False if no run could be asked to save."""
        sim_job = self._jobs.get(job_id)
        if sim_job is None or sim_job.live is None or sim_job.live.phase is RunPhase.LEAVING:
            return False
        sim_job.extra_save_s = extra_s
        return True

    def list_running_jobs(self) -> tuple[str, ...]:
        """Return the jobs with live workers."""
        return tuple(job_id for job_id, sim_job in self._jobs.items() if sim_job.live is not None)

    def list_live_runs(self) -> tuple[RunSpec, ...]:
        """Return the runs with live workers, whether or not they were observed."""
        return tuple(sim_job.live.spec for sim_job in self._jobs.values() if sim_job.live is not None)

    def _converge_job(self, job: Job) -> None:
        """Take the missing steps for one job whose desired state changed."""
        sim_job = self._jobs.get(job.id)
        if sim_job is None:
            sim_job = self._jobs[job.id] = SimulatedJob(job, steps_saved=job.progress.checkpoint_steps)
        sim_job.job = job
        live, allocation = sim_job.live, job.allocation
        if live is not None and not _is_wanted(live, job):
            leave_by_s = math.inf if allocation.leave_by_s is None else allocation.leave_by_s
            save_s = self._delays.compute_save_s(job, nodes=len(live.spec.gpus)) + sim_job.extra_save_s
            before = (live.phase, live.due_s)
            live.leave(self._now_s, by_s=leave_by_s, save_s=save_s)
            sim_job.extra_save_s = 0.0
            if (live.phase, live.due_s) != before:
                self._handle_phase_change(live)
        elif (
            live is not None
            and (checkpoint_request := job.pending_checkpoint_request) is not None
            and checkpoint_request.asked_at_s != sim_job.asked_at_s
        ):
            if checkpoint_request.steps is None:
                live.fresh = True  # report the current step first
            else:
                sim_job.asked_at_s = checkpoint_request.asked_at_s
                live.save(self._now_s)
            self._changed_runs[id(live)], self._has_unobserved_change = live, True
        self._start(sim_job)
        self._has_unobserved_change |= bool(allocation.releasing) and sim_job.live is None

    def _start(self, sim_job: SimulatedJob) -> None:
        """Start the wanted generation, unless an older one is alive or it has already ended."""
        job, allocation = sim_job.job, sim_job.job.allocation
        if sim_job.live is not None or not allocation.target or allocation.plan is None:
            return
        if sim_job.succeeded or allocation.generation <= sim_job.generation_ended:
            return
        spec = RunSpec(
            job_id=job.id,
            generation=allocation.generation,
            gpus=allocation.target,
            step_time_s=self._compute_step_s(job),
            steps_start=sim_job.steps_saved,
            steps_max=self._steps_true.get(job.id, float(job.spec.steps) or math.inf),
            checkpoint_interval_s=job.spec.checkpoint.interval_s,
            transfer_s=self._delays.compute_transfer_s(job.id, nodes=len(allocation.target)),
        )
        restart_s = self._delays.compute_restart_s(job, nodes=len(allocation.target))
        delay_s = restart_s if sim_job.started else self._delays.start_s
        sim_job.live = run = SimulatedRun.start(spec, now_s=self._now_s, delay_s=delay_s)
        sim_job.started = True
        self._occupied_gpus += gpu_sets.count(spec.gpus)
        self._reported_runs[id(run)] = self._changed_runs[id(run)] = run
        down = [name for name in spec.gpus if not self._nodes.is_up(name)]
        if down:
            self._kill(run, RunPhase.LOST, f"node {down[0]} is down")
        else:
            self._schedule(run)

    def _kill(self, run: SimulatedRun, phase: RunPhase, reason: str) -> None:
        run.kill(phase, self._now_s, reason=reason)
        self._handle_phase_change(run)

    def _handle_phase_change(self, run: SimulatedRun) -> None:
        """Schedule the run's next event, or record its end and start the next generation."""
        self._has_unobserved_change = True
        self._changed_runs[id(run)] = run
        if run.is_live:
            self._schedule(run)
        else:
            self._start(self._record_end(run))

    def _record_end(self, run: SimulatedRun) -> SimulatedJob:
        """Record the results of an ended run."""
        spec, sim_job = run.spec, self._jobs[run.spec.job_id]
        sim_job.live, sim_job.steps_saved, sim_job.generation_ended = None, run.steps_kept, spec.generation
        sim_job.succeeded |= run.phase is RunPhase.SUCCEEDED
        self._ended.append(run)
        self._occupied_gpus -= gpu_sets.count(spec.gpus)
        if (work := run.get_work()) is not None:
            self.work.append(work)
        return sim_job

    def _schedule(self, run: SimulatedRun) -> None:
        if run.due_s < math.inf:
            heapq.heappush(self._events, (run.due_s, next(self._sequence), run))

    def _is_outdated(self, event: tuple[float, int, SimulatedRun | str]) -> bool:
        due_s, _, subject = event
        return not isinstance(subject, str) and subject.due_s != due_s

    def _drop_job(self, job_id: str) -> None:
        """Kill and forget a job that left the desired state."""
        sim_job = self._jobs[job_id]
        if sim_job.live is not None:
            sim_job.live.kill(RunPhase.LOST, self._now_s, reason="its job is gone")
            self._changed_runs[id(sim_job.live)] = sim_job.live
            self._record_end(sim_job.live)
        del self._jobs[job_id]

    def _settle(self, run: SimulatedRun) -> None:
        """Mark the run as reported. It is reported again after its next change."""
        run.mark_reported(self._now_s)
        key = id(run)
        if key not in self._reported_runs:
            return
        self._last_reports[key], self._runs = run.to_run(self._now_s), None
        del self._changed_runs[key]
        if (due_s := run.report_until_s) < math.inf:
            heapq.heappush(self._checkpoints, (due_s, next(self._sequence), run))

    def _forget_ended(self) -> None:
        """Stop reporting ended runs that were observed and that the desired state has moved on from."""
        still_reported = []
        for run in self._ended:
            sim_job = self._jobs.get(run.spec.job_id)
            if sim_job is None or not (run.fresh or run.phase is RunPhase.SUCCEEDED or _is_wanted(run, sim_job.job)):
                self._stop_reporting(run)
            else:
                still_reported.append(run)
        self._ended = still_reported

    def _stop_reporting(self, run: SimulatedRun) -> None:
        del self._reported_runs[id(run)]
        self._changed_runs.pop(id(run), None)
        if self._last_reports.pop(id(run), None) is not None:
            self._runs = None


def _is_wanted(run: SimulatedRun, job: Job) -> bool:
    return bool(job.allocation.target) and run.spec.generation == job.allocation.generation
