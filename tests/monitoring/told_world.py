"""What a simulated world leaves out and a service shows: figures that ranks tell, saves that hang, a faulty policy.

All of it goes through the real tick, as it would if an executor or a policy set of somebody's were like that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from scheduler.domain.gpu_sets import FreeGpus, Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_records import LoadTraffic, ReplanPhase
from scheduler.domain.observation import Observation, Run, RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.executor import Executor
from scheduler.scheduling.policies.placement import owned_first

_STOP_PHASES_S = {ReplanPhase.NOTICE.value: 0.4, ReplanPhase.SAVE.value: 6.0, ReplanPhase.TEARDOWN.value: 0.8}
_START_PHASES_S = {ReplanPhase.START.value: 9.0, ReplanPhase.LOAD.value: 4.0, ReplanPhase.FIRST_STEP.value: 1.5}
_ENDED_PHASES = (RunPhase.LEFT, RunPhase.LOST, RunPhase.FAILED)
_TRAFFIC = LoadTraffic(needed_bytes=800_000_000, read_bytes=840_000_000, moved_bytes=300_000_000)


class ReportingExecutor:
    """Around an executor. Ranks tell phases, bytes, loss, speed and memory; and while `hangs`, workers are not killed
    at their deadlines, as where the node does not answer."""

    def __init__(self, executor: Executor, hangs: Callable[[], bool]) -> None:
        self._executor = executor
        self._hangs = hangs
        self._told: dict[int, tuple[Run, Run]] = {}
        self._patient: dict[int, tuple[Job, Job]] = {}

    def observe(self) -> Observation:
        seen = self._executor.observe()
        known = self._told
        self._told = {id(run): known.get(id(run)) or (run, _with_reported_figures(run)) for run in seen.runs}
        return replace(seen, runs=tuple(told for _, told in self._told.values()))

    def converge(self, desired: Snapshot) -> None:
        known, self._patient = self._patient, {}
        if self._hangs():
            self._patient = {
                id(job): known.get(id(job)) or (job, _without_deadline(job)) for job in desired.jobs.values()
            }
            desired = replace(desired, jobs={job.id: job for _, job in self._patient.values()})
        self._executor.converge(desired)

    def close(self) -> None:
        self._executor.close()


def _with_reported_figures(run: Run) -> Run:
    """The same run as the reference trainer's ranks would tell of it. It is the same object at each look: a run that
    tells nothing new is passed over by the tick."""
    if run.phase in _ENDED_PHASES:
        return replace(run, phases_s=_STOP_PHASES_S)
    if run.phase is not RunPhase.RUNNING:
        return run
    return replace(
        run, phases_s=_START_PHASES_S, traffic=_TRAFFIC, loss=2.5, samples_per_s=64.0, peak_bytes=12_000_000_000
    )


def _without_deadline(job: Job) -> Job:
    if job.allocation.leave_by_s is None:
        return job
    return replace(job, allocation=replace(job.allocation, leave_by_s=None))


def make_faulty_placement(
    faulty: Callable[[], bool],
) -> Callable[[Snapshot, Iterable[FreeGpus], Job, int], Gpus | None]:
    """As `owned_first`; while `faulty`, GPUs are named that no node has."""

    def place(snapshot: Snapshot, rooms: Iterable[FreeGpus], job: Job, count: int) -> Gpus | None:
        found = owned_first(snapshot, rooms, job, count)
        if found is None or not faulty():
            return found
        return {node: tuple(index + 100 for index in indices) for node, indices in found.items()}

    return place
