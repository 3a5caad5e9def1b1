"""Quotas: GPUs that each queue uses and borrows, the resulting order of pending jobs, and limits.

Own GPUs are those that a queue's placed jobs hold up to its guarantee; borrowed ones are above it. An idle guarantee
may be borrowed, and is reclaimed when its queue has a job for it (`preemption`). Only base GPUs decide whether a
pending job is within the guarantee, because flexible ones are freed first. Own, borrowed, guarantee (nominal quota) and
limit (nominal quota + borrowing limit) mean the same as in Kueue. Borrowed GPUs are shared by weight as in Dominant
Resource Fairness (NSDI'11, section 4), with GPUs as the only resource. A queue's user limit bounds what the jobs of one
owner hold together, counted like the queue's limit; it guarantees nothing.

Undeclared queues are one queue without a guarantee, whatever their names. The limits of the queue `default` bound what
it and they hold together, so that a new name gains nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from itertools import groupby

from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.gpu_sets import format_gpu_count
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_queue import DEFAULT_QUEUE, JobQueue, find_limiting_queue
from scheduler.domain.job_state import WAITING_STATES
from scheduler.domain.snapshot import Snapshot

UserKey = tuple[str, str]
"""A queue with its own limits, and the owner of jobs under them."""

UNDECLARED = ""
"""The one queue that all undeclared queues count as. No queue has an empty name."""

_OWN = frozenset({"_gpus", "_used", "_base", "_fixed", "_of_user", "_base_of_user", "_claimants"})


class QuotaState:
    """Usage of all queues, updated while one tick distributes GPUs. It is empty if no queue is declared."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._queues = snapshot.queues
        self._jobs = snapshot.jobs
        self._gpus: dict[str, int] = {}
        self._fixed: dict[str, int] = {}
        self._used: Counter[str] = Counter()
        self._base: Counter[str] = Counter()
        self._of_user: Counter[UserKey] = Counter()
        self._base_of_user: Counter[UserKey] = Counter()
        self._claimants: set[str] = set()
        self._default = snapshot.queues.get(DEFAULT_QUEUE) or JobQueue(DEFAULT_QUEUE)
        self._undeclared = replace(self._default, name=UNDECLARED, guaranteed_gpus=0)
        self._verdicts: dict[str, dict[tuple[int, int], Reason | None]] = {}
        self._has_user_limits = any(queue.user_limit_gpus is not None for queue in self._queues.values())
        if self._queues:
            self._count_jobs(snapshot)

    def __bool__(self) -> bool:
        """Whether any queue is declared."""
        return bool(self._queues)

    def copy(self) -> QuotaState:
        """Return an independent copy."""
        twin = object.__new__(QuotaState)
        own = {name: value.copy() for name, value in self.__dict__.items() if name in _OWN}
        twin.__dict__.update(self.__dict__, **own, _verdicts={})
        return twin

    def _count_jobs(self, snapshot: Snapshot) -> None:
        """Count the GPUs that each job holds, as `allocate` does, in a third of the time."""
        used, base, held = self._used, self._base, self._gpus
        for job in snapshot.jobs.values():
            if target := job.allocation.target:
                spec, gpus, name = job.spec, sum(map(len, target.values())), self.account(job)
                held[job.id] = gpus
                used[name] += gpus
                min_gpus = min(gpus, spec.min_gpus)
                if job.is_fixed:
                    min_gpus = self._fixed[job.id] = gpus
                base[name] += min_gpus
                if self._has_user_limits and self.queue(name).user_limit_gpus is not None:
                    self._of_user[self.user_key(job)] += gpus
                    self._base_of_user[self.user_key(job)] += min_gpus

    def account(self, job: Job) -> str:
        """Return the name under which the job's GPUs are counted: that of its queue, or `UNDECLARED`."""
        name = job.spec.queue
        return name if name in self._queues or name == DEFAULT_QUEUE else UNDECLARED

    def queue(self, name: str) -> JobQueue:
        """Return the queue of an account."""
        found = self._queues.get(name)
        return found if found is not None else self._default if name == DEFAULT_QUEUE else self._undeclared

    def limiting_queue(self, job: Job) -> str:
        """Return the name of the queue whose limits apply to the job."""
        return find_limiting_queue(job.spec.queue, self._queues)

    def user_key(self, job: Job) -> UserKey:
        return self.limiting_queue(job), job.owner_key

    def used(self, name: str) -> int:
        """Return the GPUs that the placed jobs of an account should hold."""
        return self._used[name]

    def used_under_limit(self, name: str) -> int:
        """Return the GPUs that count towards the limit of a queue."""
        return self._used[name] + (self._used[UNDECLARED] if name == DEFAULT_QUEUE else 0)

    def borrowed(self, name: str) -> int:
        return max(0, self._used[name] - self.queue(name).guaranteed_gpus)

    def borrowed_base(self, name: str) -> int:
        """Return the GPUs that the queue would still borrow if all its jobs were at their minimum."""
        return max(0, self._base[name] - self.queue(name).guaranteed_gpus)

    def flexible_under_limit(self, name: str) -> int:
        """Return the GPUs above the minimums of their jobs that count towards the limit of a queue."""
        return self.used_under_limit(name) - self._base[name] - (self._base[UNDECLARED] if name == DEFAULT_QUEUE else 0)

    def own_flexible(self, name: str) -> int:
        """Return the flexible GPUs within the queue's guarantee."""
        return max(0, min(self._used[name], self.queue(name).guaranteed_gpus) - self._base[name])

    def is_guaranteed(self, job: Job) -> bool:
        """Return whether this pending job's minimum is within its queue's guarantee, by the last `order_jobs`."""
        return job.id in self._claimants

    def reclaimable_gpus(self, job: Job) -> int:
        """Return the most GPUs that `QuotaReclaimer.find_reclaim` could find for this job."""
        mine = self.account(job)
        borrowers = (base for name, base in self._base.items() if name != mine and self.borrowed_base(name))
        return self.own_flexible(mine) + sum(borrowers)

    def check_limits(self, job: Job, gpus: int) -> Reason | None:
        """Return why the job may not have `gpus` more, or None if the limits permit it.

        Jobs of one queue that need equally many GPUs share one reason, because a tick may ask for hundreds of jobs.
        """
        known, asked = self._verdicts.setdefault(self.limiting_queue(job), {}), (gpus, job.spec.min_gpus)
        if asked not in known:
            known[asked] = self._check_queue_limit(job, gpus)
        return known[asked] or self._check_user_limit(job, gpus)

    def _check_queue_limit(self, job: Job, gpus: int) -> Reason | None:
        queue = self.queue(self.limiting_queue(job))
        if (limit := queue.limit_gpus) is None:
            return None
        used, min_gpus = self.used_under_limit(queue.name), job.spec.min_gpus
        if min_gpus <= limit and used + gpus <= limit:
            return None
        numbers = {
            "needed_gpus": float(gpus),
            "used_gpus": float(used),
            "limit_gpus": float(limit),
            "guaranteed_gpus": float(queue.guaranteed_gpus),
            "borrowed_gpus": float(self.borrowed(queue.name)),
        }
        if min_gpus > limit:
            detail = f"needs {format_gpu_count(min_gpus)}; the limit of queue {queue.name} is {limit}"
            return Reason(ReasonCode.EXCEEDS_MAX_QUOTA, detail, numbers)
        detail = f"needs {format_gpu_count(gpus)}; queue {queue.name} uses {used} of its limit of {limit}"
        return Reason(ReasonCode.WAITING_FOR_QUOTA, detail, numbers)

    def _check_user_limit(self, job: Job, gpus: int) -> Reason | None:
        queue = self.queue(self.limiting_queue(job))
        if (limit := queue.user_limit_gpus) is None:
            return None
        used, min_gpus, owner = self._of_user[self.user_key(job)], job.spec.min_gpus, job.owner or "its owner"
        if min_gpus <= limit and used + gpus <= limit:
            return None
        numbers = {"needed_gpus": float(gpus), "user_used_gpus": float(used), "user_limit_gpus": float(limit)}
        if min_gpus > limit:
            detail = f"needs {format_gpu_count(min_gpus)}; the limit per user in queue {queue.name} is {limit}"
            return Reason(ReasonCode.EXCEEDS_USER_LIMIT, detail, numbers)
        detail = (
            f"needs {format_gpu_count(gpus)}; {owner} has {used} of {format_gpu_count(limit)} in queue {queue.name}"
        )
        return Reason(ReasonCode.WAITING_FOR_USER_LIMIT, detail, numbers)

    def excess(self, job: Job, gpus: int) -> int:
        """Return by how many GPUs `gpus` more would exceed the limit of the job's queue or owner.

        The larger of the two is returned.
        """
        return max(self.queue_excess(self.limiting_queue(job), gpus), self.user_excess(job, gpus))

    def user_excess(self, job: Job, gpus: int) -> int:
        """Return by how much `gpus` more would exceed the limit of the job's owner in its queue."""
        limit = self.queue(self.limiting_queue(job)).user_limit_gpus
        return 0 if limit is None else max(0, self._of_user[self.user_key(job)] + gpus - limit)

    def queue_excess(self, name: str, gpus: int) -> int:
        """Return by how much `gpus` more would exceed the limit of a queue."""
        limit = self.queue(name).limit_gpus
        return 0 if limit is None else max(0, self.used_under_limit(name) + gpus - limit)

    def allocate(self, job: Job, gpus: int) -> None:
        """Give the job `gpus` more; a negative number releases GPUs."""
        if self._queues:
            before, name, min_gpus = self._gpus.get(job.id, 0), self.account(job), job.spec.min_gpus
            self._gpus[job.id] = after = before + gpus
            self._used[name] += gpus
            base = -self._fixed.pop(job.id, before if before < min_gpus else min_gpus)
            if after and job.is_fixed:
                self._fixed[job.id] = after
                base += after
            else:
                base += after if after < min_gpus else min_gpus
            self._base[name] += base
            self._verdicts.pop(name or DEFAULT_QUEUE, None)
            if self._has_user_limits and self.queue(name).user_limit_gpus is not None:
                self._of_user[self.user_key(job)] += gpus
                self._base_of_user[self.user_key(job)] += base

    def release(self, job: Job, gpus: int) -> None:
        self.allocate(job, -gpus)

    def headroom(self, job: Job) -> int:
        """Return how many more GPUs the job may get by its own range and the limits of its queue."""
        if not self._queues:
            return max(0, job.spec.max_gpus - job.allocation.target_gpus)
        room = job.spec.max_gpus - self._gpus.get(job.id, 0)
        return max(0, room - self.excess(job, room)) if room > 0 else 0

    def available_to_others(self, job: Job, flexible: int) -> int:
        """Return how many of a running job's `flexible` GPUs jobs of other queues may take: only borrowed ones."""
        return min(flexible, self.borrowed(self.account(job))) if self._queues else flexible

    def order_jobs(self, job_ids: Iterable[str]) -> tuple[str, ...]:
        """Return pending jobs, given in the order of a policy, in the order in which queues may claim GPUs.

        Jobs within their queue's guarantee come first, which `is_guaranteed` refers to. Of their queues, the one that
        holds the smallest share of its guarantee comes first. The others come by priority, and then by queue: the one
        that has borrowed least for its weight comes first. Both count the jobs before a job in this order. So a
        priority orders the jobs of its own queue and those that borrow, and never delays another queue's guarantee.

        Otherwise the given order stays. A job too large for the rest of its queue's guarantee does not exclude smaller
        ones behind it. A job that its owner's limit keeps from starting claims nothing and is not counted.
        """
        if not self._queues:
            return tuple(job_ids)
        jobs = sorted((self._jobs[job_id] for job_id in job_ids), key=lambda job: -job.spec.priority)
        over_limit, claimants = self._over_user_limit(jobs), list[Job]()
        base = Counter(self._base)
        for job in jobs:
            if job.id in over_limit:
                continue
            name, gpus = self.account(job), job.spec.min_gpus
            if base[name] + gpus <= self.queue(name).guaranteed_gpus:
                base[name] += gpus
                claimants.append(job)
        self._claimants.update(job.id for job in claimants)
        ordered = list(self._merge_lines(claimants, Counter(self._base), over_limit, _share_of_guarantee))
        others = [job for job in jobs if job.id not in self._claimants]
        for _, level in groupby(others, key=lambda job: job.spec.priority):
            ordered += self._merge_lines(level, base, over_limit, _borrowed_for_weight)
        return tuple(ordered)

    def _over_user_limit(self, jobs: Iterable[Job]) -> set[str]:
        """Return the jobs whose minimum, with the jobs before them, exceeds their owner's limit."""
        over_limit: set[str] = set()
        base = Counter(self._base_of_user)
        for job in jobs if self._has_user_limits else ():
            limit, user = self.queue(self.limiting_queue(job)).user_limit_gpus, self.user_key(job)
            if limit is None:
                continue
            if base[user] + job.spec.min_gpus > limit:
                over_limit.add(job.id)
            else:
                base[user] += job.spec.min_gpus
        return over_limit

    def _merge_lines(
        self, jobs: Iterable[Job], base: Counter[str], over_limit: Set[str], key: Callable[[JobQueue, int], float]
    ) -> Iterator[str]:
        """Yield the jobs of several queues in one order, adding them to `base` one by one.

        The next job is the first one of the queue with the least `key`, which takes the queue and its base GPUs. In a
        tie, it is the one that was given first.
        """
        lines: dict[str, deque[tuple[int, Job]]] = {}
        for position, job in enumerate(jobs):
            lines.setdefault(self.account(job), deque()).append((position, job))
        queues = {name: self.queue(name) for name in lines}

        def place(name: str) -> tuple[float, int, str]:
            return key(queues[name], base[name]), lines[name][0][0], name

        heads = [place(name) for name in lines]
        heapify(heads)
        while heads:
            name = heads[0][2]
            _, job = lines[name].popleft()
            base[name] += 0 if job.id in over_limit else job.spec.min_gpus
            yield job.id
            if lines[name]:
                heapreplace(heads, place(name))
            else:
                heappop(heads)


