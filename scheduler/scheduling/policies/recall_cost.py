"""What it costs to empty nodes: each set's price, and the cheapest of all sets of a few nodes.

The cost of a set is no sum over its nodes: a job that one node's loss preempts gives its other nodes for nothing, a job
that shrinks pays once, and free GPUs elsewhere save only so many from being preempted. Lyra (EuroSys'23, section 4.2)
calls it a knapsack with dependent values; it is NP-hard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb, inf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AffectedJob:
    """A job on nodes that may be emptied: its GPUs there by node, and how many it holds in all.

    It can lose `spare` GPUs and run on. If it loses more, it needs free GPUs of its `kind` (None: it may have none), or
    is preempted, for `preempt_gpu_s`; any other change costs `restart_s` of the GPUs that it then has.
    """

    gpus_by_node: Mapping[int, int]
    held_gpus: int
    spare_gpus: int
    restart_s: float
    preempt_gpu_s: float
    kind: str | None = None

    def cost(self, lost: int, taken: int = 0) -> float:
        """GPU-seconds that losing some GPUs costs, and taking free ones for them."""
        if lost - taken > self.spare_gpus:
            return self.preempt_gpu_s
        return self.restart_s * (self.held_gpus - lost + taken) if lost else 0.0


class RecallCost:
    """`tenants`: in the order in which they look for room. `idle`: of each node, the kind and number of its free GPUs,
    which are no room once it leaves. `free`: the free GPUs by kind on nodes that stay in any case. `refills`: tenants
    take free GPUs for all that they lose, not only to keep their least number. `carried_gpu_s`: of each node, what it
    costs besides to carry off what its tenants hold on it alone."""

    def __init__(
        self,
        jobs: Sequence[AffectedJob],
        idle: Sequence[tuple[str, int]],
        free: Mapping[str, int],
        *,
        refills: bool = False,
        transfer_gpu_s: Sequence[float] = (),
    ) -> None:
        self.transfer_gpu_s = transfer_gpu_s or [0.0] * len(idle)
        self.has_transfers = any(self.transfer_gpu_s)
        self.jobs, self.nodes, self._refills = jobs, range(len(idle)), refills
        self._idle, self._free = idle, defaultdict[str, int](int, free)
        for kind, gpus in idle:
            self._free[kind] += gpus
        self.has_free_gpus = any(self._free.values())
        self._last: tuple[Set[int], Mapping[int, int]] | None = None
        self.jobs_on_node: list[list[tuple[int, int]]] = [[] for _ in idle]
        for number, tenant in enumerate(jobs):
            self._free[tenant.kind or ""] += 0
            for node, gpus in tenant.gpus_by_node.items():
                self.jobs_on_node[node].append((number, gpus))

    def compute(self, leaving: Iterable[int]) -> float:
        """GPU-seconds that are lost when exactly these nodes are emptied."""
        return self._outcome(leaving)[0]

    def count_losses(self, leaving: Iterable[int]) -> defaultdict[int, int]:
        """GPUs that each tenant loses."""
        lost: defaultdict[int, int] = defaultdict(int)
        for node in leaving:
            for number, gpus in self.jobs_on_node[node]:
                lost[number] += gpus
        return lost

    def transfer_cost(self, leaving: Iterable[int]) -> float:
        """What it costs to carry off what these nodes alone hold, without any other loss."""
        return sum([self.transfer_gpu_s[node] for node in leaving]) if self.has_transfers else 0.0

    def compute_for_job(self, job: AffectedJob, lost: int, free_gpu_price: float, *, minimal: bool = False) -> float:
        """What a tenant costs, if it pays `room_gpu_s` for each free GPU that it cannot do without. `bare`: it takes no
        others, which costs least."""
        over = lost - job.spare_gpus
        if free_gpu_price == inf or job.kind is None:
            return job.cost(lost)
        if free_gpu_price == 0.0 and not minimal:
            return job.cost(lost, self._wanted_gpus(lost, over))
        if over <= 0:
            return job.cost(lost)
        return min(job.preempt_gpu_s, job.cost(lost, over) + free_gpu_price * over)

    def price_free_gpu(self, leaving: Iterable[int]) -> float:
        """What the last free GPU saves if these nodes are emptied and room goes to whom it saves most; 0 where there
        is enough for everybody."""
        left, savings = self._free_without(leaving), list[tuple[float, int, str]]()
        for number, lost in self.count_losses(leaving).items():
            tenant = self.jobs[number]
            if tenant.kind is not None and (over := lost - tenant.spare_gpus) > 0:
                savings.append(((tenant.preempt_gpu_s - tenant.cost(lost, over)) / over, over, tenant.kind))
        for saved_gpu_s, over, kind in sorted(savings, reverse=True):
            left[kind] -= over
            if left[kind] < 0:
                return saved_gpu_s
        return 0.0

    def find_cheapest(self, nodes: Sequence[int], count: int, leaving: Set[int] = frozenset()) -> set[int]:
        """The `count` of `nodes` that cost least to empty while the others of `leaving` are emptied too: every set is
        priced. What tenants take that have nothing on `nodes` is what they take while `leaving` is emptied."""
        sets, column = _subsets(len(nodes), count), dict[int, int]()
        for number in sorted({number for node in nodes for number, _ in self.jobs_on_node[node]}):
            column[number] = len(column)
        here = np.zeros((len(nodes), len(column)))
        for at, node in enumerate(nodes):
            for number, gpus in self.jobs_on_node[node]:
                here[at, column[number]] = gpus
        outside = leaving - set(nodes)
        tenants = [self.jobs[number] for number in column]
        gone = [sum([gpus for node, gpus in tenant.gpus_by_node.items() if node in outside]) for tenant in tenants]
        rows = [(t.held_gpus, t.spare_gpus, t.restart_s, t.preempt_gpu_s) for t in tenants]
        held, spare, restart_s, preempt_gpu_s = np.array(rows, np.float64).reshape(-1, 4).T
        lost = sets @ here + np.array(gone, np.float64)
        costs = np.where(lost > spare, preempt_gpu_s, restart_s * np.where(lost > 0.0, held - lost, 0.0))
        if self.has_free_gpus:
            left = self._free_without(outside)
            for number, gpus in self._gpus_taken(leaving).items():
                left[self.jobs[number].kind or ""] -= 0 if number in column else gpus
            self._apply_moves(costs, lost, tenants, self._free_by_set(left, nodes, sets))
        totals = costs.sum(axis=1) + sets @ np.array([self.transfer_gpu_s[node] for node in nodes], np.float64)
        return {nodes[at] for at in np.flatnonzero(sets[totals.argmin()]).tolist()}

    def _outcome(self, leaving: Iterable[int]) -> tuple[float, Mapping[int, int]]:
        """The cost, and the free GPUs that each tenant takes."""
        left, cost, takes = self._free_without(leaving), self.transfer_cost(leaving), dict[int, int]()
        for number, lost in sorted(self.count_losses(leaving).items()):
            tenant, taken = self.jobs[number], 0
            if tenant.kind is not None and (over := lost - tenant.spare_gpus) <= left[tenant.kind]:
                takes[number] = taken = min(self._wanted_gpus(lost, over), left[tenant.kind])
                left[tenant.kind] -= taken
            cost += tenant.cost(lost, taken)
        return cost, takes

    def _wanted_gpus(self, lost: int, over: int) -> int:
        """Free GPUs that a tenant asks for which loses `over` more than it can spare."""
        return lost if self._refills else max(0, over)

    def _free_without(self, leaving: Iterable[int]) -> defaultdict[str, int]:
        left = self._free.copy()
        for node in leaving:
            kind, gpus = self._idle[node]
            left[kind] -= gpus
        return left

    def _gpus_taken(self, leaving: Set[int]) -> Mapping[int, int]:
        """As `_outcome` says, which is kept for the next window beside the same nodes."""
        if self._last is None or self._last[0] is not leaving:
            self._last = leaving, self._outcome(leaving)[1]
        return self._last[1]

    def _free_by_set(self, left: Mapping[str, int], nodes: Sequence[int], sets: Floats) -> dict[str, Floats]:
        """[sets] free GPUs by kind."""
        idle = {kind: [self._idle[node][1] * (self._idle[node][0] == kind) for node in nodes] for kind in left}
        return {kind: np.maximum(0.0, left[kind] - sets @ np.array(idle[kind], np.float64)) for kind in left}

    def _apply_moves(self, costs: Floats, lost: Floats, jobs: Sequence[AffectedJob], left: dict[str, Floats]) -> None:
        """Put right the `costs` [sets, tenants] of tenants that find free GPUs, each in its turn."""
        for at, (tenant, most) in enumerate(zip(jobs, lost.max(axis=0).tolist(), strict=True)):
            if tenant.kind is None or not (most > tenant.spare_gpus or (self._refills and most)):
                continue
            gone, room = lost[:, at], left[tenant.kind]
            over = gone - tenant.spare_gpus
            fits = (gone > 0.0) & (over <= room)
            taken = np.where(fits, np.minimum(gone if self._refills else np.maximum(over, 0.0), room), 0.0)
            costs[fits, at] = tenant.restart_s * (tenant.held_gpus - gone + taken)[fits]
            room -= taken


@lru_cache(maxsize=32)
def _subsets(size: int, count: int) -> Floats:
    """[subsets, size]: a row of ones and zeros for every choice of `count`."""
    chosen = np.array(list(combinations(range(size), count)), np.intp).reshape(comb(size, count), count)
    sets = np.zeros((len(chosen), size))
    sets[np.arange(len(chosen))[:, None], chosen] = 1.0
    return sets
