"""Draft: a snapshot being changed decision by decision, with the free GPUs kept beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.domain.room import Room
from scheduler.domain.snapshot import Snapshot

Holders = dict[str, dict[int, str]]


def holders(jobs: Iterable[Job]) -> Holders:
    """Who holds which GPU: node -> index -> job id. Releasing GPUs count as held."""
    held: Holders = {}
    for job in jobs:
        for part in (job.allocation.target, job.allocation.releasing):
            for node, indices in part.items():
                by_index = held.setdefault(node, {})
                for index in indices:
                    by_index[index] = job.id
    return held


class Draft:
    """Mutable on purpose, and never seen outside one call of the core: copying 4,000 jobs a decision is what made
    an earlier prototype slow. `view()` is the draft as a snapshot: it shares the draft's dictionaries, so it changes
    with the draft and must not outlive it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.base = snapshot
        self.jobs: dict[str, Job] = dict(snapshot.jobs)
        self.loans: dict[str, Loan] = dict(snapshot.loans)
        self._view = replace(snapshot, jobs=self.jobs, loans=self.loans)
        self._holders = holders(snapshot.jobs.values())
        self._rooms: dict[str, Room] = {}
        self.usable_gpus = 0
        self._refresh(snapshot.nodes)

    @property
    def now_s(self) -> float:
        return self.base.now_s

    @property
    def next_generation(self) -> int:
        return self.base.generation + 1

    @property
    def rooms(self) -> Collection[Room]:
        """What is free on the nodes on which training may put something new."""
        return self._rooms.values()

    def view(self) -> Snapshot:
        return self._view

    def holder(self, node: str, index: int) -> str | None:
        return self._holders.get(node, {}).get(index)

    def users(self, node: str) -> frozenset[str]:
        """Jobs that hold GPUs of the node, leaving ones included."""
        return frozenset(self._holders.get(node, {}).values())

    def put_job(self, job: Job) -> None:
        """Replace a job and bring the free GPUs up to date."""
        before = self.jobs[job.id].allocation
        self.jobs[job.id] = job
        if job.allocation is before:
            return
        touched = {*before.target, *before.releasing, *job.allocation.target, *job.allocation.releasing}
        self._drop(job.id, before.held)
        for node, indices in job.allocation.held.items():
            self._holders.setdefault(node, {}).update(dict.fromkeys(indices, job.id))
        self._refresh(touched)

    def put_loan(self, loan: Loan) -> None:
        """Replace a loan: its node may begin or cease to serve training."""
        self.loans[loan.node] = loan
        self._refresh((loan.node,))

    def _drop(self, job_id: str, gpus: Gpus) -> None:
        for node, indices in gpus.items():
            by_index = self._holders.get(node, {})
            for index in indices:
                if by_index.get(index) == job_id:
                    del by_index[index]

    def _refresh(self, names: Iterable[str]) -> None:
        view = self._view
        for name in names:
            if name in self._rooms:
                self.usable_gpus -= len(self._rooms.pop(name).free)
            node = self.base.nodes.get(name)
            if node is None or not view.serves_training(node):
                continue
            held = self._holders.get(name, {})
            free = tuple(index for index in range(node.gpus) if index not in held) if held else tuple(range(node.gpus))
            if free:
                self._rooms[name] = Room(name, node.gpu, view.is_lent(node), free)
                self.usable_gpus += len(free)
