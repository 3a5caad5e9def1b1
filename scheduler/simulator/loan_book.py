"""LoanBook: loans, recalls and shortages of a simulation, from the states around each tick."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.simulator.report import ShortRatio, ratio
from scheduler.simulator.series import StepLine
from scheduler.simulator.traces import DemandChange

_ROUNDING_S = 1e-6


class _PoolBook:
    """One pool's demand interval that is under way, and the GPUs that cannot serve it."""

    def __init__(self, pool: Pool, capacity_gpus: int) -> None:
        self.capacity_gpus = capacity_gpus
        self.cold_start_s = pool.lending.cold_start_s
        self.lent_gpus = 0
        self.cold: list[tuple[float, int]] = []
        self.demand: DemandChange | None = None
        self.short = False
        self.intervals = {True: 0, False: 0}
        self.short_intervals = {True: 0, False: 0}

    def check(self, now_s: float) -> None:
        """Note whether inference has too few GPUs just now. Demand above the capacity is not the loans' fault."""
        self.cold = [(until_s, gpus) for until_s, gpus in self.cold if until_s > now_s]
        serving = self.capacity_gpus - self.lent_gpus - sum(gpus for _, gpus in self.cold)
        if self.demand is not None and serving < min(self.demand.gpus, self.capacity_gpus):
            self.short = True

    def close_interval(self, now_s: float) -> None:
        if self.demand is not None and now_s > self.demand.at_s:
            self.intervals[self.demand.first_pass] += 1
            self.short_intervals[self.demand.first_pass] += self.short
        self.short = False


class LoanBook:
    """Counts as it goes: `loans`, `recalls`, `recalls_late`, `loaned_gpu_s`; `lent_line` is how many nodes were out."""

    def __init__(self, pools: Iterable[Pool], nodes: Iterable[Node]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._pools = {
            pool.name: _PoolBook(pool, sum(node.gpus for node in self._nodes.values() if node.pool == pool.name))
            for pool in pools
            if pool.kind is PoolKind.INFERENCE
        }
        self.loans = 0
        self.recalls = 0
        self.recalls_late = 0
        self.loaned_gpu_s = 0.0
        self.lent_line = StepLine()

    def demand_changed(self, change: DemandChange) -> None:
        book = self._pools[change.pool]
        book.close_interval(change.at_s)
        book.demand = change
        book.check(change.at_s)

    def ticked(self, before: Snapshot, after: Snapshot) -> None:
        if before.loans is after.loans or before.loans == after.loans:
            return
        now_s = after.now_s
        self.lent_line.step(now_s, len(after.loans))
        for name, loan in before.loans.items():
            if name not in after.loans or after.loans[name].id != loan.id:
                self._ended(loan, now_s)
        for name, loan in after.loans.items():
            earlier = before.loans.get(name)
            if earlier is loan:
                continue
            if earlier is None or earlier.id != loan.id:
                self.loans += 1
                self._pools[loan.pool].lent_gpus += self._nodes[name].gpus
            recalled_before = earlier is not None and earlier.state is LoanState.RECALLED
            self.recalls += loan.state is LoanState.RECALLED and not recalled_before
        for book in self._pools.values():
            book.check(now_s)

    def finish(self, last: Snapshot) -> None:
        """Close what is still open at the end of the simulation."""
        for loan in last.loans.values():
            self.loaned_gpu_s += (last.now_s - loan.offered_at_s) * self._nodes[loan.node].gpus
        for book in self._pools.values():
            book.close_interval(last.now_s)

    def short_ratio(self) -> ShortRatio:
        books = self._pools.values()
        short = {first: sum(book.short_intervals[first] for book in books) for first in (True, False)}
        counted = {first: sum(book.intervals[first] for book in books) for first in (True, False)}
        return ShortRatio(ratio(short[True], counted[True]), ratio(sum(short.values()), sum(counted.values())))

    def _ended(self, loan: Loan, now_s: float) -> None:
        gpus, book = self._nodes[loan.node].gpus, self._pools[loan.pool]
        book.lent_gpus -= gpus
        self.loaned_gpu_s += (now_s - loan.offered_at_s) * gpus
        if loan.state is not LoanState.OFFERED:
            book.cold.append((now_s + book.cold_start_s, gpus))
        self.recalls_late += loan.return_by_s is not None and now_s > loan.return_by_s + _ROUNDING_S
