"""Which lent nodes go home first, and what taking a node from its jobs costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from scheduler.domain import gpus as gpu_sets
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.settings import PolicySettings


def least_preemption_cost(snapshot: Snapshot, pool: str, count: int, settings: PolicySettings) -> tuple[str, ...]:
    """The `count` lent nodes of `pool` whose return costs least, greedily.

    Idle nodes first, then those whose jobs only shrink, then by server preemption cost: GPU-seconds since each
    job's last checkpoint plus its restart (Lyra, EuroSys'23, section 4.2 counts 1 / servers a job spans instead).
    A job that one choice preempts costs the next choice nothing more: it has left its other nodes too.
    """
    lent = [loan for loan in snapshot.loans.values() if loan.pool == pool and _can_be_recalled(loan)]
    users = users_by_node(snapshot)
    chosen: list[str] = []
    preempted: set[str] = set()
    while lent and len(chosen) < count:
        costs = {
            loan.node: node_cost(snapshot, users[loan.node], {*chosen, loan.node}, preempted, settings) for loan in lent
        }
        best = min(lent, key=lambda loan: (loan.state is not LoanState.OFFERED, costs[loan.node], loan.node))
        chosen.append(best.node)
        lent.remove(best)
        preempted.update(j.id for j in users[best.node] if gpus_left(j, chosen) < j.spec.min_gpus)
    return tuple(chosen)


def users_by_node(snapshot: Snapshot) -> Mapping[str, list[Job]]:
    users: defaultdict[str, list[Job]] = defaultdict(list)
    for job in snapshot.jobs.values():
        for node in job.allocation.target:
            users[node].append(job)
    return users


def node_cost(
    snapshot: Snapshot, users: Iterable[Job], leaving: set[str], preempted: set[str], settings: PolicySettings
) -> tuple[float, float]:
    """(GPU-seconds lost to preemption, GPU-seconds lost to shrinking) when all of `leaving` is emptied."""
    preemption_gpu_s = shrink_gpu_s = 0.0
    for job in users:
        if job.id in preempted:
            continue
        if (left := gpus_left(job, leaving)) >= job.spec.min_gpus:
            shrink_gpu_s += settings.reconfiguration_s * left
        else:
            unsaved_s = max(0.0, snapshot.now_s - job.progress.checkpoint_at_s)
            preemption_gpu_s += (unsaved_s + settings.reconfiguration_s) * job.allocation.target_gpus
    return preemption_gpu_s, shrink_gpu_s


def gpus_left(job: Job, leaving: Iterable[str]) -> int:
    return gpu_sets.count(gpu_sets.without_nodes(job.allocation.target, leaving))


def _can_be_recalled(loan: Loan) -> bool:
    return loan.state in (LoanState.OFFERED, LoanState.ACTIVE)
