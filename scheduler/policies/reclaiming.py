"""Which lent nodes go home first: those whose return costs training least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.loan import LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.carrying import carrying_by_node_s
from scheduler.policies.recall_cost import RecallCost, Tenant
from scheduler.policies.recall_search import cheapest_to_empty
from scheduler.policies.settings import PolicySettings
from scheduler.policies.speed import least_gpus, node_sizes


def least_preemption_cost(snapshot: Snapshot, pool: str, count: int, settings: PolicySettings) -> tuple[str, ...]:
    """The `count` lent nodes of `pool` whose return costs least; all of them where there are no more.

    Nodes that training does not use yet go first. The others are judged together, by `recall_cost`: a job that is
    preempted loses GPU-seconds since its last checkpoint and restarts, one that shrinks or moves restarts only (Lyra,
    EuroSys'23, section 4.2, counts 1 / servers a job spans instead).
    """
    loans = [loan for loan in snapshot.loans.values() if loan.pool == pool]
    unused = sorted(loan.node for loan in loans if loan.state is LoanState.OFFERED)
    used = sorted(loan.node for loan in loans if loan.state is LoanState.ACTIVE)
    if count <= len(unused):
        return tuple(unused[: max(0, count)])
    leaving = cheapest_to_empty(recall_cost(snapshot, used, settings), count - len(unused))
    return (*unused, *(used[number] for number in sorted(leaving)))


def recall_cost(snapshot: Snapshot, nodes: Sequence[str], settings: PolicySettings) -> RecallCost:
    """What emptying each set of `nodes` costs, in GPU-seconds, by what evacuation then does with the jobs there.

    That a job may move to free GPUs counts, because evacuation does it: a fleet with room preempts nobody whom the
    room can hold, and nodes whose jobs fit into it are the cheap ones. Jobs look for room in order of submission; while
    others wait for GPUs they take only what keeps them at their minimum. Besides, all GPUs of a job stand still while
    what only the leaving ones hold is carried off.
    """
    ledger = snapshot.ledger
    idle = [(snapshot.nodes[node].gpu, len(room.free) if (room := ledger.rooms.get(node)) else 0) for node in nodes]
    free: Counter[str] = Counter()
    for (gpu, _), gpus in ledger.free.items():
        free[gpu] += gpus
    for gpu, gpus in idle:
        free[gpu] -= gpus
    tenants, carried_gpu_s = _tenants(snapshot, nodes, settings)
    return RecallCost(tenants, idle, free, refills=not ledger.waiting, carried_gpu_s=carried_gpu_s)


def _tenants(
    snapshot: Snapshot, nodes: Sequence[str], settings: PolicySettings
) -> tuple[list[Tenant], Sequence[float]]:
    """The jobs on these nodes, but for those that only release GPUs there or must go for other nodes' sake; and by node
    the GPU-seconds that carrying off takes what they hold there alone."""
    carried_gpu_s = [0.0] * len(nodes)
    ledger, sizes, tenants = snapshot.ledger, node_sizes(snapshot), list[Tenant]()
    numbers, gone = {node: number for number, node in enumerate(nodes)}, ledger.leaving.difference(nodes)
    for job in ledger.ordered({job_id for node in nodes for job_id in ledger.holders.get(node, {}).values()}):
        held, gpu, least = 0, "", least_gpus(snapshot, job, sizes)
        here: dict[int, int] = {}
        for node, indices in job.allocation.target.items():
            if node in numbers:
                here[numbers[node]] = len(indices)
                gpu = snapshot.nodes[node].gpu
            held += 0 if node in gone else len(indices)
        if not here or held < least:
            continue
        restart_s = settings.reconfiguration_of(job)
        # While others wait, evacuation tops a job up to its minimum alone: without a plan on that it finds no room.
        may_move = job.spec.fungible and (least == job.spec.min_gpus or not ledger.waiting)
        preempt_gpu_s = (restart_s + _unsaved_s(snapshot, job)) * held
        tenants.append(Tenant(here, held, held - least, restart_s, preempt_gpu_s, gpu if may_move else None))
        for node, carrying_s in carrying_by_node_s(snapshot, job).items():
            if node in numbers:
                carried_gpu_s[numbers[node]] += carrying_s * held
    return tenants, carried_gpu_s


def _unsaved_s(snapshot: Snapshot, job: Job) -> float:
    if job.state is not JobState.RUNNING:
        return 0.0
    return max(0.0, snapshot.now_s - max(job.progress.checkpoint_at_s, job.state_since_s))
