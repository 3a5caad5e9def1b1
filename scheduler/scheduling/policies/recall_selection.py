"""Selection of the lent nodes to return first: those whose return costs training least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scheduler.domain.decisions import RecallChoice
from scheduler.domain.fleet import LoanState
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.snapshot import Snapshot
from scheduler.resharding.placement import GpuSlot, Placement, build_equal_layer_tensors
from scheduler.resharding.shards import compute_held_bytes, compute_release_costs
from scheduler.scheduling.policies.recall_cost import AffectedJob, RecallCost
from scheduler.scheduling.policies.recall_search import find_cheapest_nodes
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import min_feasible_gpus, node_sizes

GPU_BYTES_PER_S = 10e9
"""Assumed bandwidth of one GPU's network port. The shipped GPU profiles have one port per GPU, of 3.5 (V100, L40S)
to 40 GB/s (H100). Policies do not see them, and the choice between nodes of one GPU model needs only the magnitude."""

_NO_TRANSFERS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class RecallNeed:
    """Loans that must end: at least `nodes`, with at least `gpus` GPUs together."""

    nodes: int = 0
    gpus: int = 0

    def without(self, sizes: Collection[int]) -> RecallNeed:
        """Return the rest of the need once loans with these numbers of GPUs end."""
        return RecallNeed(max(0, self.nodes - len(sizes)), max(0, self.gpus - sum(sizes)))

    @property
    def is_met(self) -> bool:
        return self.nodes <= 0 and self.gpus <= 0


def least_preemption_cost(snapshot: Snapshot, pool: str, need: RecallNeed, settings: PolicySettings) -> tuple[str, ...]:
    """Return the lent nodes of `pool` that meet the need and whose return costs least, or all if there are no more.

    Nodes that training does not use yet go first. The others are judged together by `recall_cost`: a preempted job
    loses GPU-seconds since its last checkpoint and restarts; one that shrinks or moves only restarts (Lyra, EuroSys'23,
    section 4.2, counts 1 / servers that a job spans instead).
    """
    loans = [loan for loan in snapshot.loans.values() if loan.pool == pool]
    unused = sorted(loan.node for loan in loans if loan.state is LoanState.OFFERED)
    used = sorted(loan.node for loan in loans if loan.state is LoanState.ACTIVE)
    sizes = {loan.node: loan.count_gpus(snapshot.nodes[loan.node]) for loan in loans}
    leaving = select_cover(unused, sizes, need)
    rest = need.without([sizes[node] for node in leaving])
    if rest.is_met:
        return tuple(leaving)
    chosen = _find_cheapest_cover(build_recall_cost(snapshot, used, settings), [sizes[node] for node in used], rest)
    return (*leaving, *(used[number] for number in sorted(chosen)))


def select_cover(nodes: Sequence[str], sizes: Mapping[str, int], need: RecallNeed) -> list[str]:
    """Return the first nodes that meet the need, or all. None of them has many more GPUs than are missing.

    The smallest node that meets what is missing is taken, or else the largest one.
    """
    left, chosen = list(nodes), list[str]()
    while left and not need.is_met:
        enough = [node for node in left if sizes[node] >= need.gpus]
        best = min(enough, key=sizes.__getitem__) if enough else max(left, key=sizes.__getitem__)
        left.remove(best)
        chosen.append(best)
        need = need.without([sizes[best]])
    return chosen


def _find_cheapest_cover(cost: RecallCost, sizes: Sequence[int], need: RecallNeed) -> set[int]:
    """Return the numbers of nodes that meet the need and cost least to empty. `sizes` are their GPUs.

    Equal sizes make both parts of the need a number of nodes. If the nodes that free enough GPUs are too few, the
    cheapest ones by number are added.
    """
    if len(set(sizes)) <= 1:
        size = sizes[0] if sizes else 1
        return find_cheapest_nodes(cost, max(need.nodes, -(-need.gpus // size)))
    chosen = find_cheapest_nodes(cost, need.gpus, sizes)
    return chosen if len(chosen) >= need.nodes else chosen | find_cheapest_nodes(cost, need.nodes)


def price_choice(snapshot: Snapshot, pool: str, chosen: Collection[str], settings: PolicySettings) -> RecallChoice:
    """Return the cost of recalling the `chosen` nodes of a pool together, and how many lent nodes stay."""
    used = sorted(loan.node for loan in snapshot.loans.values() if loan.pool == pool and loan.state is LoanState.ACTIVE)
    leaving = [number for number, node in enumerate(used) if node in chosen]
    cost_gpu_s = build_recall_cost(snapshot, used, settings).compute(leaving)
    return RecallChoice(cost_gpu_s, nodes=len(leaving), alternatives=len(used) - len(leaving))


def build_recall_cost(snapshot: Snapshot, nodes: Sequence[str], settings: PolicySettings) -> RecallCost:
    """Return the cost of emptying each set of `nodes`, in GPU-seconds, as evacuation then treats the jobs there.

    Moves to free GPUs count, because evacuation makes them: nodes whose jobs fit elsewhere are cheap. Jobs look for
    free GPUs in order of submission; while other jobs wait for GPUs, they take only what keeps them at their minimum.
    All GPUs of a job also stand still while state that only the leaving GPUs hold is moved.
    """
    ledger = snapshot.index
    idle = [
        (snapshot.nodes[node].gpu, len(room.indices) if (room := ledger.free_by_node.get(node)) else 0)
        for node in nodes
    ]
    free: Counter[str] = Counter()
    for (gpu, _), gpus in ledger.free_gpus.items():
        free[gpu] += gpus
    for gpu, gpus in idle:
        free[gpu] -= gpus
    affected, transfer_gpu_s = _list_affected_jobs(snapshot, nodes, settings)
    return RecallCost(affected, idle, free, refills=not ledger.waiting, transfer_gpu_s=transfer_gpu_s)


def _list_affected_jobs(
    snapshot: Snapshot, nodes: Sequence[str], settings: PolicySettings
) -> tuple[list[AffectedJob], Sequence[float]]:
    """Return the jobs on these nodes, and by node the GPU-seconds of moving state that they hold only there.

    Jobs that only release GPUs there, or must leave because of other nodes, are left out.
    """
    transfer_gpu_s = [0.0] * len(nodes)
    ledger, sizes, affected = snapshot.index, node_sizes(snapshot), list[AffectedJob]()
    numbers, gone = {node: number for number, node in enumerate(nodes)}, ledger.must_vacate.difference(nodes)
    for job in ledger.sort_by_submission(
        {job_id for node in nodes for job_id in ledger.holders.get(node, {}).values()}
    ):
        held, gpu, min_gpus = 0, "", min_feasible_gpus(snapshot, job, sizes)
        here: dict[int, int] = {}
        for node, indices in job.allocation.target.items():
            if node in numbers:
                here[numbers[node]] = len(indices)
                gpu = snapshot.nodes[node].gpu
            held += 0 if node in gone else len(indices)
        if not here or held < min_gpus:
            continue
        restart_s = settings.reconfiguration_s_for(job)
        # While others wait, evacuation only restores a job's minimum; without a plan for that, the job finds no GPUs.
        may_move = job.accepts_lent_nodes and (min_gpus == job.spec.min_gpus or not ledger.waiting)
        preempt_gpu_s = (restart_s + _estimate_unsaved_s(snapshot, job)) * held
        affected.append(AffectedJob(here, held, held - min_gpus, restart_s, preempt_gpu_s, gpu if may_move else None))
        for node, carrying_s in transfer_time_by_node_s(snapshot, job).items():
            if node in numbers:
                transfer_gpu_s[numbers[node]] += carrying_s * held
    return affected, transfer_gpu_s


def _estimate_unsaved_s(snapshot: Snapshot, job: Job) -> float:
    if job.state is not JobState.RUNNING:
        return 0.0
    return max(0.0, snapshot.now_s - max(job.progress.checkpoint_at_s, job.state_since_s))


def transfer_time_by_node_s(snapshot: Snapshot, job: Job) -> Mapping[str, float]:
    """Return, by node, the time its GPUs need to send the job's state that no GPU on another node holds.

    The time is 0 for a replica.

    This state must leave whether the job then shrinks, moves, or saves because it is preempted. The sum over several
    nodes is a lower bound, because what two nodes hold only together is in neither figure. The fullest GPU's state
    counts as its predicted peak, activations included, because a plan contains no more detail. Empty if nothing is
    known: the job does not run, or its plan has one layer (as plans without a model have) or no memory figure.
    """
    allocation, plan = job.allocation, job.allocation.plan
    if job.state is not JobState.RUNNING or plan is None:
        return _NO_TRANSFERS
    if not plan.peak_bytes_per_gpu or plan.stages[-1].last_layer == 0:
        return _NO_TRANSFERS
    numbers = dict[str, int]()
    nodes = tuple(numbers.setdefault(node, len(numbers)) for node, _ in snapshot.rank_placement(allocation))
    alone = _exclusive_fractions(plan, nodes)
    per_gpu_s = plan.peak_bytes_per_gpu / GPU_BYTES_PER_S
    return {node: alone[number] * per_gpu_s / len(allocation.target[node]) for node, number in numbers.items()}


@lru_cache(maxsize=1024)
def _exclusive_fractions(plan: ParallelPlan, nodes: tuple[int, ...]) -> tuple[float, ...]:
    """Return, by node, what only it holds, in units of what the fullest GPU holds, given the node of each rank.

    All 0 for an inconsistent plan, because a recall must not fail because of it.
    """
    slots = tuple(GpuSlot(f"{node}", rank) for rank, node in enumerate(nodes))
    tensors, count = build_equal_layer_tensors(plan.layers), max(nodes) + 1
    by_node = [[slot for slot, on in zip(slots, nodes, strict=True) if on == node] for node in range(count)]
    try:
        fullest = max(compute_held_bytes(plan, tensors))
        return tuple(alone / fullest for alone in compute_release_costs(Placement(plan, slots), tensors, by_node))
    except ValueError:
        return (0.0,) * count
