"""SimulatedExecutor: a world of jobs and nodes whose time somebody else moves.

It does what real executors do, with the same delays and the same orders, and computes when each thing happens
instead of waiting for it. Nothing here reads a clock or draws a random number.
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
from scheduler.executors.inference_placement import SimulatedNodes
from scheduler.executors.simulated_run import Delays, RunSpec, RunWork, SimulatedJob, SimulatedRun


class SimulatedExecutor:
    """What nobody is told: `step_time_factor`, a job's true step time on so many GPUs as a multiple of its plan's,
    which a CurveCorrection has to find; `steps_true`, the lengths of jobs that differ from what was declared."""

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        delays: Delays | None = None,
        now_s: float = 0.0,
        step_time_factor: Callable[[str, int], float] = lambda job_id, gpus: 1.0,
        true_steps: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.work: list[RunWork] = []
        self._delays = delays or Delays()
        self._factor = step_time_factor
        self._steps_true = true_steps
        self._now_s = now_s
        self._nodes = SimulatedNodes(nodes, drain_s=self._delays.drain_s)
        self._worlds: dict[str, SimulatedJob] = {}
        self._visible: dict[int, SimulatedRun] = {}
        self._shown: dict[int, Run] = {}
        self._runs: tuple[Run, ...] | None = ()
        self._news: dict[int, SimulatedRun] = {}
        self._checkpoints: list[tuple[float, int, SimulatedRun]] = []
        self._heard: Mapping[str, Job] = {}
        self._loans: Mapping[str, Loan] = {}
        self._converged_generation = 0
        self._events: list[tuple[float, int, SimulatedRun | str]] = []
        self._order = count()
        self._told: list[SimulatedRun] = []
        self._ended: list[SimulatedRun] = []
        self._unseen = False
        self._occupied_gpus = 0

    @property
    def now_s(self) -> float:
        return self._now_s

    @property
    def occupied_gpus(self) -> int:
        """GPUs with live workers on them."""
        return self._occupied_gpus

    def next_event_s(self) -> float:
        """When something will change by itself; now where something has that no observation has shown yet."""
        if self._unseen:
            return self._now_s
        while self._events and self._is_outdated(self._events[0]):
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def advance_to(self, now_s: float) -> None:
        """Let everything happen that falls due up to `now_s`, in order."""
        if now_s < self._now_s:
            raise ValueError(f"the simulated world does not go back: it stands at {self._now_s}, asked for {now_s}")
        while self._events and self._events[0][0] <= now_s:
            event = heapq.heappop(self._events)
            if self._is_outdated(event):
                continue
            self._now_s, _, subject = event
            if isinstance(subject, str):
                self._unseen |= self._nodes.finish_drain(subject)
            else:
                subject.advance()
                self._handle_phase_change(subject)
        self._now_s = now_s

    def observe(self) -> Observation:
        self._unseen = False
        seen = self.peek()
        self._told = [run for run in self._news.values() if run.has_unreported_change(self._now_s)]
        return seen

    def peek(self) -> Observation:
        """The same as `observe` would tell, without the control loop having seen it."""
        while self._checkpoints and self._checkpoints[0][0] <= self._now_s:
            run = heapq.heappop(self._checkpoints)[2]
            if id(run) in self._visible and run.has_unreported_change(self._now_s):
                self._news[id(run)] = run
        for key, run in self._news.items():
            if key in self._visible:
                self._shown[key], self._runs = run.to_run(self._now_s), None
        if self._runs is None:
            self._runs = tuple(self._shown.values())
        return Observation(self._now_s, self._converged_generation, self._runs, self._nodes.get_facts())

    def converge(self, desired: Snapshot) -> None:
        if desired.generation > self._converged_generation:
            for run in self._told:
                self._settle(run)
        self._told = []
        if desired.loans is not self._loans and desired.loans != self._loans:
            self._loans, self._unseen = desired.loans, True
            for name in self._nodes.apply_loans(desired.loans):
                heapq.heappush(self._events, (self._now_s + self._nodes.drain_s, next(self._order), name))
        if desired.jobs is not self._heard:
            before = self._heard
            for job in [job for job_id, job in desired.jobs.items() if before.get(job_id) is not job]:
                self._converge_job(job)
            for job_id in self._worlds.keys() - desired.jobs.keys() if len(self._worlds) > len(desired.jobs) else ():
                self._drop_job(job_id)
            self._heard = desired.jobs
        self._forget_ended()
        self._converged_generation = max(self._converged_generation, desired.generation)

    def close(self) -> None:
        """Nothing outlives a simulation."""

    def set_demand(self, pool: str, gpus: float) -> None:
        self._nodes.set_demand(pool, gpus)

    def fail_node(self, name: str) -> None:
        """The node is gone, and with it every run that has a worker there."""
        self._nodes.mark_down(name)
        self._unseen = True
        for world in list(self._worlds.values()):
            if world.live is not None and name in world.live.spec.gpus:
                self._kill(world.live, RunPhase.LOST, f"node {name} went down")

    def restore_node(self, name: str) -> None:
        self._nodes.mark_up(name)
        self._unseen = True

    def crash_job(self, job_id: str) -> bool:
        """The job's workers die of themselves. False where none runs."""
        world = self._worlds.get(job_id)
        if world is None or world.live is None:
            return False
        self._kill(world.live, RunPhase.FAILED, "its workers crashed")
        return True

    def run_out_of_memory(self, job_id: str, *, peak_bytes: int) -> bool:
        """The job's workers die of memory, of which they had `peak_bytes` by then. False where none runs."""
        world = self._worlds.get(job_id)
        if world is None or world.live is None:
            return False
        world.live.cause, world.live.peak_bytes = FailureCause.OUT_OF_MEMORY, peak_bytes
        self._kill(world.live, RunPhase.FAILED, "OutOfMemoryError")
        return True

    def delay_save(self, job_id: str, extra_s: float) -> bool:
        """The job's next save before leaving takes `extra_s` longer. False where no run could be asked to save."""
        world = self._worlds.get(job_id)
        if world is None or world.live is None or world.live.phase is RunPhase.LEAVING:
            return False
        world.extra_save_s = extra_s
        return True

    def list_running_jobs(self) -> tuple[str, ...]:
        """Jobs with live workers."""
        return tuple(job_id for job_id, world in self._worlds.items() if world.live is not None)

    def _converge_job(self, job: Job) -> None:
        """Take the steps that are missing for one job whose desired state is new."""
        world = self._worlds.get(job.id)
        if world is None:
            world = self._worlds[job.id] = SimulatedJob(job, steps_saved=job.progress.checkpoint_steps)
        world.job = job
        live, allocation = world.live, job.allocation
        if live is not None and not _is_wanted(live, job):
            by_s = math.inf if allocation.leave_by_s is None else allocation.leave_by_s
            save_s = self._delays.save_s(job.spec.model) + world.extra_save_s
            before = (live.phase, live.due_s)
            live.leave(self._now_s, by_s=by_s, save_s=save_s)
            world.extra_save_s = 0.0
            if (live.phase, live.due_s) != before:
                self._handle_phase_change(live)
        elif (
            live is not None
            and (wish := job.pending_checkpoint_request) is not None
            and wish.asked_at_s != world.asked_at_s
        ):
            if wish.steps is None:
                live.fresh = True  # how far it is has to be known first
            else:
                world.asked_at_s = wish.asked_at_s
                live.save(self._now_s)
            self._news[id(live)], self._unseen = live, True
        self._start(world)
        self._unseen |= bool(allocation.releasing) and world.live is None

    def _start(self, world: SimulatedJob) -> None:
        """Start the wanted generation, unless an older one is there, or it has already been and gone."""
        job, allocation = world.job, world.job.allocation
        if world.live is not None or not allocation.target or allocation.plan is None:
            return
        if world.succeeded or allocation.generation <= world.generation_ended:
            return
        spec = RunSpec(
            job_id=job.id,
            generation=allocation.generation,
            gpus=allocation.target,
            step_time_s=allocation.plan.iteration_time_s * self._factor(job.id, gpu_sets.count(allocation.target)),
            steps_start=world.steps_saved,
            steps_max=self._steps_true.get(job.id, float(job.spec.steps) or math.inf),
            checkpoint_interval_s=job.spec.checkpoint.interval_s,
        )
        delay_s = self._delays.restart_s(job.spec.model) if world.started else self._delays.start_s
        world.live = run = SimulatedRun.start(spec, now_s=self._now_s, delay_s=delay_s)
        world.started = True
        self._occupied_gpus += gpu_sets.count(spec.gpus)
        self._visible[id(run)] = self._news[id(run)] = run
        down = [name for name in spec.gpus if not self._nodes.is_up(name)]
        if down:
            self._kill(run, RunPhase.LOST, f"node {down[0]} is down")
        else:
            self._schedule(run)

    def _kill(self, run: SimulatedRun, phase: RunPhase, reason: str) -> None:
        run.kill(phase, self._now_s, reason=reason)
        self._handle_phase_change(run)

    def _handle_phase_change(self, run: SimulatedRun) -> None:
        """Follow up a change of a run's phase: plan its next event, or book its end and let the next generation in."""
        self._unseen = True
        self._news[id(run)] = run
        if run.is_live:
            self._schedule(run)
        else:
            self._start(self._record_end(run))

    def _record_end(self, run: SimulatedRun) -> SimulatedJob:
        """Take an ended run into account."""
        spec, world = run.spec, self._worlds[run.spec.job_id]
        world.live, world.steps_saved, world.generation_ended = None, run.steps_kept, spec.generation
        world.succeeded |= run.phase is RunPhase.SUCCEEDED
        self._ended.append(run)
        self._occupied_gpus -= gpu_sets.count(spec.gpus)
        if (work := run.get_work()) is not None:
            self.work.append(work)
        return world

    def _schedule(self, run: SimulatedRun) -> None:
        if run.due_s < math.inf:
            heapq.heappush(self._events, (run.due_s, next(self._order), run))

    def _is_outdated(self, event: tuple[float, int, SimulatedRun | str]) -> bool:
        due_s, _, subject = event
        return not isinstance(subject, str) and subject.due_s != due_s

    def _drop_job(self, job_id: str) -> None:
        """The job has left the desired state: nothing of it may run on, and nobody asks about it any more."""
        world = self._worlds[job_id]
        if world.live is not None:
            world.live.kill(RunPhase.LOST, self._now_s, reason="its job is gone")
            self._news[id(world.live)] = world.live
            self._record_end(world.live)
        del self._worlds[job_id]

    def _settle(self, run: SimulatedRun) -> None:
        """What was told of the run has been taken over; it is told again when there is news."""
        run.mark_reported(self._now_s)
        key = id(run)
        if key not in self._visible:
            return
        self._shown[key], self._runs = run.to_run(self._now_s), None
        del self._news[key]
        if (due_s := run.report_until_s) < math.inf:
            heapq.heappush(self._checkpoints, (due_s, next(self._order), run))

    def _forget_ended(self) -> None:
        """Stop reporting ended runs that were seen and that the desired state has moved on from."""
        kept = []
        for run in self._ended:
            world = self._worlds.get(run.spec.job_id)
            if world is None or not (run.fresh or run.phase is RunPhase.SUCCEEDED or _is_wanted(run, world.job)):
                self._hide(run)
            else:
                kept.append(run)
        self._ended = kept

    def _hide(self, run: SimulatedRun) -> None:
        del self._visible[id(run)]
        self._news.pop(id(run), None)
        if self._shown.pop(id(run), None) is not None:
            self._runs = None


def _is_wanted(run: SimulatedRun, job: Job) -> bool:
    return bool(job.allocation.target) and run.spec.generation == job.allocation.generation
