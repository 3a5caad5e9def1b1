"""Preemption: by a recall that leaves jobs without GPUs, and by a queue that reclaims its guarantee.

If a recalled node's jobs have nowhere to go, preempting a few jobs with much remaining work on many GPUs delays fewer
jobs than preempting many that are nearly done: least service first (Tiresias, NSDI'19, section 3).

A queue reclaims first its own flexible GPUs, then whole jobs of borrowing queues. Flexible GPUs that a queue has
borrowed are not part of this, because every pending job of any queue may have them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import inf

from scheduler.domain.job import Intent, Job
from scheduler.domain.job_queue import DEFAULT_QUEUE
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.job_order import remaining_service_gpu_s
from scheduler.scheduling.policies.quota import UNDECLARED, QuotaState
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import gpu_model, min_feasible_gpus, node_sizes

PREEMPTION_SERVICE_RATIO = 2.0
"""A victim must have at least this many times the remaining service of each job that gets its GPUs."""


_GpuRequest = tuple[str, bool, frozenset[str] | None]
"""A GPU model, whether lent nodes are acceptable, and the only nodes that are of use (None: all)."""


def find_preemption_victims(
    snapshot: Snapshot, stranded: Iterable[Job], exempt: Collection[str], settings: PolicySettings
) -> Mapping[str, tuple[str, ...]]:
    """Return running jobs to preempt, each with the stranded jobs that get its GPUs.

    Jobs with the least remaining service come first.

    Victims are never in `exempt`, within their minimum run time, barred from lent nodes, of a higher priority, of
    another queue, or on another GPU model.
    """
    sizes = node_sizes(snapshot)
    running = [
        job
        for job in map(snapshot.jobs.__getitem__, snapshot.index.running)
        if job.id not in exempt
        and job.state is JobState.RUNNING
        and job.intent is Intent.RUN
        and job.accepts_lent_nodes
        and compute_protection_end_s(job, settings) <= snapshot.now_s
    ]
    service = {job.id: remaining_service_gpu_s(snapshot, job, sizes) for job in (*running, *stranded)}
    waiting = deque(sorted(stranded, key=lambda job: (service[job.id], job.id)))
    ways: dict[str, tuple[str, ...]] = {}
    for job in sorted(running, key=lambda job: (-service[job.id], job.id)):
        # Running jobs come in falling order of service, so no later one is a victim either.
        if not waiting or PREEMPTION_SERVICE_RATIO * service[waiting[0].id] > service[job.id]:
            break
        room, takers = job.allocation.target_gpus, list[str]()
        while waiting and (taker := waiting[0]).spec.min_gpus <= room:
            if not _can_preempt(snapshot, taker, job) or PREEMPTION_SERVICE_RATIO * service[taker.id] > service[job.id]:
                break
            room -= taker.spec.min_gpus
            takers.append(waiting.popleft().id)
        if takers:
            ways[job.id] = tuple(takers)
    return ways


def _can_preempt(snapshot: Snapshot, taker: Job, job: Job) -> bool:
    sizes = node_sizes(snapshot)
    return (
        taker.spec.queue == job.spec.queue
        and taker.spec.priority >= job.spec.priority
        and gpu_model(snapshot, taker, sizes) == gpu_model(snapshot, job, sizes)
    )


@dataclass(frozen=True, slots=True)
class QuotaReclaim:
    """The GPUs that running jobs keep, 0 for a preempted one; together they free at least as many GPUs as are missing.

    `counts` is empty if minimum run times prevent that until `protected_until_s`.
    """

    counts: Mapping[str, int]
    protected_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Offer:
    """GPUs that one running job could free from `available_at_s` on, at a cost in GPU-seconds per missing GPU."""

    job: Job
    preempts: bool
    gpus: int
    cost_s: float
    available_at_s: float = -inf

    @property
    def sort_key(self) -> tuple[bool, float, str]:
        return self.preempts, self.cost_s, self.job.id


class QuotaReclaimer:
    """The placed jobs that can be preempted or shrunk while one tick distributes GPUs; each at most once.

    Costs are those of `recall_selection`: GPU-seconds since the last checkpoint and for the restart. `excluded` are
    jobs that the tick has already decided on.
    """

    def __init__(self, snapshot: Snapshot, quota: QuotaState, settings: PolicySettings, excluded: Set[str]) -> None:
        self.quota, self._snapshot, self._settings = quota, snapshot, settings
        self._sizes = node_sizes(snapshot)
        self._jobs_by_queue: dict[str, list[Job]] = {}
        self._usable: dict[tuple[str, _GpuRequest], int] = {}
        self._failed: dict[tuple[str, _GpuRequest, bool], int] = {}
        for job in snapshot.jobs.values():
            if job.is_placed and job.intent is Intent.RUN and job.id not in excluded:
                self._jobs_by_queue.setdefault(quota.account(job), []).append(job)

    def find_reclaim(
        self, job: Job, gpu: str, missing: int, nodes: frozenset[str] | None = None
    ) -> QuotaReclaim | None:
        """Return the cheapest way to free `missing` GPUs of model `gpu` for a pending job, or None if there is none.

        These GPUs are in addition to all that are free, or borrowed and flexible. Flexible GPUs within the guarantee of
        the job's own queue are freed first. Whole jobs are preempted only for a minimum that the job's queue is
        guaranteed, and only in queues that would borrow even at their minimums, whatever their priorities: a priority
        ranks jobs within a queue and those that borrow. A preempted job cannot reclaim its GPUs in turn, because its
        queue was beyond its guarantee. GPUs count on `nodes` only, if given.
        """
        kind, now_s = (gpu, job.accepts_lent_nodes, nodes), self._snapshot.now_s
        known = (self.quota.account(job), kind, self.quota.is_guaranteed(job))
        if not 0 < missing <= min(self.quota.reclaimable_gpus(job), self._failed.get(known, missing + 1) - 1):
            return None
        offers = list(self._list_offers(job, kind, missing))
        for among in ([offer for offer in offers if offer.available_at_s <= now_s], offers):
            if (counts := self._select(among, missing, self.quota.own_flexible(self.quota.account(job)))) is not None:
                at_s = max((offer.available_at_s for offer in offers if counts.get(offer.job.id) == 0), default=-inf)
                return QuotaReclaim(self._commit(counts)) if at_s <= now_s else QuotaReclaim({}, at_s)
        self._failed[known] = missing
        return None

    def find_shrinks_within_limit(self, job: Job, gpus: int) -> Mapping[str, int]:
        """Return the GPUs that running jobs of a pending job's queue keep, so that `gpus` more fit the queue's limits.

        Empty if they fit already, or would not fit even without flexible GPUs. If the limit per user is exceeded, only
        jobs of the same owner can shrink.
        """
        limiting = self.quota.limiting_queue(job)
        flexible = self.quota.flexible_under_limit(limiting)
        if not flexible or not 0 < (missing := self.quota.excess(job, gpus)) <= flexible:
            return {}
        accounts = (limiting, UNDECLARED) if limiting == DEFAULT_QUEUE else (limiting,)
        line = [other for name in accounts for other in self._jobs_by_queue.get(name, ())]
        if self.quota.user_excess(job, gpus):
            line = [other for other in line if other.owner_key == job.owner_key]
        offers = [self._shrink_offer(other, gpus) for other in line if (gpus := self._flexible_gpus(other))]
        return self._commit(self._select(offers, missing, missing) or {})

    def _commit(self, counts: dict[str, int]) -> dict[str, int]:
        for job_id, count in counts.items():
            job = self._snapshot.jobs[job_id]
            self._jobs_by_queue[self.quota.account(job)].remove(job)
            self.quota.release(job, job.allocation.target_gpus - count)
        return counts

    def _list_offers(self, claimant: Job, kind: _GpuRequest, missing: int) -> Iterator[_Offer]:
        mine = self.quota.account(claimant)
        for job in self._jobs_by_queue.get(mine, ()):
            if (gpus := self._flexible_gpus(job)) and self._usable_gpus(job, kind) == job.allocation.target_gpus:
                yield self._shrink_offer(job, gpus)
        if not self.quota.is_guaranteed(claimant):
            return
        now_s = self._snapshot.now_s
        for name, line in self._jobs_by_queue.items():
            for job in line if name != mine and self.quota.borrowed_base(name) else ():
                gpus = self._usable_gpus(job, kind) - self._flexible_gpus(job)
                if gpus > 0:
                    lost_s = max(0.0, now_s - job.progress.checkpoint_at_s)
                    lost_s += self._settings.reconfiguration_s_for(job)
                    cost_s = lost_s * job.allocation.target_gpus / min(gpus, missing)
                    yield _Offer(job, True, gpus, cost_s, self._preemptible_at_s(job))

    def _preemptible_at_s(self, job: Job) -> float:
        """Return when the job can be preempted. A job that is being reconfigured must settle first."""
        settles_s = max(1.0, self._settings.reconfiguration_s_for(job))
        settled_s = -inf if job.state is JobState.RUNNING else self._snapshot.now_s + settles_s
        return max(settled_s, compute_protection_end_s(job, self._settings))

    def _flexible_gpus(self, job: Job) -> int:
        """Return the flexible GPUs that the job can give up."""
        if job.state is not JobState.RUNNING or not job.is_resizable or self._snapshot.switches.resizes_frozen:
            return 0
        return max(0, job.allocation.target_gpus - min_feasible_gpus(self._snapshot, job, self._sizes))

    def _shrink_offer(self, job: Job, gpus: int) -> _Offer:
        """Return an offer whose cost is that of the other GPUs of the job, which stand still during the resize.

        Few jobs therefore give up many GPUs each.
        """
        left = job.allocation.target_gpus - gpus
        return _Offer(job, False, gpus, self._settings.reconfiguration_s_for(job) * left / gpus)

    def _usable_gpus(self, job: Job, kind: _GpuRequest) -> int:
        """Return how many of a job's GPUs a pending job with this request could use once they are free."""
        if (usable := self._usable.get((job.id, kind))) is None:
            snapshot, (gpu, lent_is_fine, among), usable = self._snapshot, kind, 0
            for name, indices in job.allocation.target.items():
                node = snapshot.nodes[name]
                if among is not None and name not in among:
                    continue
                if node.gpu == gpu and snapshot.serves_training(node) and (lent_is_fine or not snapshot.is_lent(node)):
                    usable += len(indices)
            self._usable[job.id, kind] = usable
        return usable

    def _select(self, offers: Iterable[_Offer], missing: int, flexible_max: int) -> dict[str, int] | None:
        """Return the GPUs that jobs keep if the cheapest offers free the missing GPUs, or None if none suffice.

        At most `flexible_max` flexible GPUs are freed in total, and a queue loses no more whole jobs than needed to
        stop borrowing. If a cheap small job would prevent the large one that is needed, the largest offers are taken
        first.
        """
        cheapest = sorted(offers, key=lambda offer: offer.sort_key)
        largest = sorted(cheapest, key=lambda offer: (offer.preempts, -offer.gpus))
        return self._select_in_order(cheapest, missing, flexible_max) or self._select_in_order(
            largest, missing, flexible_max
        )

    def _select_in_order(self, offers: Iterable[_Offer], missing: int, flexible_max: int) -> dict[str, int] | None:
        """Select as `_select`, in this order."""
        chosen: list[_Offer] = []
        borrowed: dict[str, int] = {}
        freed = 0
        for offer in offers:
            if freed >= missing:
                break
            queue, gpus = self.quota.account(offer.job), offer.gpus
            if offer.preempts:
                if (left := borrowed.get(queue, self.quota.borrowed_base(queue))) <= 0:
                    continue
                borrowed[queue] = left - offer.job.spec.min_gpus
            elif not (gpus := min(gpus, flexible_max)):
                continue
            else:
                flexible_max -= gpus
            chosen.append(replace(offer, gpus=gpus))
            freed += gpus
        return None if freed < missing else _trim_surplus(chosen, freed - missing)