def _share_of_guarantee(queue: JobQueue, base: int) -> float:
    return base / queue.guaranteed_gpus


def _borrowed_for_weight(queue: JobQueue, base: int) -> float:
    return max(0, base - queue.guaranteed_gpus) / queue.weight


def cap_to_quota(snapshot: Snapshot, quota: QuotaState, wanted: Mapping[str, int]) -> Mapping[str, int]:
    """Return the counts that a scaling policy wants for running jobs, limited by the quotas of queues.

    No queue and no user grows above a limit, and no queue shrinks below what it holds of its guarantee, because its own
    flexible GPUs benefit no other queue. If a queue would give up too much, its last jobs by id keep their counts.
    """
    if not quota:
        return wanted
    jobs, change, under_limit, of_user = snapshot.jobs, Counter[str](), Counter[str](), Counter[UserKey]()
    deltas = {job_id: count - jobs[job_id].allocation.target_gpus for job_id, count in wanted.items()}

    def add(job: Job, delta: int) -> None:
        change[quota.account(job)] += delta
        under_limit[quota.limiting_queue(job)] += delta
        of_user[quota.user_key(job)] += delta

    for job_id, delta in deltas.items():
        add(jobs[job_id], delta)
    for job_id in sorted(deltas):
        name = quota.account(jobs[job_id])
        own = min(quota.used(name), quota.queue(name).guaranteed_gpus)
        if deltas[job_id] < 0 and quota.used(name) + change[name] < own:
            add(jobs[job_id], -deltas.pop(job_id))
    for job_id, delta in reversed(deltas.items()):
        job, name = jobs[job_id], quota.limiting_queue(jobs[job_id])
        over = max(quota.queue_excess(name, under_limit[name]), quota.user_excess(job, of_user[quota.user_key(job)]))
        if delta > 0 and over:
            deltas[job_id] = max(0, delta - over)
            add(job, deltas[job_id] - delta)
    return {job_id: jobs[job_id].allocation.target_gpus + delta for job_id, delta in deltas.items()}


