"""The scheduling cycle: the plan of one tick while the stages add to it, and its result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import floor, inf

from scheduler.domain.decisions import Decision, NodeDecision, Reason, ResizeJob
from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.gpu_sets import FreeGpus, Gpus, GpuShape, canonical_gpu_counts
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.node_fit import NodeFit
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult, WantedShape
from scheduler.scheduling.desired_state import apply_decision
from scheduler.scheduling.job_progress import shapes_to_solve
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policies.placement import filter_usable
from scheduler.scheduling.policies.speed import node_sizes, packed
from scheduler.scheduling.policies.stage_policies import StagePolicies
from scheduler.scheduling.rank_placement import place_ranks


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """GPUs of one model, on owned nodes only or on any node that training can use.

    `nodes` are the only nodes where they are of use, None if all are.
    """

    gpu: str
    owned_only: bool
    nodes: frozenset[str] | None = None

    def includes(self, nodes: Iterable[str]) -> bool:
        """Return whether GPUs of all these nodes are of use."""
        return self.nodes is None or self.nodes.issuperset(nodes)


@dataclass(frozen=True, slots=True)
class GpuDemand:
    """GPUs that running jobs must give up for one job."""

    kind: ResourceKind
    gpus: int


@dataclass(frozen=True, slots=True)
class NodeReservation:
    """Nodes on which only the jobs in `job_ids` may be placed."""

    nodes: frozenset[str] = frozenset()
    job_ids: frozenset[str] = frozenset()

    def excludes(self, job: Job) -> bool:
        return bool(self.nodes) and job.id not in self.job_ids


@dataclass(frozen=True, slots=True)
class StageReport:
    """Result of a stage: reasons of pending jobs, GPUs to be freed by job, the time of the next check, and records of
    pools in shadow mode.

    Decisions are not repeated here. A stage applies each one to the cycle at once, so that the next one sees it.
    """

    waiting: Mapping[str, Reason] = field(default_factory=dict)
    demands: Mapping[str, GpuDemand] = field(default_factory=dict)
    recheck_at_s: float = inf
    shadows: Mapping[str, ShadowLending] = field(default_factory=dict, kw_only=True)


class SchedulingCycle:
    """The snapshot with the decisions so far applied, and the reservations that later placements must respect.

    `settled_jobs` are changed by no later decision of this cycle. `missing_shapes` are the curve points that a stage
    looked up and did not find.
    """

    def __init__(self, snapshot: Snapshot, policies: StagePolicies) -> None:
        self.policies = policies
        self.settings = policies.settings
        self.snapshot = MutableSnapshot(snapshot)
        self.node_sizes = snapshot.typical_node_sizes
        self.index = self.snapshot.index
        self.view = self.snapshot.view()
        self.now_s = snapshot.now_s
        self.fit = NodeFit(self.index, self.now_s)
        self.decisions: list[Decision] = []
        self.settled_jobs: set[str] = set()
        self.missing_shapes: dict[WantedShape, None] = {}
        self.reservation = NodeReservation()
        due_s = next_full_pass_s(snapshot.full_pass_at_s, self.settings.full_pass_period_s)
        self.full_pass = snapshot.now_s >= due_s
        after_s = snapshot.now_s if self.full_pass else snapshot.full_pass_at_s
        self.next_full_pass_s = next_full_pass_s(after_s, self.settings.full_pass_period_s)

    def apply(self, decision: Decision) -> None:
        """Record a decision and apply it. A resize gets its rank placement.

        Decisions are not checked here: the tick checks each one before it takes effect. A decision of a faulty policy
        that cannot be applied at all is recorded only, so that the tick reports it.
        """
        try:
            if isinstance(decision, ResizeJob):
                decision = place_ranks(self.snapshot, decision)
            apply_decision(self.snapshot, decision)
        except (KeyError, ValueError):
            pass
        self.decisions.append(decision)
        if not isinstance(decision, NodeDecision):
            self.settle(decision.job_id)

    def settle(self, job_id: str) -> None:
        """Exclude the job from all later decisions of this cycle."""
        self.settled_jobs.add(job_id)

    def reserve_nodes(self, nodes: Iterable[str], job_ids: Iterable[str]) -> None:
        """Place only these jobs on these nodes for the rest of the cycle. Replaces an earlier reservation."""
        self.reservation = NodeReservation(frozenset(nodes), frozenset(job_ids))

    @property
    def resizes_frozen(self) -> bool:
        return self.snapshot.original.switches.resizes_frozen

    @property
    def reserved_gpus(self) -> list[FreeGpus]:
        """Free GPUs of the reserved nodes."""
        free = self.index.free_by_node
        return [free[name] for name in sorted(self.reservation.nodes) if name in free]

    @property
    def unreserved_gpu_total(self) -> int:
        return self.snapshot.free_gpu_total - sum(len(free.indices) for free in self.reserved_gpus)

    def count_unreserved_gpus(self, gpu: str) -> int:
        """Count the free GPUs of a model on nodes that are not reserved."""
        free = self.index.free_gpus
        return (
            free.get((gpu, False), 0)
            + free.get((gpu, True), 0)
            - sum(len(room.indices) for room in self.reserved_gpus if room.gpu == gpu)
        )

    def usable_gpus(self, job: Job, free_gpus: Collection[FreeGpus] | None = None) -> list[FreeGpus]:
        """Return the part of free GPUs that the job can use, by default of those on nodes not reserved for others."""
        if free_gpus is None:
            free_gpus = self.snapshot.free_gpus
            if self.reservation.excludes(job):
                free_gpus = [free for free in free_gpus if free.node not in self.reservation.nodes]
        return filter_usable(job, self.fit.limit(job, free_gpus))

    def plan_for(self, job: Job, gpus: Gpus) -> ParallelPlan | None:
        """Return the job's plan for exact GPUs. A shape that is not solved yet is requested from the solver."""
        return self.plan_on(job, self.snapshot.original.shape_of(gpus))

    def plan_on(self, job: Job, shape: GpuShape, *, request_missing: bool = True) -> ParallelPlan | None:
        """Return the job's plan for a shape. With `request_missing`, an unsolved shape is requested from the solver."""
        curve = self.snapshot.original.curve(job)
        if request_missing and not curve.is_solved(shape):
            self.missing_shapes[WantedShape(job.curve_key, shape)] = None
        return curve.plan_for(shape)

    def offer_deadline_s(self, loan: Loan) -> float:
        """Return the time by which inference must have left a node that was offered to training."""
        return loan.offered_at_s + self.snapshot.original.pools[loan.pool].lending.return_deadline_s

    def leave_by_s(self, job: Job) -> float:
        """Return the deadline by which the job's current workers must have left.

        It is the earliest return deadline of the nodes that the job holds. Without one it is the usual grace, which is
        long enough for a step and a reconfiguration and ends before a recall made now would. A job that is already
        leaving gets no more time, because its old workers may be on a node with an earlier deadline.
        """
        allocation, loans = job.allocation, self.snapshot.loans
        held = [loan for node in (*allocation.target, *allocation.releasing) if (loan := loans.get(node))]
        deadlines = [loan.return_by_s for loan in held if loan.return_by_s is not None]
        if not deadlines:
            pools = self.snapshot.original.pools
            graces = (pools[loan.pool].lending.return_deadline_s for loan in held if loan.state is LoanState.ACTIVE)
            deadlines = [self.now_s + min((self.settings.leave_grace_s_for(job), *graces))]
        if allocation.releasing and allocation.leave_by_s is not None:
            deadlines.append(allocation.leave_by_s)
        return max(self.now_s, min(deadlines))

    def build_result(self, reports: Iterable[StageReport]) -> TickResult:
        """Combine the decisions with the stages' reports, in the order of the stages."""
        waiting: dict[str, Reason] = {}
        shadows: dict[str, ShadowLending] = {}
        times_s = [self.next_full_pass_s, *self._list_deadlines()]
        for report in reports:
            waiting |= report.waiting
            shadows |= report.shadows
            times_s += [report.recheck_at_s] if report.recheck_at_s > self.now_s else []
        return TickResult(
            decisions=tuple(self.decisions),
            waiting=waiting,
            wanted_shapes=list_wanted_shapes(self.view, self.missing_shapes),
            next_wake_s=min(times_s),
            full_pass=self.full_pass,
            shadows=shadows,
        )

    def _list_deadlines(self) -> list[float]:
        """Return the future times at which a deadline of a job or a loan passes."""
        index, jobs, loans = self.index, self.snapshot.jobs, self.snapshot.loans
        leaving = [jobs[job_id].allocation.leave_by_s for job_id in index.releasing]
        recalls = [loans[node].return_by_s for node in index.recalled]
        offers = [self.offer_deadline_s(loans[node]) for node in index.offered]
        notices = [loans[node].offered_at_s for node in index.proposed]
        limits = [run_time_deadline_s(jobs[job_id]) for job_id in index.time_limited]
        retries = [jobs[job_id].retry_at_s for job_id in index.unsettled]
        times_s = (*leaving, *recalls, *offers, *notices, *limits, *retries)
        return [at_s for at_s in times_s if at_s is not None and at_s > self.now_s]


