"""Which lent nodes go home first, and what taking a node from its jobs costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

from scheduler.domain import gpus as gpu_sets
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.settings import PolicySettings

Cost = tuple[float, float]


def least_preemption_cost(snapshot: Snapshot, pool: str, count: int, settings: PolicySettings) -> tuple[str, ...]:
    """The `count` lent nodes of `pool` whose return costs least, greedily.

    Nodes that training does not use yet first, then idle ones, then those whose jobs only shrink, then by server
    preemption cost: GPU-seconds since each job's last checkpoint plus its restart (Lyra, EuroSys'23, section 4.2,
    counts 1 / servers a job spans instead). A job that one choice preempts costs the next choice nothing more: it has
    left its other nodes too. So all lent nodes of one job are weighed together as well, by their cost a node.
    """
    lent = {loan.node: loan for loan in snapshot.loans.values() if loan.pool == pool and _can_be_recalled(loan)}
    users = users_by_node(snapshot)
    unused = sorted(node for node, loan in lent.items() if loan.state is LoanState.OFFERED)
    chosen = unused[:count]
    preempted: set[str] = set()
    bundles = _bundles(lent.keys() - unused, users)
    costs: dict[tuple[str, ...], Cost] = {}
    while bundles and len(chosen) < count:
        for bundle in bundles:
            if bundle not in costs:
                jobs = {job.id: job for node in bundle for job in users[node]}.values()
                cost = node_cost(snapshot, jobs, {*chosen, *bundle}, preempted, settings)
                costs[bundle] = (cost[0] / len(bundle), cost[1] / len(bundle))
        fitting = [bundle for bundle in bundles if len(bundle) <= count - len(chosen)]
        best = min(fitting, key=lambda bundle: (costs[bundle], bundle))
        chosen.extend(best)
        disturbed = [job for node in best for job in users[node]]
        preempted.update(job.id for job in disturbed if gpus_left(job, chosen) < job.spec.min_gpus)
        changed = {node for job in disturbed for node in job.allocation.target} | set(best)
        costs = {bundle: cost for bundle, cost in costs.items() if changed.isdisjoint(bundle)}
        bundles = sorted({rest for bundle in bundles if (rest := tuple(n for n in bundle if n not in best))})
    return tuple(chosen)


def _bundles(nodes: Set[str], users: Mapping[str, list[Job]]) -> list[tuple[str, ...]]:
    """Every node by itself, and the nodes of each job that has several."""
    jobs = {job.id: job for node in nodes for job in users[node]}
    together = {tuple(sorted(nodes & job.allocation.target.keys())) for job in jobs.values()}
    return sorted(together | {(node,) for node in nodes})


def users_by_node(snapshot: Snapshot) -> Mapping[str, list[Job]]:
    users: defaultdict[str, list[Job]] = defaultdict(list)
    for job in snapshot.jobs.values():
        for node in job.allocation.target:
            users[node].append(job)
    return users


def node_cost(
    snapshot: Snapshot, users: Iterable[Job], leaving: set[str], preempted: set[str], settings: PolicySettings
) -> Cost:
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
