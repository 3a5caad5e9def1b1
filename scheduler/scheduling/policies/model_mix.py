"""Growth over GPU models: the number of whole nodes of one model for each job that also holds other models.

Lyra (EuroSys'23, section 5.2) deals counts of equal GPUs. Inference clusters mostly have other GPUs than training
clusters, and the solver plans pipelines over unlike groups. What a job gains from them depends on the shape, so each
item of the knapsack is a shape here, and its value is read from the job's curve as in `scaling`.

Shapes are solved lazily. Before a shape is solved, its promised step time follows from the aggregate speed of its GPUs:
the current step time times current speed over new speed, with the speed of a GPU model for this job from the cheapest
plan on that model alone. Only the shapes that promise most are requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import FreeGpus, Gpus, GpuShape
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.snapshot_index import GpuKind
from scheduler.domain.tick_report import WantedShape
from scheduler.scheduling.policies.knapsack import Item, solve_knapsack
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.policies.scaling import completion_rate, list_resizable_jobs, remaining_work
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import gpu_model, node_sizes

MIXED_SHAPES_MAX = 40
"""Most mixed shapes that are solved for one curve."""
REQUESTS_MAX = 2
"""Most mixed shapes that a job requests in one full pass: those that promise most."""
GPU_MODELS_MAX = 3
"""Most GPU models that a job holds. A plan for three takes about a second, and one for four up to three."""
SPEEDUP_MIN = 1.05
"""Least promised speedup of a shape that is solved."""


@dataclass(frozen=True, slots=True)
class NodeDeal:
    """Number of whole nodes of one GPU model for each job that should change, and the shapes to solve first."""

    nodes: Mapping[str, int] = field(default_factory=dict)
    wanted: Sequence[WantedShape] = ()


NO_DEAL = NodeDeal()


def deal_nodes(
    snapshot: Snapshot, gpu: str, free: Collection[FreeGpus], exempt: Collection[str], settings: PolicySettings
) -> NodeDeal:
    """Distribute whole nodes of a GPU model to the jobs on other models that gain most from them.

    The free nodes are distributed, and the nodes that such jobs already hold. Jobs that hold only this model are left
    out, because `scaling` distributes equal GPUs. `exempt` jobs do not change.
    """
    size, jobs = node_sizes(snapshot)[gpu], snapshot.jobs
    if not free and not any(_holds_in_mix(snapshot, jobs[job_id], gpu) for job_id in snapshot.index.running):
        return NO_DEAL
    groups, budget, quota = dict[str, list[Item]](), size * len(free), QuotaState(snapshot)
    requests: list[tuple[float, WantedShape]] = []
    for job in list_resizable_jobs(snapshot, settings):
        if job.id in exempt or not job.spec.may_mix_gpu_models or _holds_part_of_node(snapshot, job, gpu):
            continue
        usable = sum(job.accepts_lent_nodes or not room.is_lent for room in free)
        options = _MixOptions(snapshot, job, gpu, min(usable, quota.headroom(job) // size), settings)
        items = options.list_items()
        requests += options.list_requests()
        if len(items) > 1:
            groups[job.id] = items
            budget += size * options.current_nodes - items[0].gpus
    dealt = solve_knapsack(groups, budget)
    changes = {job_id: gpus // size for job_id, gpus in dealt.items() if gpus != _count_held(snapshot, job_id, gpu)}
    return NodeDeal(changes, [wanted for _, wanted in sorted(requests, key=lambda request: request[0])])


def count_gainful_gpus(snapshot: Snapshot, job: Job, gpu: str, settings: PolicySettings) -> int:
    """Return the number of GPUs of a model that a running job could add, by solved or promising shapes."""
    plan, size = job.allocation.plan, node_sizes(snapshot)[gpu]
    if plan is None or not job.spec.may_mix_gpu_models:
        return 0
    in_fleet = snapshot.index.node_counts_by_size.get((gpu, size), 0)
    more = min(in_fleet, (job.spec.max_gpus - job.allocation.target_gpus) // size)
    return size * _MixOptions(snapshot, job, gpu, more, settings).count_gainful_nodes()


def split_unlike(snapshot: Snapshot, job: Job, gpus: Gpus) -> tuple[Gpus, Gpus]:
    """Split GPUs of the job into those of its home model and all others."""
    if job.allocation.plan is None or not job.allocation.plan.is_mixed:
        return gpus, gpu_sets.NO_GPUS
    home = gpu_model(snapshot, job, node_sizes(snapshot))
    own = {name: indices for name, indices in gpus.items() if snapshot.nodes[name].gpu == home}
    return own, {name: indices for name, indices in gpus.items() if name not in own}


def count_by_kind(snapshot: Snapshot, gpus: Gpus) -> Counter[GpuKind]:
    """Count GPUs by model and whether they are on lent nodes."""
    found: Counter[GpuKind] = Counter()
    for name, indices in gpus.items():
        node = snapshot.nodes[name]
        found[node.gpu, snapshot.is_lent(node)] += len(indices)
    return found


def _holds_in_mix(snapshot: Snapshot, job: Job, gpu: str) -> bool:
    plan = job.allocation.plan
    return plan is not None and plan.is_mixed and any(stage.gpu == gpu for stage in plan.stages)


def _holds_part_of_node(snapshot: Snapshot, job: Job, gpu: str) -> bool:
    size, nodes = node_sizes(snapshot)[gpu], snapshot.nodes
    return any(len(held) != size for name, held in job.allocation.target.items() if nodes[name].gpu == gpu)


def _count_held(snapshot: Snapshot, job_id: str, gpu: str) -> int:
    target = snapshot.jobs[job_id].allocation.target
    return sum(len(indices) for name, indices in target.items() if snapshot.nodes[name].gpu == gpu)


class _MixOptions:
    """The options of one job: numbers of nodes of one GPU model, with its GPUs of other models unchanged."""

    def __init__(self, snapshot: Snapshot, job: Job, gpu: str, more_nodes: int, settings: PolicySettings) -> None:
        self._job = job
        self._curve = snapshot.profile_curve(job)
        self._gpu = gpu
        self._sizes = node_sizes(snapshot)
        counts = [(snapshot.nodes[name].gpu, len(indices)) for name, indices in job.allocation.target.items()]
        self._counts = counts
        self._rest = [(model, gpus) for model, gpus in counts if model != gpu]
        self.current_nodes = len(counts) - len(self._rest)
        self._is_possible = 0 < len({model for model, _ in self._rest}) < GPU_MODELS_MAX
        is_home = gpu == gpu_model(snapshot, job, self._sizes)
        self._nodes_min = self.current_nodes if is_home else 0
        self._more_nodes = max(0, more_nodes)
        self._price_s = settings.gain_factor * settings.reconfiguration_s_for(job)
        self._work = remaining_work(snapshot, job)
        self._snapshot = snapshot

    def list_items(self) -> list[Item]:
        """Return useful node counts with a solved plan, as GPUs, by the rate at which the job approaches its end."""
        items: list[Item] = []
        best_s = inf
        for nodes in self._candidates():
            time_s = self._remaining_s(nodes)
            if time_s is not None and time_s < best_s:
                best_s = time_s
                items.append(Item(nodes * self._sizes[self._gpu], -completion_rate(self._snapshot, self._job, time_s)))
        return items

    def list_requests(self) -> list[tuple[float, WantedShape]]:
        """Return the unsolved shapes that promise most, each with the promised remaining time."""
        promising = sorted((self._work * step_s, shape) for _, shape, step_s in self._list_promising())
        room = MIXED_SHAPES_MAX - self._count_solved_mixes() if promising else 0
        found = promising[: max(0, min(REQUESTS_MAX, room))]
        return [(time_s, WantedShape(self._job.curve_key, shape)) for time_s, shape in found]

    def count_gainful_nodes(self) -> int:
        """Return the most nodes beyond the current ones that a solved plan uses with gain, or an unsolved promises."""
        now_s, gainful = self._remaining_s(self.current_nodes) or inf, self.current_nodes
        for nodes in self._candidates():
            time_s = self._remaining_s(nodes)
            if time_s is not None and time_s < now_s:
                now_s, gainful = time_s, max(gainful, nodes)
        if self._count_solved_mixes() < MIXED_SHAPES_MAX:
            gainful = max([gainful, *(nodes for nodes, _, _ in self._list_promising())])
        return gainful - self.current_nodes

    def _candidates(self) -> list[int]:
        """Return the node counts to consider, ascending: none of another model, the current one, and canonical ones."""
        if not self._is_possible:
            return []
        most = self.current_nodes + self._more_nodes
        canonical = _canonical_node_counts(most - self._nodes_min)
        return sorted({*(self._nodes_min + nodes for nodes in canonical), self.current_nodes})

    def _remaining_s(self, nodes: int) -> float | None:
        """Return the remaining time on this many nodes with the price of the change, or None without a plan."""
        if nodes == self.current_nodes:
            return self._work * self._job.step_time_s()
        plan = self._curve.plan_for(self._shape(nodes))
        return None if plan is None else self._work * plan.iteration_time_s * self._job.curve_correction + self._price_s

    def _list_promising(self) -> Iterator[tuple[int, GpuShape, float]]:
        """Yield unsolved shapes with their promised step time, if that beats what is solved and pays for the change."""
        solved = [time_s for nodes in self._candidates() if (time_s := self._remaining_s(nodes)) is not None]
        now_s, own = self._job.step_time_s(), self._speed(self._counts)
        best_s = min(solved, default=inf)
        for nodes in self._candidates():
            shape = self._shape(nodes)
            if nodes <= self.current_nodes or self._curve.is_solved(shape):
                continue
            step_s = now_s * own / self._speed([*self._rest, (self._gpu, nodes * self._sizes[self._gpu])])
            if now_s >= SPEEDUP_MIN * step_s and self._work * step_s + self._price_s < best_s:
                yield nodes, shape, step_s

    def _speed(self, counts: Iterable[tuple[str, int]]) -> float:
        """Return the aggregate speed of GPUs in steps per second. A model without a plan counts as the job's own."""
        work_gpu_s = {model: self._curve.least_step_gpu_s(model, self._sizes[model]) for model, _ in counts}
        known = min((work for work in work_gpu_s.values() if work), default=1.0)
        return sum(gpus / (work_gpu_s[model] or known) for model, gpus in counts)

    def _shape(self, nodes: int) -> GpuShape:
        return GpuShape.from_node_counts([*self._rest, *[(self._gpu, self._sizes[self._gpu])] * nodes])

    def _count_solved_mixes(self) -> int:
        return sum(shape.is_mixed for shape in (*self._curve.plans, *self._curve.infeasible))


def _canonical_node_counts(nodes_max: int) -> list[int]:
    """Return 0, 1, 2, 3, 4, 6, 8, 12 and so on up to the maximum, so that jobs and passes share solved shapes."""
    powers = [1 << exponent for exponent in range(nodes_max.bit_length())]
    return [0, *(nodes for power in powers for nodes in (power, power * 3 // 2) if nodes <= nodes_max)]
