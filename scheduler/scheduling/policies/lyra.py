"""Lyra as published (EuroSys'23), for comparison with our own policies in `scaling` and `recall_selection`.

Scaling is linear, a reconfiguration is free, and a node costs the fraction of its jobs that it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from scheduler.domain import gpu_sets
from scheduler.domain.fleet import LoanState
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.knapsack import Item, solve_knapsack
from scheduler.scheduling.policies.recall_selection import RecallNeed
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import linear_step_times_s, min_feasible_gpus, node_sizes


def linear_counts(
    snapshot: Snapshot, starting: Iterable[str], spare: int, settings: PolicySettings
) -> Mapping[str, int]:
    """Return GPUs for each elastic job by Lyra's second phase, a multiple-choice knapsack (section 5.2).

    A group is a job, an item is a count of its range, and its value is the run time that it saves. `spare` free GPUs
    are distributed together with all that running jobs hold above their base, so that every job may change at each full
    pass.
    """
    sizes, ledger, budget = node_sizes(snapshot), snapshot.index, spare
    groups: dict[str, list[Item]] = {}
    for job in ledger.sort_by_submission(ledger.elastic.union(starting)):
        items = _items(snapshot, job, sizes)
        if len(items) > 1 and job.intent is Intent.RUN:
            groups[job.id] = items
            budget += max(0, job.allocation.target_gpus - items[0].gpus)
    return solve_knapsack(groups, budget)


def least_linear_gain_first(snapshot: Snapshot, missing: int, settings: PolicySettings) -> Mapping[str, int]:
    """Return smaller counts for running jobs that free `missing` flexible GPUs, or as many as there are.

    Base demand comes before flexible demand (section 5.2). Whole flexible parts are taken, first those that save least
    per GPU; only the last job gives up a part.
    """
    sizes = node_sizes(snapshot)
    offers: list[tuple[float, str, int, int]] = []
    for job in snapshot.jobs.values():
        current_gpus, items = job.allocation.target_gpus, _items(snapshot, job, sizes)
        if job.state is JobState.RUNNING and job.intent is Intent.RUN and items and items[0].gpus < current_gpus:
            min_gpus, longest_s = items[0].gpus, items[0].remaining_s
            offers.append((longest_s / current_gpus, job.id, current_gpus, min_gpus))
    counts: dict[str, int] = {}
    for _, job_id, current_gpus, min_gpus in sorted(offers):
        if missing <= 0:
            break
        counts[job_id] = max(min_gpus, current_gpus - missing)
        missing -= current_gpus - counts[job_id]
    return counts


def least_node_fraction(snapshot: Snapshot, pool: str, need: RecallNeed, settings: PolicySettings) -> tuple[str, ...]:
    """Return the lent nodes of `pool` to give back, chosen greedily by server preemption cost (section 4.2).

    Flexible workers leave first: a job that keeps its minimum elsewhere costs nothing. Any other job is preempted and
    costs 1 / the nodes that it spans; it has then left its other nodes too. Costs are recomputed after each choice.
    Among equals, nodes that training does not use yet go first.
    """
    loans = [loan for loan in snapshot.loans.values() if loan.pool == pool]
    lent = {loan.node: loan.state for loan in loans}
    sizes = {loan.node: loan.count_gpus(snapshot.nodes[loan.node]) for loan in loans}
    open_nodes = {node for node, state in lent.items() if state in (LoanState.OFFERED, LoanState.ACTIVE)}
    users: defaultdict[str, list[Job]] = defaultdict(list)
    for job in snapshot.jobs.values():
        for node in job.allocation.target.keys() & open_nodes:
            users[node].append(job)
    chosen: list[str] = []
    preempted: set[str] = set()

    def cost(node: str) -> tuple[float, bool, str]:
        present = (job for job in users[node] if job.id not in preempted)
        return sum(_fraction(job, node, chosen) for job in present), lent[node] is not LoanState.OFFERED, node

    while open_nodes and not need.is_met:
        best = min(open_nodes, key=cost)
        open_nodes.remove(best)
        preempted.update(job.id for job in users[best] if _fraction(job, best, chosen))
        chosen.append(best)
        need = need.without([sizes[best]])
    return tuple(chosen)


def _fraction(job: Job, node: str, leaving: Iterable[str]) -> float:
    """Return the fraction of the job that is lost with `node` after it has left `leaving`.

    0 if it keeps its minimum.
    """
    remaining = gpu_sets.without_nodes(job.allocation.target, leaving)
    kept = gpu_sets.count(remaining) - len(remaining.get(node, ()))
    return 0.0 if kept >= job.spec.min_gpus or not remaining else 1.0 / len(remaining)


def _items(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> list[Item]:
    """Return all counts from the job's base on, with its run time under linear scaling."""
    steps, step_s = job.remaining_steps(snapshot.now_s), linear_step_times_s(snapshot, job, sizes)(1)
    if step_s is None:
        return []
    work_s = (steps if steps is not None else max(1.0, job.steps_at(snapshot.now_s))) * step_s
    least = min_feasible_gpus(snapshot, job, sizes)
    return [Item(gpus, work_s / gpus) for gpus in range(least, job.spec.max_gpus + 1)]
