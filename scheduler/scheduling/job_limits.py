"""Limits that the nodes of Kubernetes set to the GPUs that a pending job can have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property

from scheduler.domain.job import Job
from scheduler.domain.node_fit import CandidateFit
from scheduler.domain.snapshot_index import GpuKind
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.pending_gpus import count_flexible_gpus, count_releasing_gpus


class JobLimits:
    """GPUs that jobs with equal pods can use, by kind. None means that nothing is limited."""

    def __init__(self, cycle: SchedulingCycle, job: Job) -> None:
        self._cycle = cycle
        self._job = job

    @cached_property
    def free(self) -> Counter[GpuKind] | None:
        """Free GPUs. `charge` deducts those that such a job takes."""
        free = self._cycle.fit.count_free(self._job)
        return None if free is None else Counter(free)

    @cached_property
    def alone(self) -> Mapping[GpuKind, int] | None:
        """GPUs that such a job could use if no other job held any."""
        return self._cycle.fit.count_alone(self._job)

    @cached_property
    def feasible_nodes(self) -> frozenset[str] | None:
        """Nodes on which the job could use all GPUs. None if these are all."""
        return self._cycle.fit.find_feasible_nodes(self._job)

    @cached_property
    def claimable_nodes(self) -> frozenset[str] | None:
        """Nodes on which the job could use the GPUs that running jobs give up. None if nothing is limited."""
        jobs = self._cycle.snapshot.jobs
        donors = (jobs[job_id] for job_id in self._cycle.index.above_minimum)
        return self._cycle.fit.find_claimable_nodes(self._job, donors)

    @property
    def limits_pending(self) -> bool:
        """Whether the job cannot use all GPUs that are free or that running jobs give up."""
        return self.free is not None or self.feasible_nodes is not None or self.claimable_nodes is not None

    @cached_property
    def pending(self) -> Counter[GpuKind]:
        """GPUs that running jobs give up or could give up where the job can use them."""
        releasing = count_releasing_gpus(self._cycle, self.feasible_nodes)
        return releasing + count_flexible_gpus(self._cycle, self.claimable_nodes)

    def cap_free(self, free: Mapping[GpuKind, int], kinds: Iterable[GpuKind]) -> int:
        """Return how many of the free GPUs of these kinds the job can use."""
        limit = self.free
        if limit is None:
            return sum(free.get(kind, 0) for kind in kinds)
        return sum(max(0, min(free.get(kind, 0), limit[kind])) for kind in kinds)

    def cap_alone(self, serving: Mapping[GpuKind, int], kinds: Iterable[GpuKind]) -> int:
        """Return how many GPUs of these kinds the job could use if no other job held any."""
        counts = serving if self.alone is None else self.alone
        return sum(counts.get(kind, 0) for kind in kinds)

    def cap_free_or_pending(
        self, free: Mapping[GpuKind, int], pending: Mapping[GpuKind, int], kinds: Iterable[GpuKind]
    ) -> int:
        """Return how many of the free GPUs and of those that running jobs give up the job can use."""
        kinds = tuple(kinds)
        usable = self.cap_free(free, kinds)
        if not self.limits_pending:
            return usable + sum(pending.get(kind, 0) for kind in kinds)
        return usable + sum(max(0, min(pending.get(kind, 0), self.pending[kind])) for kind in kinds)

    def cap_wanted(self, gpu: str, wanted: int) -> int:
        """Return how many of `wanted` GPUs of a model can be free ones."""
        if self.free is None:
            return wanted
        return max(0, min(wanted, sum(gpus for (model, _), gpus in self.free.items() if model == gpu)))

    def charge(self, gpu: str, gpus: int) -> None:
        """Deduct GPUs that such a job takes, those of owned nodes first."""
        if self.free is not None:
            for kind in ((gpu, False), (gpu, True)):
                taken = min(self.free[kind], gpus)
                self.free[kind] -= taken
                gpus -= taken


class LimitsByJob:
    """Limits of jobs in one pass over the queue. Jobs with equal pods share them."""

    def __init__(self, cycle: SchedulingCycle) -> None:
        self._cycle = cycle
        self._found: dict[CandidateFit | None, JobLimits] = {}

    def find(self, job: Job) -> JobLimits:
        key = self._cycle.fit.find_group(job)
        if key not in self._found:
            self._found[key] = JobLimits(self._cycle, job)
        return self._found[key]