@dataclass(frozen=True, slots=True)
class QueueUsage:
    """Usage of a queue. `waiting_gpus` are the minimums of its pending jobs."""

    queue: JobQueue
    is_declared: bool
    used_gpus: int = 0
    running_jobs: int = 0
    waiting_gpus: int = 0
    waiting_jobs: int = 0

    @property
    def own_gpus(self) -> int:
        return min(self.used_gpus, self.queue.guaranteed_gpus)

    @property
    def borrowed_gpus(self) -> int:
        return self.used_gpus - self.own_gpus


def compute_queue_usage(snapshot: Snapshot) -> Mapping[str, QueueUsage]:
    """Return the usage of all declared queues, and of those that live jobs name, by name."""
    used, running, needed, waiting = (Counter[str]() for _ in range(4))
    for job in snapshot.jobs.values():
        name = job.spec.queue
        if job.is_placed:
            used[name] += job.allocation.target_gpus
            running[name] += 1
        elif job.state in WAITING_STATES and job.intent is Intent.RUN:
            needed[name] += job.spec.min_gpus
            waiting[name] += 1
    names = sorted({*snapshot.queues, *(job.spec.queue for job in snapshot.jobs.values() if not job.is_ended)})
    return {
        name: QueueUsage(
            snapshot.queues.get(name) or JobQueue(name),
            name in snapshot.queues,
            used[name],
            running[name],
            needed[name],
            waiting[name],
        )
        for name in names
    }
