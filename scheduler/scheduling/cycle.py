"""Course: the state of one `decide` between its stages.

Which points of the scaling curves are missing, in the order in which they are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import floor, inf

from scheduler.domain.decisions import Decision, Reason, ResizeJob
from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.gpu_sets import FreeGpus, Gpus, GpuShape, canonical_gpu_counts
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult, WantedShape
from scheduler.scheduling.desired_state import apply_decision
from scheduler.scheduling.job_progress import shapes_to_solve
from scheduler.scheduling.legality import find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policies.policy_set import PolicySet
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.policies.speed import node_sizes, packed
from scheduler.scheduling.rank_placement import place_ranks


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """What kind of GPUs is kept for waiting jobs: of one model, and perhaps on nodes that training owns alone."""

    gpu: str
    owned_only: bool


class SchedulingCycle:
    """Decisions so far, the draft they made, why others wait, and the shapes that policies missed."""

    def __init__(self, snapshot: Snapshot, policies: PolicySet) -> None:
        self.policies = policies
        self.settings = policies.settings
        self.snapshot = MutableSnapshot(snapshot)
        self.node_sizes = snapshot.typical_node_sizes
        self.decisions: list[Decision] = []
        self.waiting: dict[str, Reason] = {}
        self.missing_shapes: dict[WantedShape, None] = {}
        self.changed_jobs: set[str] = set()
        self.pending_starts: dict[str, tuple[ResourceKind, int]] = {}
        self.pending_moves: dict[str, tuple[ResourceKind, int]] = {}
        self.quota_reductions: dict[str, tuple[int, Reason]] = {}
        self.quota: QuotaState | None = None
        self.reserved_nodes: frozenset[str] = frozenset()
        self._reserved_for: frozenset[str] = frozenset()
        self.waiting_for_gpus = False
        self.recheck_at_s = inf
        due_s = next_full_pass_s(snapshot.full_pass_at_s, self.settings.full_pass_period_s)
        self.full_pass = snapshot.now_s >= due_s
        after_s = snapshot.now_s if self.full_pass else snapshot.full_pass_at_s
        self.next_full_pass_s = next_full_pass_s(after_s, self.settings.full_pass_period_s)

    @property
    def now_s(self) -> float:
        return self.snapshot.now_s

    def offer_deadline_s(self, loan: Loan) -> float:
        """By when inference has to have left a node that was offered."""
        return loan.offered_at_s + self.snapshot.original.pools[loan.pool].lending.return_deadline_s

    @property
    def view(self) -> Snapshot:
        return self.snapshot.view()

    @property
    def gpus_to_free(self) -> Mapping[ResourceKind, int]:
        """GPUs that running jobs have to give up for waiting ones, and for those on nodes to be left, by kind."""
        reserved = Counter[ResourceKind]()
        for claim, missing in (*self.pending_moves.values(), *self.pending_starts.values()):
            reserved[claim] += missing
        return reserved

    @property
    def unreserved_gpus(self) -> int:
        """GPUs that are free and kept for nobody."""
        return self.snapshot.usable_gpus - sum(len(room.indices) for room in self.reserved_rooms)

    @property
    def reserved_rooms(self) -> list[FreeGpus]:
        rooms = self.snapshot.ledger.free_by_node
        return [rooms[name] for name in sorted(self.reserved_nodes) if name in rooms]

    def reserve_nodes(self, nodes: Iterable[str], job_ids: frozenset[str]) -> None:
        """From now on nobody but these jobs is put onto these nodes."""
        self.reserved_nodes, self._reserved_for = frozenset(nodes), job_ids

    def is_excluded(self, job: Job) -> bool:
        """Some nodes are kept for others."""
        return bool(self.reserved_nodes) and job.id not in self._reserved_for

    def rooms_for(self, job: Job) -> Collection[FreeGpus]:
        """What is free on the nodes onto which the job may be put."""
        if not self.is_excluded(job):
            return self.snapshot.rooms
        return [room for room in self.snapshot.rooms if room.node not in self.reserved_nodes]

    def apply(self, decision: Decision) -> None:
        """Record a decision and apply it, so that the next stage sees it. A resize is completed by the order of ranks.

        A decision that breaks a law is a bug of a policy: it is still reported as decided, so that the tick
        drops it under its name, but it is not applied here.
        """
        if find_violation(self.snapshot, decision) is None:
            decision = place_ranks(self.snapshot, decision) if isinstance(decision, ResizeJob) else decision
            apply_decision(self.snapshot, decision)
        self.decisions.append(decision)

    def plan_for(self, job: Job, gpus: Gpus) -> ParallelPlan | None:
        """The curve's plan for exact GPUs; a shape that is not solved yet is wanted."""
        return self.plan_on(job, self.snapshot.original.shape_of(gpus))

    def plan_on(self, job: Job, shape: GpuShape, *, request_missing: bool = True) -> ParallelPlan | None:
        """As `plan_for`, for GPUs of a shape; one that is not solved is wanted only where `asks`."""
        curve = self.snapshot.original.curve(job)
        if request_missing and not curve.is_solved(shape):
            self.missing_shapes[WantedShape(job.curve_key, shape)] = None
        return curve.plan_for(shape)

    def leave_by_s(self, job: Job) -> float:
        """The time by which the job's present workers must have left: the earliest return deadline among the nodes
        that it holds, else the usual grace; that is never less than a step and a reconfiguration take, because nobody
        may lose work where nothing presses.

        A job that is leaving already gets no more time than it had, because its old workers may sit on a node that
        goes home earlier. On a lent node the grace ends before any recall that is still to come could fall due.
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

    def build_result(self) -> TickResult:
        return TickResult(
            decisions=tuple(self.decisions),
            waiting=self.waiting,
            wanted_shapes=list_wanted_shapes(self.view, self.missing_shapes),
            next_wake_s=min([self.next_full_pass_s, *self._list_deadlines(), *self._list_rechecks()]),
            full_pass=self.full_pass,
        )

    def _list_rechecks(self) -> list[float]:
        return [self.recheck_at_s] if self.recheck_at_s > self.now_s else []

    def _list_deadlines(self) -> list[float]:
        ledger, jobs = self.snapshot.ledger, self.snapshot.jobs
        leaving = [jobs[job_id].allocation.leave_by_s for job_id in ledger.releasing]
        recalls = [self.snapshot.loans[node].return_by_s for node in ledger.recalled]
        offers = [self.offer_deadline_s(self.snapshot.loans[node]) for node in ledger.offered]
        limits = [run_time_deadline_s(jobs[job_id]) for job_id in ledger.time_limited]
        retries = [jobs[job_id].memory.retry_at_s for job_id in ledger.unsettled]
        times_s = (*leaving, *recalls, *offers, *limits, *retries)
        return [at_s for at_s in times_s if at_s is not None and at_s > self.now_s]


def next_full_pass_s(at_s: float, period_s: float) -> float:
    """The next multiple of the period after `at_s`: demand is told at such times too, and one tick then does for both.
    At once where there was none yet."""
    return (floor(at_s / period_s) + 1) * period_s if at_s > -inf else -inf


def run_time_deadline_s(job: Job) -> float | None:
    """When the job will have run for as long as its owner allows; None where that is not limited or not known."""
    limit_s, started_s = job.spec.run_time_s_max, job.account.first_started_at_s
    return None if limit_s is None or started_s is None else started_s + limit_s


def list_wanted_shapes(snapshot: Snapshot, missing: Iterable[WantedShape]) -> tuple[WantedShape, ...]:
    """Unsolved shapes, each once: minimums of jobs that cannot queue without them, shapes that this tick looked
    for in vain, those of curves that count on newly frozen layers, then the rest of every job's canonical shapes."""
    found = dict.fromkeys(
        (*_minimum_shapes(snapshot), *missing, *_frozen_layer_shapes(snapshot), *_canonical_shapes_of_ranges(snapshot))
    )
    return tuple(wanted for wanted in found if not _is_solved(snapshot, wanted))


