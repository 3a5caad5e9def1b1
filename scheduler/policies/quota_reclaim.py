"""Who gives way when a queue claims what it is guaranteed: its own flexible GPUs, then whole jobs of borrowers.

Flexible GPUs that a queue has borrowed are no part of this: every waiting job may have those, of whatever queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import inf

from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.minimum_runtime import held_until_s
from scheduler.policies.quota import QuotaBook
from scheduler.policies.settings import PolicySettings
from scheduler.policies.speed import least_gpus, node_sizes

_Kind = tuple[str, bool]
"""A GPU model, and whether lent nodes will do."""


@dataclass(frozen=True, slots=True)
class QuotaReclaim:
    """`counts`: what running jobs keep, 0 for one that is preempted; in all they free as many GPUs as are missing, or
    more. Empty where minimum run times stand against that until `held_until_s`."""

    counts: Mapping[str, int]
    held_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Offer:
    """GPUs that one running job could free from `at_s` on, at a cost in GPU-seconds for each that is missing."""

    job: Job
    preempts: bool
    gpus: int
    cost_s: float
    at_s: float = -inf

    @property
    def rank(self) -> tuple[bool, float, str]:
        return self.preempts, self.cost_s, self.job.id


class Givers:
    """The placed jobs that could give way, while one tick deals out GPUs. Whoever gives way does so once.

    Costs are those of `scheduler.policies.reclaiming`: GPU-seconds since the last checkpoint and for the restart.
    `excluded` are jobs that the tick decided on already.
    """

    def __init__(self, snapshot: Snapshot, book: QuotaBook, settings: PolicySettings, excluded: Set[str]) -> None:
        self.book, self._snapshot, self._settings = book, snapshot, settings
        self._sizes = node_sizes(snapshot)
        self._lines: dict[str, list[Job]] = {}
        self._usable: dict[tuple[str, _Kind], int] = {}
        self._failed: dict[tuple[str, _Kind, int, bool], int] = {}
        for job in snapshot.jobs.values():
            if job.is_placed and job.intent is Intent.RUN and job.id not in excluded:
                self._lines.setdefault(job.spec.queue, []).append(job)

    def reclaim(self, job: Job, gpu: str, missing: int) -> QuotaReclaim | None:
        """What frees `missing` GPUs of model `gpu` for a waiting job, beyond all that is free or borrowed and
        flexible, least cost first; None where nothing can.

        Flexible GPUs that the job's own queue holds of its guarantee give way first. Whole jobs are preempted only
        for a minimum that the job's queue is guaranteed, only of queues that would borrow even at their minimums,
        and never of a higher priority. A preempted job cannot claim its GPUs back in turn: with it, its queue was
        beyond its guarantee.
        """
        kind, now_s = (gpu, job.spec.fungible), self._snapshot.now_s
        known = (job.spec.queue, kind, job.spec.priority, self.book.is_guaranteed(job))
        if not 0 < missing <= min(self.book.claimable(job), self._failed.get(known, missing + 1) - 1):
            return None
        offers = list(self._offers(job, kind, missing))
        for among in ([offer for offer in offers if offer.at_s <= now_s], offers):
            if (counts := self._chosen(among, missing, self.book.own_flexible(job.spec.queue))) is not None:
                at_s = max((offer.at_s for offer in offers if counts.get(offer.job.id) == 0), default=-inf)
                return QuotaReclaim(self._agreed(counts)) if at_s <= now_s else QuotaReclaim({}, at_s)
        self._failed[known] = missing
        return None

    def room_within_limit(self, job: Job, gpus: int) -> Mapping[str, int]:
        """What running jobs of a waiting job's queue keep, so that `gpus` more fit under the queue's limits; empty
        where they fit already, or even without their flexible GPUs would not. Under the limit of a user only jobs of
        the same owner can make room."""
        flexible = self.book.flexible(job.spec.queue)
        if not flexible or not 0 < (missing := self.book.excess(job, gpus)) <= flexible:
            return {}
        line = self._lines.get(job.spec.queue, [])
        if self.book.user_excess(job, gpus):
            line = [other for other in line if other.owner == job.owner]
        offers = [self._shrink(other, gpus) for other in line if (gpus := self._flexible(other))]
        return self._agreed(self._chosen(offers, missing, missing) or {})

    def _agreed(self, counts: dict[str, int]) -> dict[str, int]:
        for job_id, count in counts.items():
            job = self._snapshot.jobs[job_id]
            self._lines[job.spec.queue].remove(job)
            self.book.give_back(job, job.allocation.target_gpus - count)
        return counts

    def _offers(self, claimant: Job, kind: _Kind, missing: int) -> Iterator[_Offer]:
        for job in self._lines.get(claimant.spec.queue, ()):
            if (gpus := self._flexible(job)) and self._usable_gpus(job, kind) == job.allocation.target_gpus:
                yield self._shrink(job, gpus)
        if not self.book.is_guaranteed(claimant):
            return
        now_s = self._snapshot.now_s
        for name, line in self._lines.items():
            for job in line if name != claimant.spec.queue and self.book.borrowed_base(name) else ():
                gpus = self._usable_gpus(job, kind) - self._flexible(job)
                if gpus > 0 and job.spec.priority <= claimant.spec.priority:
                    lost_s = max(0.0, now_s - job.progress.checkpoint_at_s)
                    lost_s += self._settings.reconfiguration_of(job)
                    cost_s = lost_s * job.allocation.target_gpus / min(gpus, missing)
                    yield _Offer(job, True, gpus, cost_s, self._ready_at_s(job))

    def _ready_at_s(self, job: Job) -> float:
        """A job that is being moved about is left to settle first."""
        settles_s = max(1.0, self._settings.reconfiguration_of(job))
        settled_s = -inf if job.state is JobState.RUNNING else self._snapshot.now_s + settles_s
        return max(settled_s, held_until_s(job, self._settings))

    def _flexible(self, job: Job) -> int:
        """Flexible GPUs that the job may be asked for."""
        if job.state is not JobState.RUNNING or self._snapshot.switches.resizes_frozen:
            return 0
        return max(0, job.allocation.target_gpus - least_gpus(self._snapshot, job, self._sizes))

    def _shrink(self, job: Job, gpus: int) -> _Offer:
        """It costs what stays stands still for, so that few jobs give up much."""
        left = job.allocation.target_gpus - gpus
        return _Offer(job, False, gpus, self._settings.reconfiguration_of(job) * left / gpus)

    def _usable_gpus(self, job: Job, kind: _Kind) -> int:
        """How many of a job's GPUs a waiting one that wants this kind could use once they are free."""
        if (usable := self._usable.get((job.id, kind))) is None:
            snapshot, (gpu, lent_is_fine), usable = self._snapshot, kind, 0
            for name, indices in job.allocation.target.items():
                node = snapshot.nodes[name]
                if node.gpu == gpu and snapshot.serves_training(node) and (lent_is_fine or not snapshot.is_lent(node)):
                    usable += len(indices)
            self._usable[job.id, kind] = usable
        return usable

    def _chosen(self, offers: Iterable[_Offer], missing: int, flexible_max: int) -> dict[str, int] | None:
        """What the jobs keep whose offers, cheapest first, free what is missing; None where all offers do not.

        Flexible GPUs give up `flexible_max` in all, and a queue no more whole jobs than it takes to borrow none:
        where a cheap small job would stand in the way of the large one that is needed, the largest go first.
        """
        cheapest = sorted(offers, key=lambda offer: offer.rank)
        largest = sorted(cheapest, key=lambda offer: (offer.preempts, -offer.gpus))
        return self._taken(cheapest, missing, flexible_max) or self._taken(largest, missing, flexible_max)

    def _taken(self, offers: Iterable[_Offer], missing: int, flexible_max: int) -> dict[str, int] | None:
        """As `_chosen`, in this order."""
        chosen: list[_Offer] = []
        borrowed: dict[str, int] = {}
        freed = 0
        for offer in offers:
            if freed >= missing:
                break
            queue, gpus = offer.job.spec.queue, offer.gpus
            if offer.preempts:
                if (left := borrowed.get(queue, self.book.borrowed_base(queue))) <= 0:
                    continue
                borrowed[queue] = left - offer.job.spec.min_gpus
            elif not (gpus := min(gpus, flexible_max)):
                continue
            else:
                flexible_max -= gpus
            chosen.append(replace(offer, gpus=gpus))
            freed += gpus
        return None if freed < missing else _thrifty(chosen, freed - missing)


def _thrifty(chosen: Iterable[_Offer], surplus: int) -> dict[str, int]:
    """What the jobs keep, once those that cost most keep what nobody needs: a whole job, or some flexible GPUs."""
    counts: dict[str, int] = {}
    for offer in sorted(chosen, key=lambda offer: offer.rank, reverse=True):
        if offer.gpus <= surplus:
            surplus -= offer.gpus
        elif offer.preempts:
            counts[offer.job.id] = 0
        else:
            counts[offer.job.id] = offer.job.allocation.target_gpus - offer.gpus + surplus
            surplus = 0
    return counts
