"""Course: the state of one `decide` between its stages."""

from __future__ import annotations

from scheduler.core.apply import take
from scheduler.core.draft import Draft
from scheduler.core.legal import illegal
from scheduler.core.wanted import wanted_shapes
from scheduler.domain.decision import Decision
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.loan import LoanState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.reason import Reason
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult, WantedShape
from scheduler.policies.policy_set import PolicySet


class Course:
    """Decisions so far, the draft they made, why others wait, and the shapes that policies missed."""

    def __init__(self, snapshot: Snapshot, policies: PolicySet) -> None:
        self.policies = policies
        self.settings = policies.settings
        self.draft = Draft(snapshot)
        self.decisions: list[Decision] = []
        self.waiting: dict[str, Reason] = {}
        self.wanted: dict[WantedShape, None] = {}
        self.touched: set[str] = set()
        self.reserved_gpus = 0
        self.waiting_for_gpus = False
        due_s = snapshot.full_pass_at_s + self.settings.full_pass_period_s
        self.full_pass = snapshot.now_s >= due_s
        self.next_full_pass_s = snapshot.now_s + self.settings.full_pass_period_s if self.full_pass else due_s

    @property
    def now_s(self) -> float:
        return self.draft.now_s

    @property
    def view(self) -> Snapshot:
        return self.draft.view()

    def take(self, decision: Decision) -> None:
        """Record a decision and apply it, so that the next stage sees it.

        A decision that breaks a law is a bug of a policy: it is still reported as decided, so that the tick
        drops it under its name, but it is not applied here.
        """
        self.decisions.append(decision)
        if illegal(self.draft, decision) is None:
            take(self.draft, decision)

    def plan_for(self, job: Job, gpus: Gpus) -> ParallelPlan | None:
        """The curve's plan for exact GPUs; a shape that is not solved yet is wanted."""
        shape = self.draft.base.shape_of(gpus)
        curve = self.draft.base.curve(job)
        if not curve.is_solved(shape):
            self.wanted[WantedShape(job.spec.curve_key, shape)] = None
        return curve.plan(shape)

    def leave_by_s(self, gpus: Gpus) -> float:
        """The time by which workers on `gpus` must have left: the earliest return deadline among their nodes,
        else the usual grace."""
        deadlines = [self.now_s + self.settings.leave_grace_s]
        recalled = [loan for node in gpus if (loan := self.draft.loans.get(node)) and loan.return_by_s is not None]
        if recalled:
            deadlines = [loan.return_by_s for loan in recalled if loan.return_by_s is not None]
        return max(self.now_s, min(deadlines))

    def releasing_gpus(self) -> int:
        """GPUs that jobs are giving up on nodes that training may go on using: they are free soon."""
        view = self.view
        return sum(
            len(indices)
            for job in view.jobs.values()
            for name, indices in job.allocation.releasing.items()
            if name in view.nodes and view.serves_training(view.nodes[name])
        )

    def result(self) -> TickResult:
        return TickResult(
            decisions=tuple(self.decisions),
            waiting=self.waiting,
            wanted_shapes=wanted_shapes(self.view, self.wanted),
            next_wake_s=min([self.next_full_pass_s, *self._deadlines()]),
            full_pass=self.full_pass,
        )

    def _deadlines(self) -> list[float]:
        leaving = [j.allocation.leave_by_s for j in self.draft.jobs.values() if j.allocation.releasing]
        recalls = [loan.return_by_s for loan in self.draft.loans.values() if loan.state is LoanState.RECALLED]
        return [at_s for at_s in (*leaving, *recalls) if at_s is not None and at_s > self.now_s]