def _minimum_shapes(snapshot: Snapshot) -> Iterator[WantedShape]:
    sizes = node_sizes(snapshot)
    for job in snapshot.index.sort_by_submission(snapshot.index.unsettled & snapshot.index.profiled):
        if job.state in (JobState.SUBMITTED, JobState.PLANNING):
            for gpu in sorted(sizes):
                if job.spec.gpu in ("", gpu):
                    yield WantedShape(job.curve_key, packed(gpu, job.spec.min_gpus, sizes[gpu]))


def _frozen_layer_shapes(snapshot: Snapshot) -> Iterator[WantedShape]:
    ledger = snapshot.index
    for job in ledger.sort_by_submission(ledger.needs_frozen_replan):
        if not job.freezing.is_curve_current:
            yield from (WantedShape(job.next_curve_key, shape) for shape in shapes_to_solve(snapshot, job))


def _canonical_shapes_of_ranges(snapshot: Snapshot) -> Iterator[WantedShape]:
    sizes = node_sizes(snapshot)
    ranges = {
        (job.curve_key, gpu, job.spec.min_gpus, job.spec.max_gpus)
        for job in map(snapshot.jobs.__getitem__, snapshot.index.profiled)
        for gpu in sizes
        if job.spec.gpu in ("", gpu)
    }
    for curve_key, gpu, least, most in sorted(ranges):
        for count in canonical_gpu_counts(least, most, sizes[gpu]):
            yield WantedShape(curve_key, packed(gpu, count, sizes[gpu]))


def _is_solved(snapshot: Snapshot, wanted: WantedShape) -> bool:
    curve = snapshot.curves.get(wanted.curve_key)
    return curve is not None and curve.is_solved(wanted.shape)
