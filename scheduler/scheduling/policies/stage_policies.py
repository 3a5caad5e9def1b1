"""The policies that the stages of a cycle call, one for each question."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.domain.fleet import Pool
from scheduler.domain.gpu_sets import FreeGpus, Gpus
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.backfill import Backfill, CountStartingGpus
from scheduler.scheduling.policies.job_order import first_come, never_block_queue
from scheduler.scheduling.policies.lending import LendingTarget, lend_nothing
from scheduler.scheduling.policies.model_mix import NodeDeal
from scheduler.scheduling.policies.placement import best_fit
from scheduler.scheduling.policies.recall_selection import RecallNeed, least_preemption_cost
from scheduler.scheduling.policies.scaling import expect_no_arrivals, least_gain_first
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import min_feasible_gpus
from scheduler.scheduling.policies.whole_nodes import CountWholeNodes, count_no_whole_nodes

Order = Callable[[Snapshot, PolicySettings], tuple[str, ...]]
BlocksQueue = Callable[[Snapshot, Job, PolicySettings], bool]
Lend = Callable[[Snapshot, Pool, PolicySettings], LendingTarget]
Reclaim = Callable[[Snapshot, str, RecallNeed, PolicySettings], tuple[str, ...]]
Scale = Callable[[Snapshot, Iterable[str], int, PolicySettings], Mapping[str, int]]
ExpectedArrivals = Callable[[Snapshot, PolicySettings], int]
Shrink = Callable[[Snapshot, int, PolicySettings], Mapping[str, int]]
Place = Callable[[Snapshot, Iterable[FreeGpus], Job, int], Gpus | None]
DealNodes = Callable[[Snapshot, str, Collection[FreeGpus], Collection[str], PolicySettings], NodeDeal]
FindEvictionVictims = Callable[
    [Snapshot, Iterable[Job], Collection[str], PolicySettings], Mapping[str, tuple[str, ...]]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePolicies:
    """The policies that the stages of a cycle call, one for each question.

    Attributes:
        blocks_queue: whether no later job may start while this job waits for GPUs.
        starting_gpus: how many GPUs of a model a job starts on and keeps.
        count_whole_nodes: how many whole nodes other jobs are moved off for a pending job.
        expected_arrivals: free GPUs into which running jobs do not grow.
        scale: GPUs for elastic jobs; None leaves jobs at their minimum.
        backfill: reserves the start of the first pending job; other jobs may pass it only if they do not delay it. None
            lets them pass.
        deal_nodes: whole nodes of a GPU model for jobs that hold others; None keeps each job on one model.
        find_eviction_victims: jobs elsewhere that are preempted in place of jobs on recalled nodes; None preempts the
            latter at once.
        elastic_allotment: jobs get more GPUs than their minimum without `scale`. A flag, because no call of a policy
            can tell whether it ever exceeds a minimum.
        requires_speedup: leave out GPUs on which a job would not be faster. A flag, because the curve of the job
            decides which GPUs these are.
    """

    order: Order = first_come
    blocks_queue: BlocksQueue = never_block_queue
    starting_gpus: CountStartingGpus = min_feasible_gpus
    count_whole_nodes: CountWholeNodes = count_no_whole_nodes
    lend: Lend = lend_nothing
    reclaim: Reclaim = least_preemption_cost
    scale: Scale | None = None
    shrink: Shrink = least_gain_first
    expected_arrivals: ExpectedArrivals = expect_no_arrivals
    place: Place = best_fit
    backfill: Backfill | None = None
    find_eviction_victims: FindEvictionVictims | None = None
    deal_nodes: DealNodes | None = None
    elastic_allotment: bool = False
    requires_speedup: bool = True
    settings: PolicySettings = field(default_factory=PolicySettings)

    @property
    def scales(self) -> bool:
        """Whether jobs can get more GPUs than their minimum."""
        return self.elastic_allotment or self.scale is not None

    @property
    def lends(self) -> bool:
        return self.lend is not lend_nothing
