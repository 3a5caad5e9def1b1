"""Executor and policy for a simulated day: reported figures of ranks, hanging saves, and a faulty policy."""

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
    """Wraps an executor and adds phases, bytes, loss, speed and memory to its runs.

    While `hangs`, workers are not killed at their deadlines, as on a node that does not respond.
    """

    def __init__(self, executor: Executor, hangs: Callable[[], bool]) -> None:
        self._executor = executor
        self._hangs = hangs
        self._runs: dict[int, tuple[Run, Run]] = {}
        self._jobs: dict[int, tuple[Job, Job]] = {}

    def observe(self) -> Observation:
        # Unchanged runs must stay the same objects, because the tick skips these.
        observation, known = self._executor.observe(), self._runs
        self._runs = {id(run): known.get(id(run)) or (run, _with_reported_figures(run)) for run in observation.runs}
        return replace(observation, runs=tuple(reported for _, reported in self._runs.values()))

    def converge(self, desired: Snapshot) -> None:
        known, self._jobs = self._jobs, {}
        if self._hangs():
            self._jobs = {id(job): known.get(id(job)) or (job, _without_deadline(job)) for job in desired.jobs.values()}
            desired = replace(desired, jobs={job.id: job for _, job in self._jobs.values()})
        self._executor.converge(desired)

    def close(self) -> None:
        self._executor.close()


def _with_reported_figures(run: Run) -> Run:
    """Return the run with the figures that ranks of the reference trainer would report."""
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
    """Return a placement like `owned_first` that selects GPUs no node has while `faulty`."""

    def place(snapshot: Snapshot, rooms: Iterable[FreeGpus], job: Job, count: int) -> Gpus | None:
        found = owned_first(snapshot, rooms, job, count)
        if found is None or not faulty():
            return found
        return {node: tuple(index + 100 for index in indices) for node, indices in found.items()}

    return place
