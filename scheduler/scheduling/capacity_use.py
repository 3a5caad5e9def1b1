"""Use of nodes and of the GPUs of each pool at a snapshot, and of the pools integrated since the previous one.

A snapshot holds until the next commit. So a commit integrates its predecessor from that one's time to its own, in the
same transaction, and no second counts twice or is lost, whichever process fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Literal

from scheduler.domain.capacity_history import BIN_S, CapacityBin, PoolUse, build_bins
from scheduler.domain.fleet import Loan, LoanState, Node, NodeState, PoolKind
from scheduler.domain.job import Intent
from scheduler.domain.snapshot import Snapshot

UNOBSERVED_AFTER_S = 900.0
"""A controller commits at least at each full pass. After a longer gap it did not run, so the use is not known."""


def integrate_capacity(previous: Snapshot, now_s: float) -> tuple[CapacityBin, ...]:
    """Return the narrowest bins of all pools from the time of `previous` to `now_s`.

    They are empty if the clock was set back, or if the controller did not run for `UNOBSERVED_AFTER_S`.
    """
    from_s = previous.now_s
    if not 0 < now_s - from_s <= UNOBSERVED_AFTER_S:
        return ()
    uses = classify_capacity(previous)
    return tuple(each for pool, use in uses.items() for each in build_bins(pool, use, from_s=from_s, to_s=now_s))


def count_loan_changes(previous: Snapshot, snapshot: Snapshot, ended: Iterable[Loan]) -> tuple[CapacityBin, ...]:
    """Return bins that count the loans which began, were recalled or ended since `previous`, without any use.

    Args:
        ended: loans that are no longer in `snapshot`.
    """
    now_s, before = snapshot.now_s, previous.loans
    at_s = int(now_s // BIN_S) * BIN_S
    changed = [loan for node, loan in snapshot.loans.items() if loan is not before.get(node)]
    bins = []
    for loan in (*changed, *ended):
        known = before.get(loan.node)
        was = known if known is not None and known.id == loan.id else None
        is_return = loan.state is LoanState.RETURNED and loan.lent_at_s is not None
        counts = {
            "lends": loan.lent_at_s is not None and (was is None or was.lent_at_s is None),
            "recalls": loan.recalled_at_s is not None and (was is None or was.recalled_at_s is None),
            "returns": is_return,
            "late_returns": is_return and was is not None and was.return_by_s is not None and now_s > was.return_by_s,
        }
        if any(counts.values()):
            numbers = {name: int(is_counted) for name, is_counted in counts.items()}
            bins.append(CapacityBin(pool=loan.pool, step_s=BIN_S, at_s=at_s, **numbers))
    return tuple(bins)


def classify_capacity(snapshot: Snapshot) -> Mapping[str, PoolUse]:
    """Return the use of the GPUs of every pool, by name."""
    waiting, holders, loans = _PendingDemand(snapshot), snapshot.index.holders, snapshot.loans
    counts = {name: _PoolCounts(is_owned=pool.kind is PoolKind.TRAINING) for name, pool in snapshot.pools.items()}
    wanted = {gpu: waiting.wants(gpu) for gpu in {node.gpu for node in snapshot.nodes.values()}}
    for name, node in snapshot.nodes.items():
        loan, held = loans.get(name), holders.get(name)
        lent = loan.count_gpus(node) if loan is not None and loan.is_lent else 0
        counts[node.pool].add(node, len(held) if held else 0, lent, wanted[node.gpu])
    return {pool: _build_use(snapshot, pool, counted, waiting) for pool, counted in counts.items()}


class _PendingDemand:
    """Pending jobs that should run, and the sum of their minima, by required GPU model; empty for any model."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._by_model: dict[str, tuple[int, int]] = {}
        for job in map(snapshot.jobs.__getitem__, snapshot.index.waiting):
            if job.intent is Intent.RUN:
                jobs, gpus = self._by_model.get(job.spec.gpu, (0, 0))
                self._by_model[job.spec.gpu] = jobs + 1, gpus + job.spec.min_gpus

    def wants(self, gpu: str) -> bool:
        return gpu in self._by_model or "" in self._by_model

    def count(self, models: Set[str]) -> tuple[int, int]:
        found = [self._by_model[gpu] for gpu in ("", *models) if gpu in self._by_model]
        return sum(jobs for jobs, _ in found), sum(gpus for _, gpus in found)


