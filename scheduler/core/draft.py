"""Draft: a snapshot being changed decision by decision, with its ledger kept beside it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from scheduler.domain.job import Job
from scheduler.domain.ledger import Ledger
from scheduler.domain.loan import Loan
from scheduler.domain.room import Room
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.quota import QuotaBook


class Draft:
    """Mutable on purpose, and never seen outside one call of the core: copying 4,000 jobs a decision is what made
    an earlier prototype slow. `view()` is the draft as a snapshot: it shares the draft's dictionaries, so it changes
    with the draft and must not outlive it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.base = snapshot
        self.jobs: dict[str, Job] = dict(snapshot.jobs)
        self.loans: dict[str, Loan] = dict(snapshot.loans)
        self.ended_loans: list[Loan] = []
        self.ledger: Ledger = snapshot.ledger.copy()
        self.ledger.jobs, self.ledger.loans = self.jobs, self.loans
        self._quotas: QuotaBook | None = None
        self._view = replace(snapshot, jobs=self.jobs, loans=self.loans, memo=self.ledger)

    @property
    def now_s(self) -> float:
        return self.base.now_s

    @property
    def next_generation(self) -> int:
        return self.base.generation + 1

    @property
    def rooms(self) -> Collection[Room]:
        """What is free on the nodes on which training may put something new."""
        return self.ledger.rooms.values()

    @property
    def usable_gpus(self) -> int:
        """How many GPUs are free on those nodes."""
        return self.ledger.usable_gpus

    def view(self) -> Snapshot:
        return self._view

    def holder(self, node: str, index: int) -> str | None:
        return self.ledger.holders.get(node, {}).get(index)

    def users(self, node: str) -> frozenset[str]:
        """Jobs that hold GPUs of the node, leaving ones included."""
        return frozenset(self.ledger.holders.get(node, {}).values())

    @property
    def quotas(self) -> QuotaBook:
        """What each queue and each user holds; worked out at the first question, then kept."""
        if self._quotas is None:
            self._quotas = QuotaBook(self._view)
        return self._quotas

    def put_job(self, job: Job) -> None:
        """Replace a job and bring the ledger up to date."""
        before = self.jobs[job.id]
        self.jobs[job.id] = job
        self.ledger.put_job(job.id, before)
        if self._quotas is not None:
            self._quotas.take(job, job.allocation.target_gpus - before.allocation.target_gpus)

    def put_loan(self, loan: Loan) -> None:
        """Replace a loan, or add it. One that has just ended, of a node that is lent anew, goes to `ended_loans`."""
        before = self.loans.get(loan.node)
        if before is not None and not before.is_live:
            self.ended_loans.append(before)
        self.loans[loan.node] = loan
        self.ledger.put_loan(loan.node, before)
