"""GPUs that running jobs give up, or could give up for others, by kind."""

from __future__ import annotations

from collections import Counter

from scheduler.domain import gpu_sets
from scheduler.domain.snapshot_index import GpuKind
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.model_mix import count_by_kind, split_unlike
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.target_selection import is_resizable


def count_pending_gpus(cycle: SchedulingCycle) -> Counter[GpuKind]:
    """Count the GPUs that running jobs give up or could give up."""
    return count_releasing_gpus(cycle) + count_flexible_gpus(cycle)


def count_releasing_gpus(cycle: SchedulingCycle, nodes: frozenset[str] | None = None) -> Counter[GpuKind]:
    """Count the GPUs that jobs are releasing on nodes that training can go on using, on `nodes` only if given."""
    view = cycle.view
    found: Counter[GpuKind] = Counter()
    for job_id in cycle.index.releasing:
        for name, indices in view.jobs[job_id].allocation.releasing.items():
            node = view.nodes.get(name)
            if node is not None and view.serves_training(node) and (nodes is None or name in nodes):
                found[node.gpu, view.is_lent(node)] += len(indices)
    return found


def count_flexible_gpus(cycle: SchedulingCycle, among: frozenset[str] | None = None) -> Counter[GpuKind]:
    """Count the GPUs that running elastic jobs hold above their starting count and that other jobs can have.

    A job gives up lent GPUs first, so all flexible GPUs of a job with lent ones count as lent. GPUs of other models
    than a job's home model are flexible too. GPUs within a queue's guarantee are not counted. If `among` is given, only
    jobs count that hold no GPUs on other nodes.
    """
    found: Counter[GpuKind] = Counter()
    if cycle.policies.scale is None or cycle.resizes_frozen:
        return found
    view, sizes, quota = cycle.view, cycle.node_sizes, QuotaState(cycle.view)
    job_ids = cycle.index.above_minimum
    # Without quotas the order does not matter.
    for job in cycle.index.sort_by_submission(job_ids) if quota else map(view.jobs.__getitem__, job_ids):
        if is_resizable(cycle, job) and (among is None or among.issuperset(job.allocation.target)):
            own, unlike = split_unlike(view, job, job.allocation.target)
            nodes = [view.nodes[name] for name in own]
            base = cycle.policies.starting_gpus(view, job, sizes, None)
            flexible = quota.available_to_others(job, max(0, gpu_sets.count(own) - base))
            quota.release(job, flexible)
            found[nodes[0].gpu, any(view.is_lent(node) for node in nodes)] += flexible
            found.update(count_by_kind(view, unlike))
    return found