def next_full_pass_s(at_s: float, period_s: float) -> float:
    """Return the next multiple of the period after `at_s`, or -inf if there was no full pass yet.

    Multiples coincide with the usual times of demand reports, so that one tick serves both.
    """
    return (floor(at_s / period_s) + 1) * period_s if at_s > -inf else -inf


def run_time_deadline_s(job: Job) -> float | None:
    """Return when the job reaches its maximum run time, or None if it has none or has not started."""
    limit_s, started_s = job.spec.run_time_s_max, job.account.first_started_at_s
    return None if limit_s is None or started_s is None else started_s + limit_s


def list_wanted_shapes(snapshot: Snapshot, missing: Iterable[WantedShape]) -> tuple[WantedShape, ...]:
    """Return the unsolved shapes in the order in which the solver should solve them, without duplicates.

    First come the minimums of jobs that cannot be queued without them, then `missing`, then the next
    curves of jobs, then the canonical shapes of all other jobs.
    """
    minimums, renewed, canonical = _minimum_shapes(snapshot), _next_curve_shapes(snapshot), _range_shapes(snapshot)
    found = dict.fromkeys((*minimums, *missing, *renewed, *canonical))
    return tuple(wanted for wanted in found if not _is_solved(snapshot, wanted))


def _minimum_shapes(snapshot: Snapshot) -> Iterator[WantedShape]:
    sizes = node_sizes(snapshot)
    for job in snapshot.index.sort_by_submission(snapshot.index.unsettled & snapshot.index.profiled):
        if job.state in (JobState.SUBMITTED, JobState.PLANNING):
            for gpu in sorted(sizes):
                if job.spec.gpu in ("", gpu):
                    yield WantedShape(job.curve_key, packed(gpu, job.spec.min_gpus, sizes[gpu]))


def _next_curve_shapes(snapshot: Snapshot) -> Iterator[WantedShape]:
    index = snapshot.index
    for job in index.sort_by_submission(index.needs_new_plan):
        if not job.is_curve_current:
            yield from (WantedShape(job.next_curve_key, shape) for shape in shapes_to_solve(snapshot, job))


def _range_shapes(snapshot: Snapshot) -> Iterator[WantedShape]:
    sizes = node_sizes(snapshot)
    ranges = {
        (job.curve_key, gpu, job.spec.min_gpus, job.spec.max_gpus)
        for job in map(snapshot.jobs.__getitem__, snapshot.index.profiled)
        for gpu in sizes
        if job.spec.gpu in ("", gpu)
    }
    for curve_key, gpu, min_gpus, max_gpus in sorted(ranges):
        for count in canonical_gpu_counts(min_gpus, max_gpus, sizes[gpu]):
            yield WantedShape(curve_key, packed(gpu, count, sizes[gpu]))


def _is_solved(snapshot: Snapshot, wanted: WantedShape) -> bool:
    curve = snapshot.curves.get(wanted.curve_key)
    return curve is not None and curve.is_solved(wanted.shape)
