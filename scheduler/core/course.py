"""Course: the state of one `decide` between its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import floor, inf

from scheduler.core.apply import take
from scheduler.core.draft import Draft
from scheduler.core.legal import illegal
from scheduler.core.seating import seated
from scheduler.core.wanted import wanted_shapes
from scheduler.domain.decision import Decision, ResizeJob
from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.reason import Reason
from scheduler.domain.room import Room
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult, WantedShape
from scheduler.policies.policy_set import PolicySet
from scheduler.policies.quota import QuotaBook


@dataclass(frozen=True, slots=True)
class Claim:
    """What kind of GPUs is kept for waiting jobs: of one model, and perhaps on nodes that training owns alone."""

    gpu: str
    owned_only: bool


class Course:
    """Decisions so far, the draft they made, why others wait, and the shapes that policies missed."""

    def __init__(self, snapshot: Snapshot, policies: PolicySet) -> None:
        self.policies = policies
        self.settings = policies.settings
        self.draft = Draft(snapshot)
        self.node_sizes = snapshot.node_sizes
        self.decisions: list[Decision] = []
        self.waiting: dict[str, Reason] = {}
        self.wanted: dict[WantedShape, None] = {}
        self.touched: set[str] = set()
        self.promised: dict[str, tuple[Claim, int]] = {}
        self.evacuees: dict[str, tuple[Claim, int]] = {}
        self.giving_way: dict[str, tuple[int, Reason]] = {}
        self.book: QuotaBook | None = None
        self.kept_nodes: frozenset[str] = frozenset()
        self._kept_for: frozenset[str] = frozenset()
        self.waiting_for_gpus = False
        self.recheck_s = inf
        due_s = next_full_pass_s(snapshot.full_pass_at_s, self.settings.full_pass_period_s)
        self.full_pass = snapshot.now_s >= due_s
        after_s = snapshot.now_s if self.full_pass else snapshot.full_pass_at_s
        self.next_full_pass_s = next_full_pass_s(after_s, self.settings.full_pass_period_s)

    @property
    def now_s(self) -> float:
        return self.draft.now_s

    def offer_ends_s(self, loan: Loan) -> float:
        """By when inference has to have left a node that was offered."""
        return loan.offered_at_s + self.draft.base.pools[loan.pool].lending.return_deadline_s

    @property
    def view(self) -> Snapshot:
        return self.draft.view()

    @property
    def reserved(self) -> Mapping[Claim, int]:
        """GPUs that running jobs have to give up for waiting ones, and for those on nodes to be left, by kind."""
        reserved = Counter[Claim]()
        for claim, missing in (*self.evacuees.values(), *self.promised.values()):
            reserved[claim] += missing
        return reserved

    @property
    def usable_gpus(self) -> int:
        """GPUs that are free and kept for nobody."""
        return self.draft.usable_gpus - sum(len(room.free) for room in self.kept_rooms)

    @property
    def kept_rooms(self) -> list[Room]:
        rooms = self.draft.ledger.rooms
        return [rooms[name] for name in sorted(self.kept_nodes) if name in rooms]

    def keep(self, nodes: Iterable[str], job_ids: frozenset[str]) -> None:
        """From now on nobody but these jobs is put onto these nodes."""
        self.kept_nodes, self._kept_for = frozenset(nodes), job_ids

    def is_kept_from(self, job: Job) -> bool:
        """Some nodes are kept for others."""
        return bool(self.kept_nodes) and job.id not in self._kept_for

    def rooms_for(self, job: Job) -> Collection[Room]:
        """What is free on the nodes onto which the job may be put."""
        if not self.is_kept_from(job):
            return self.draft.rooms
        return [room for room in self.draft.rooms if room.node not in self.kept_nodes]

    def take(self, decision: Decision) -> None:
        """Record a decision and apply it, so that the next stage sees it. A resize is completed by the order of ranks.

        A decision that breaks a law is a bug of a policy: it is still reported as decided, so that the tick
        drops it under its name, but it is not applied here.
        """
        if illegal(self.draft, decision) is None:
            decision = seated(self.draft, decision) if isinstance(decision, ResizeJob) else decision
            take(self.draft, decision)
        self.decisions.append(decision)

    def plan_for(self, job: Job, gpus: Gpus) -> ParallelPlan | None:
        """The curve's plan for exact GPUs; a shape that is not solved yet is wanted."""
        return self.plan_on(job, self.draft.base.shape_of(gpus))

    def plan_on(self, job: Job, shape: GpuShape, *, asks: bool = True) -> ParallelPlan | None:
        """As `plan_for`, for GPUs of a shape; one that is not solved is wanted only where `asks`."""
        curve = self.draft.base.curve(job)
        if asks and not curve.is_solved(shape):
            self.wanted[WantedShape(job.curve_key, shape)] = None
        return curve.plan(shape)

    def leave_by_s(self, job: Job) -> float:
        """The time by which the job's present workers must have left: the earliest return deadline among the nodes
        that it holds, else the usual grace; that is never less than a step and a reconfiguration take, because nobody
        may lose work where nothing presses.

        A job that is leaving already gets no more time than it had, because its old workers may sit on a node that
        goes home earlier. On a lent node the grace ends before any recall that is still to come could fall due.
        """
        allocation, loans = job.allocation, self.draft.loans
        held = [loan for node in (*allocation.target, *allocation.releasing) if (loan := loans.get(node))]
        deadlines = [loan.return_by_s for loan in held if loan.return_by_s is not None]
        if not deadlines:
            pools = self.draft.base.pools
            graces = (pools[loan.pool].lending.return_deadline_s for loan in held if loan.state is LoanState.ACTIVE)
            deadlines = [self.now_s + min((self.settings.leave_grace_of(job), *graces))]
        if allocation.releasing and allocation.leave_by_s is not None:
            deadlines.append(allocation.leave_by_s)
        return max(self.now_s, min(deadlines))

    def result(self) -> TickResult:
        return TickResult(
            decisions=tuple(self.decisions),
            waiting=self.waiting,
            wanted_shapes=wanted_shapes(self.view, self.wanted),
            next_wake_s=min([self.next_full_pass_s, *self._deadlines(), *self._rechecks()]),
            full_pass=self.full_pass,
        )

    def _rechecks(self) -> list[float]:
        return [self.recheck_s] if self.recheck_s > self.now_s else []

    def _deadlines(self) -> list[float]:
        ledger, jobs = self.draft.ledger, self.draft.jobs
        leaving = [jobs[job_id].allocation.leave_by_s for job_id in ledger.releasing]
        recalls = [self.draft.loans[node].return_by_s for node in ledger.recalled]
        offers = [self.offer_ends_s(self.draft.loans[node]) for node in ledger.offered]
        limits = [run_time_ends_s(jobs[job_id]) for job_id in ledger.limited]
        retries = [jobs[job_id].memory.retry_at_s for job_id in ledger.unsettled]
        times_s = (*leaving, *recalls, *offers, *limits, *retries)
        return [at_s for at_s in times_s if at_s is not None and at_s > self.now_s]


def next_full_pass_s(at_s: float, period_s: float) -> float:
    """The next multiple of the period after `at_s`: demand is told at such times too, and one tick then does for both.
    At once where there was none yet."""
    return (floor(at_s / period_s) + 1) * period_s if at_s > -inf else -inf


def run_time_ends_s(job: Job) -> float | None:
    """When the job will have run for as long as its owner allows; None where that is not limited or not known."""
    limit_s, started_s = job.spec.run_time_s_max, job.account.first_started_at_s
    return None if limit_s is None or started_s is None else started_s + limit_s
