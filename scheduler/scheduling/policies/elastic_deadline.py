"""Policies for jobs with deadlines: earliest deadline first, and ElasticFlow's minimum satisfactory shares.

Sources: ElasticFlow, ASPLOS'23, sections 4.1 (admission) and 4.2 (allocation); its simulator, pkusys/ElasticFlow.
Admission keeps no state here: it is recomputed at each tick.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.allotment import (
    Allotment,
    Candidate,
    Floats,
    Ints,
    candidates_by_model,
    curve_speeds,
)
from scheduler.scheduling.policies.settings import PolicySettings

TOLERANCE_S = 1e-6
"""A delay below this is a rounding error."""

ROUNDING = 1e-9
"""Steps below this share of a job's work are rounding errors."""


def earliest_deadline_first(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Allot by earliest deadline within priority, jobs without a deadline last; each takes the largest remaining count.

    The largest count is taken even if the job is slower on it, as in the EDF baseline of ElasticFlow
    (`edf_sim_allocation` of its simulator), which therefore meets few deadlines. An inelastic job takes its count or
    nothing.
    """
    gpus: dict[str, int] = {}
    waiting: dict[str, Reason] = {}
    for left, contenders in candidates_by_model(snapshot, capacity, curve_speeds(requires_speedup=False)):
        for position, candidate in enumerate(sorted(contenders, key=_deadline_key)):
            if count := int(candidate.counts[candidate.counts.searchsorted(left, side="right") - 1]):
                gpus[candidate.job.id] = count
                left -= count
            else:
                waiting[candidate.job.id] = _waiting_reason(candidate, left, position)
    return Allotment(gpus, waiting)


def elastic_deadline_shares(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Allot by ElasticFlow: each admitted job gets its minimum satisfactory share, the rest goes by marginal return.

    A job is admitted if it and all jobs admitted before it meet their deadlines by progressive filling, earliest
    deadline first (`compute_minimum_shares`). Jobs that have GPUs are considered first, then waiting jobs, in order of
    submission. The rest goes step by step to the job whose total GPU time grows least per additional GPU; a job without
    any GPUs comes first. Counts at which a job is no faster than on fewer are never used.

    The paper admits a job once, on submission, and drops jobs that are not admitted. Here no state is kept and no job
    is dropped: all are reconsidered at each tick. A job may be admitted later, runs as best effort until then, and
    can lose its admission if the progress of others changes.
    """
    gpus: dict[str, int] = {}
    waiting: dict[str, Reason] = {}
    for of_model, contenders in candidates_by_model(snapshot, capacity, curve_speeds()):
        admitted = compute_minimum_shares(contenders, of_model, snapshot.now_s)
        by_id = {candidate.job.id: candidate for candidate in contenders}
        others = sorted((candidate for candidate in contenders if candidate.job.id not in admitted), key=admission_key)
        order = [*map(by_id.__getitem__, admitted), *others]
        counts = _distribute_rest(order, admitted, of_model)
        gpus |= {candidate.job.id: counts[candidate.job.id] for candidate in order if counts[candidate.job.id]}
        left = of_model - sum(counts.values())
        for position, candidate in enumerate(order):
            if not counts[candidate.job.id]:
                promised = candidate.job.id in admitted
                reason = (
                    _waiting_reason(candidate, left, position)
                    if promised
                    else _unreachable_reason(candidate, left, position, snapshot.now_s)
                )
                waiting[candidate.job.id] = reason
    return Allotment(gpus, waiting)


def _deadline_key(candidate: Candidate) -> tuple[float, float, float, str]:
    job = candidate.job
    return (-job.spec.priority, job.deadline_at_s, job.submitted_at_s, job.id)


def _distribute_rest(order: Sequence[Candidate], shares: Mapping[str, int], gpus: int) -> dict[str, int]:
    """Return each job's count after the rest of `gpus` has been distributed by marginal return."""
    counts = {candidate.job.id: shares.get(candidate.job.id, 0) for candidate in order}
    left = gpus - sum(counts.values())
    steps = [
        step for rank, candidate in enumerate(order) if (step := _next_step(candidate, counts[candidate.job.id], rank))
    ]
    heapify(steps)
    while steps and left > 0:
        _, rank, wanted = heappop(steps)
        job_id = order[rank].job.id
        if wanted - counts[job_id] <= left:
            left -= wanted - counts[job_id]
            counts[job_id] = wanted
            if step := _next_step(order[rank], wanted, rank):
                heappush(steps, step)
    return counts


def _next_step(candidate: Candidate, count: int, rank: int) -> tuple[float, int, int] | None:
    """Return (extra GPU-seconds per additional GPU, rank, next larger count); None at the job's largest count."""
    at = int(candidate.counts.searchsorted(count, side="right"))
    if at == len(candidate.counts):
        return None
    wanted = int(candidate.counts[at])
    if not count:
        return -inf, rank, wanted
    dearer_gpu_s = candidate.steps * (wanted / candidate.speeds[at] - count / candidate.speeds[at - 1])
    return float(dearer_gpu_s) / (wanted - count), rank, wanted


def _waiting_reason(candidate: Candidate, left: int, position: int) -> Reason:
    if not candidate.smallest_count:
        return candidate.missing_plan_reason()
    before = "1 job" if position == 1 else f"{position} jobs"
    detail = f"needs {gpu_sets.format_gpu_count(candidate.smallest_count)}, {left} left after {before} before it"
    numbers = {"needed_gpus": float(candidate.smallest_count), "free_gpus": float(left), "position": position + 1.0}
    return Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)