def _trim_surplus(chosen: Iterable[_Offer], surplus: int) -> dict[str, int]:
    """Return the GPUs that the jobs keep after the surplus goes back to the most expensive of them.

    A job gets back all its GPUs, or some flexible ones, but of these none above its maximum, which an owner may have
    lowered below what the job holds.
    """
    counts: dict[str, int] = {}
    for offer in sorted(chosen, key=lambda offer: offer.sort_key, reverse=True):
        if offer.gpus <= surplus:
            surplus -= offer.gpus
        elif offer.preempts:
            counts[offer.job.id] = 0
        else:
            kept = offer.job.allocation.target_gpus - offer.gpus + surplus
            counts[offer.job.id] = min(kept, offer.job.spec.max_gpus)
            surplus = 0
    return counts


def compute_protection_end_s(job: Job, settings: PolicySettings) -> float:
    """Return until when this placed job can be preempted only by a recall, the loss of a node, or its owner.

    The time counts from its last start from the queue, so that no number of resizes extends it. Records of older
    versions lack that start. Of these, an interrupted job counts from its last change of state, any other from its
    first start.
    """
    account = job.account
    since_s = account.last_started_at_s
    if since_s is None and account.preemptions == account.failures == 0:
        since_s = account.first_started_at_s
    return (job.state_since_s if since_s is None else since_s) + settings.run_time_min_s