class _PoolCounts:
    """Counts of one pool. Plain attributes are much faster to add to than immutable objects."""

    __slots__ = ("down", "free", "free_waited", "inference", "is_owned", "lent_idle", "lent_idle_waited",
                 "lent_nodes", "lent_used", "models", "other", "used")  # fmt: skip

    def __init__(self, *, is_owned: bool) -> None:
        self.is_owned = is_owned
        self.models = set[str]()
        self.inference = self.used = self.lent_used = self.lent_idle = self.free = self.other = self.down = 0
        self.lent_idle_waited = self.free_waited = self.lent_nodes = 0

    def add(self, node: Node, held: int, lent: int, is_wanted: bool) -> None:
        """Count the GPUs of a node, of which jobs hold `held` and `lent` are on loan.

        Inference uses GPUs that are not lent first. `is_wanted`: a pending job accepts the node's GPU model.
        """
        self.models.add(node.gpu)
        self.lent_nodes += lent > 0
        if node.state is NodeState.DOWN:
            self.down += node.gpus
            return
        held = min(held, node.gpus)
        unused = node.gpus - held
        inference = min(node.inference_gpus, unused)
        other = min(node.other_gpus, unused - inference)
        unused -= inference + other
        self.inference += inference
        self.other += other
        if self.is_owned:
            self.used += held
        else:
            self.lent_used += held
        if node.cordoned:
            self.down += unused
        elif lent:
            idle = min(unused, max(0, lent - held))
            self.lent_idle += idle
            self.lent_idle_waited += idle if is_wanted else 0
            self.free += unused - idle
        else:
            self.free += unused
            self.free_waited += unused if is_wanted else 0


def _build_use(snapshot: Snapshot, pool: str, counts: _PoolCounts, waiting: _PendingDemand) -> PoolUse:
    reading, lent_gpus = snapshot.demand.get(pool), snapshot.index.lent_gpus.get(pool, 0)
    is_short = reading is not None and lent_gpus > 0 and reading.gpus > snapshot.capacity(pool) - lent_gpus
    pending_jobs, pending_gpus = waiting.count(counts.models)
    return PoolUse(
        inference=counts.inference,
        used=counts.used,
        lent_used=counts.lent_used,
        lent_idle=counts.lent_idle,
        free=counts.free,
        other=counts.other,
        down=counts.down,
        lent_idle_waited=counts.lent_idle_waited,
        free_waited=counts.free_waited,
        lent_nodes=counts.lent_nodes,
        demand_gpus=None if reading is None else reading.asked_gpus,
        is_short=is_short,
        pending_jobs=pending_jobs,
        pending_gpus=pending_gpus,
    )


NodeUse = Literal["training", "inference", "idle", "offered", "lent", "recalled", "cordoned", "down"]
_USE_BY_LOAN_STATE: Mapping[LoanState, NodeUse] = {
    LoanState.OFFERED: "offered",
    LoanState.ACTIVE: "lent",
    LoanState.RECALLED: "recalled",
}


def find_node_use(node: Node, snapshot: Snapshot, held: int) -> NodeUse:
    """Return the use of a node of which jobs hold `held` GPUs. A loan in effect takes precedence over a cordon."""
    loan = snapshot.loans.get(node.name)
    if node.state is NodeState.DOWN:
        return "down"
    if loan is not None and loan.is_in_effect:
        return _USE_BY_LOAN_STATE[loan.state]
    if node.cordoned:
        return "cordoned"
    if held:
        return "training"
    return "inference" if node.inference_gpus else "idle"