def _unreachable_reason(candidate: Candidate, left: int, position: int, now_s: float) -> Reason:
    """Return why a job that was not admitted waits: its deadline, unless it has none, no plan, or no known length."""
    behind, left_s = _waiting_reason(candidate, left, position), candidate.job.deadline_at_s - now_s
    if left_s == inf or not candidate.smallest_count or not candidate.job.spec.steps:
        return behind
    least_s = candidate.steps / float(candidate.speeds[-1])
    numbers = {**behind.numbers, "deadline_in_s": left_s, "least_run_time_s": least_s}
    fastest = f"{least_s:,.0f} s on {gpu_sets.format_gpu_count(int(candidate.counts[-1]))}, its fastest"
    when = f"its deadline is in {left_s:,.0f} s" if left_s > 0 else f"its deadline passed {-left_s:,.0f} s ago"
    alone = left_s > least_s
    why = "GPUs for other deadlines leave too few for it" if alone else "it can no longer be met"
    detail = f"{when} and {why} ({fastest}); runs as best effort: {behind.detail}"
    return Reason(ReasonCode.DEADLINE_UNREACHABLE, detail, numbers)


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A job that requests admission, with its deadline `time_left_s` seconds from now."""

    candidate: Candidate
    time_left_s: float

    @property
    def sort_key(self) -> tuple[float, float, str]:
        """Earliest deadline first."""
        return (self.time_left_s, self.candidate.job.submitted_at_s, self.candidate.job.id)


def admission_key(candidate: Candidate) -> tuple[float, bool, float, str]:
    """Return the order of admission: jobs that have GPUs, then waiting jobs, in order of submission."""
    job = candidate.job
    return (-job.spec.priority, not job.is_placed, job.submitted_at_s, job.id)


def compute_minimum_shares(candidates: Iterable[Candidate], gpus: int, now_s: float) -> dict[str, int]:
    """Return the jobs whose deadlines `gpus` GPUs can meet together, in order of deadlines.

    Each comes with its current minimum satisfactory share, which is 0 if it starts later.
    """
    plan, requests = _AdmissionPlan(gpus), list[AdmissionRequest]()
    for candidate in sorted(candidates, key=admission_key):
        left_s = candidate.job.deadline_at_s - now_s + TOLERANCE_S
        if left_s < inf and candidate.job.spec.steps and 0.0 < candidate.steps <= candidate.speeds[-1] * left_s:
            requests.append(AdmissionRequest(candidate, left_s))
    plan.admit(requests)
    return plan.shares()


class _AdmissionPlan:
    """The jobs admitted so far, in order of deadlines, and the GPUs that each leaves."""

    def __init__(self, gpus: int) -> None:
        self._entries: list[AdmissionRequest] = []
        self._horizons = [AvailabilityProfile.constant(gpus)]
        self._counts: list[int] = []

    def shares(self) -> dict[str, int]:
        return {entry.candidate.job.id: count for entry, count in zip(self._entries, self._counts, strict=True)}

    def admit(self, requests: Sequence[AdmissionRequest]) -> None:
        """Admit each job that fits, in the order given.

        All jobs are tried at once. After a failure, batches start at one job and double with each success.
        """
        at, many = 0, len(requests)
        while at < len(requests):
            if self._admit_all(requests[at : at + many]):
                at, many = at + many, 2 * many
            elif many == 1:
                at += 1
            else:
                many = 1

    def _admit_all(self, requests: Sequence[AdmissionRequest]) -> bool:
        first = bisect_left(self._entries, min(entry.sort_key for entry in requests), key=lambda entry: entry.sort_key)
        later = sorted([*self._entries[first:], *requests], key=lambda entry: entry.sort_key)
        horizons, counts = self._horizons[: first + 1], self._counts[:first]
        for entry in later:
            if (claimed := horizons[-1].reserve_share(entry.candidate, entry.time_left_s)) is None:
                return False
            horizons.append(claimed[0])
            counts.append(claimed[1])
        self._entries[first:], self._horizons, self._counts = later, horizons, counts
        return True


@dataclass(frozen=True, slots=True)
class AvailabilityProfile:
    """`free[i]` GPUs are free from `starts_s[i]` seconds from now until the next start; the last entry has no end."""

    starts_s: Floats
    free: Ints

    @classmethod
    def constant(cls, gpus: int) -> AvailabilityProfile:
        return cls(np.zeros(1), np.array([gpus]))

    def reserve_share(self, candidate: Candidate, deadline_s: float) -> tuple[AvailabilityProfile, int] | None:
        """Return what is left after the job's minimum satisfactory share, and the job's current part of it.

        The share is the smallest count with which the job finishes `deadline_s` seconds from now if it takes the
        largest of its counts that fits whenever less is free (progressive filling: ElasticFlow, ASPLOS'23, section
        4.1). None if even its largest count is too small. Larger counts must be faster.
        """
        within = int(self.starts_s.searchsorted(deadline_s))
        starts_s, spans_s = self.starts_s[:within], np.empty(within)
        np.subtract(starts_s[1:], starts_s[:-1], out=spans_s[:-1])
        spans_s[-1] = deadline_s - starts_s[-1]
        fitting, target = (
            candidate.counts.searchsorted(self.free[:within], side="right") - 1,
            candidate.steps * (1.0 - ROUNDING),
        )
        if spans_s @ candidate.speeds[fitting] < target:
            return None
        low, high = 1, len(candidate.counts) - 1
        while low < high:
            middle = (low + high) // 2
            if spans_s @ candidate.speeds[np.minimum(fitting, middle)] >= target:
                high = middle
            else:
                low = middle + 1
        taken = np.minimum(fitting, low)
        speeds = candidate.speeds[taken]
        done = (spans_s * speeds).cumsum()
        last = min(int(done.searchsorted(target)), within - 1)
        missing = candidate.steps - (done[last - 1] if last else 0.0)
        end_s = starts_s[last] + min(spans_s[last], missing / speeds[last])
        return self._without(candidate.counts[taken[: last + 1]], float(end_s)), int(candidate.counts[taken[0]])

    def _without(self, used: Ints, end_s: float) -> AvailabilityProfile:
        """Return the profile less `used` GPUs in the first segments, the last of which ends at `end_s`."""
        size, whole = len(used), len(self.starts_s)
        cut = size == whole or end_s < self.starts_s[size]
        starts_s, free = np.empty(whole + cut), np.empty(whole + cut, dtype=self.free.dtype)
        starts_s[:size], free[:size] = self.starts_s[:size], self.free[:size] - used
        if cut:
            starts_s[size], free[size] = end_s, self.free[size - 1]
        starts_s[size + cut :], free[size + cut :] = self.starts_s[size:], self.free[size:]
        return AvailabilityProfile(starts_s, free)
