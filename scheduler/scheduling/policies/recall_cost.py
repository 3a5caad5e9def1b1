"""The cost of emptying nodes: the cost of any set of nodes, and the cheapest of all sets of a few nodes.

The cost of a set is no sum over its nodes: a job that is preempted by the loss of one node frees its other nodes too, a
job that shrinks pays once, and free GPUs elsewhere save only some jobs from preemption. Lyra (EuroSys'23, section 4.2)
describes it as a knapsack with dependent values; it is NP-hard.
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
    """A job on nodes that may be emptied: its GPUs there by node, and how many it holds in total.

    It can lose `spare_gpus` and continue. If it loses more, it needs free GPUs of its `kind` (None: it may have none),
    or is preempted for `preempt_gpu_s`. Any other change costs `restart_s` of the GPUs that it then has.
    """

    gpus_by_node: Mapping[int, int]
    held_gpus: int
    spare_gpus: int
    restart_s: float
    preempt_gpu_s: float
    kind: str | None = None

    def cost(self, lost: int, taken: int = 0) -> float:
        """Return the GPU-seconds lost if the job loses `lost` GPUs and takes `taken` free ones."""
        if lost - taken > self.spare_gpus:
            return self.preempt_gpu_s
        return self.restart_s * (self.held_gpus - lost + taken) if lost else 0.0


class RecallCost:
    """The cost of emptying sets of nodes, in GPU-seconds.

    Args:
        jobs: in the order in which they look for free GPUs.
        idle: kind and number of each node's free GPUs, which are not available once the node leaves.
        free: free GPUs by kind on nodes that stay in any case.
        refills: jobs take free GPUs for everything that they lose, not only to keep their minimum.
        transfer_gpu_s: by node, the additional cost of moving state that is only on it.
    """

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
        for number, job in enumerate(jobs):
            self._free[job.kind or ""] += 0
            for node, gpus in job.gpus_by_node.items():
                self.jobs_on_node[node].append((number, gpus))

    def compute(self, leaving: Iterable[int]) -> float:
        """Return the GPU-seconds lost if exactly these nodes are emptied."""
        return self._outcome(leaving)[0]

    def count_losses(self, leaving: Iterable[int]) -> defaultdict[int, int]:
        """Return the GPUs that each job loses."""
        lost: defaultdict[int, int] = defaultdict(int)
        for node in leaving:
            for number, gpus in self.jobs_on_node[node]:
                lost[number] += gpus
        return lost

    def transfer_cost(self, leaving: Iterable[int]) -> float:
        """Return the cost of moving state that is only on these nodes, without any other loss."""
        return sum([self.transfer_gpu_s[node] for node in leaving]) if self.has_transfers else 0.0

    def compute_for_job(self, job: AffectedJob, lost: int, free_gpu_price: float, *, minimal: bool = False) -> float:
        """Return the cost of a job that pays `free_gpu_price` for each free GPU that it needs.

        Args:
            minimal: the job takes no other free GPUs, which costs least.
        """
        over = lost - job.spare_gpus
        if free_gpu_price == inf or job.kind is None:
            return job.cost(lost)
        if free_gpu_price == 0.0 and not minimal:
            return job.cost(lost, self._wanted_gpus(lost, over))
        if over <= 0:
            return job.cost(lost)
        return min(job.preempt_gpu_s, job.cost(lost, over) + free_gpu_price * over)

    def price_free_gpu(self, leaving: Iterable[int]) -> float:
        """Return the saving of the last free GPU if these nodes are emptied, or 0 if there are enough GPUs.

        Free GPUs go where they save most.
        """
        left, savings = self._free_without(leaving), list[tuple[float, int, str]]()
        for number, lost in self.count_losses(leaving).items():
            job = self.jobs[number]
            if job.kind is not None and (over := lost - job.spare_gpus) > 0:
                savings.append(((job.preempt_gpu_s - job.cost(lost, over)) / over, over, job.kind))
        for saved_gpu_s, over, kind in sorted(savings, reverse=True):
            left[kind] -= over
            if left[kind] < 0:
                return saved_gpu_s
        return 0.0

    def find_cheapest(
        self, nodes: Sequence[int], need: int, leaving: Set[int] = frozenset(), sizes: Sequence[int] = ()
    ) -> set[int]:
        """Return those of `nodes` that cost least to empty while the others of `leaving` are emptied too.

        They are `need` nodes or, with `sizes`, nodes that free at least `need` GPUs. Every such set is priced. Jobs
        without GPUs on `nodes` take what they take while `leaving` is emptied.

        Args:
            sizes: GPUs that each of `nodes` frees.
        """
        sets = _list_covers(tuple(sizes), need) if sizes else _subsets(len(nodes), max(0, need))
        column = dict[int, int]()
        for number in sorted({number for node in nodes for number, _ in self.jobs_on_node[node]}):
            column[number] = len(column)
        here = np.zeros((len(nodes), len(column)))
        for at, node in enumerate(nodes):
            for number, gpus in self.jobs_on_node[node]:
                here[at, column[number]] = gpus
        outside = leaving - set(nodes)
        jobs = [self.jobs[number] for number in column]
        gone = [sum([gpus for node, gpus in job.gpus_by_node.items() if node in outside]) for job in jobs]
        rows = [(t.held_gpus, t.spare_gpus, t.restart_s, t.preempt_gpu_s) for t in jobs]
        held, spare, restart_s, preempt_gpu_s = np.array(rows, np.float64).reshape(-1, 4).T
        lost = sets @ here + np.array(gone, np.float64)
        costs = np.where(lost > spare, preempt_gpu_s, restart_s * np.where(lost > 0.0, held - lost, 0.0))
        if self.has_free_gpus:
            left = self._free_without(outside)
            for number, gpus in self._gpus_taken(leaving).items():
                left[self.jobs[number].kind or ""] -= 0 if number in column else gpus
            self._apply_moves(costs, lost, jobs, self._free_by_set(left, nodes, sets))
        totals = costs.sum(axis=1) + sets @ np.array([self.transfer_gpu_s[node] for node in nodes], np.float64)
        return {nodes[at] for at in np.flatnonzero(sets[totals.argmin()]).tolist()}

    def _outcome(self, leaving: Iterable[int]) -> tuple[float, Mapping[int, int]]:
        """Return the cost, and the free GPUs that each job takes."""
        left, cost, takes = self._free_without(leaving), self.transfer_cost(leaving), dict[int, int]()
        for number, lost in sorted(self.count_losses(leaving).items()):
            job, taken = self.jobs[number], 0
            if job.kind is not None and (over := lost - job.spare_gpus) <= left[job.kind]:
                takes[number] = taken = min(self._wanted_gpus(lost, over), left[job.kind])
                left[job.kind] -= taken
            cost += job.cost(lost, taken)
        return cost, takes

    def _wanted_gpus(self, lost: int, over: int) -> int:
        """Return the free GPUs that a job wants if it loses `over` more than it can spare."""
        return lost if self._refills else max(0, over)

    def _free_without(self, leaving: Iterable[int]) -> defaultdict[str, int]:
        left = self._free.copy()
        for node in leaving:
            kind, gpus = self._idle[node]
            left[kind] -= gpus
        return left

    def _gpus_taken(self, leaving: Set[int]) -> Mapping[int, int]:
        """Return the GPUs that each job takes by `_outcome`, cached for the next window with the same nodes."""
        if self._last is None or self._last[0] is not leaving:
            self._last = leaving, self._outcome(leaving)[1]
        return self._last[1]

    def _free_by_set(self, left: Mapping[str, int], nodes: Sequence[int], sets: Floats) -> dict[str, Floats]:
        """Return [sets]: free GPUs by kind."""
        idle = {kind: [self._idle[node][1] * (self._idle[node][0] == kind) for node in nodes] for kind in left}
        return {kind: np.maximum(0.0, left[kind] - sets @ np.array(idle[kind], np.float64)) for kind in left}

    def _apply_moves(self, costs: Floats, lost: Floats, jobs: Sequence[AffectedJob], left: dict[str, Floats]) -> None:
        """Correct the `costs` [sets, jobs] of jobs that find free GPUs, in their order."""
        for at, (job, most) in enumerate(zip(jobs, lost.max(axis=0).tolist(), strict=True)):
            if job.kind is None or not (most > job.spare_gpus or (self._refills and most)):
                continue
            gone, room = lost[:, at], left[job.kind]
            over = gone - job.spare_gpus
            fits = (gone > 0.0) & (over <= room)
            taken = np.where(fits, np.minimum(gone if self._refills else np.maximum(over, 0.0), room), 0.0)
            costs[fits, at] = job.restart_s * (job.held_gpus - gone + taken)[fits]
            room -= taken


@lru_cache(maxsize=32)
def _subsets(size: int, count: int) -> Floats:
    """Return [subsets, size]: a row of ones and zeros for every choice of `count`."""
    chosen = np.array(list(combinations(range(size), count)), np.intp).reshape(comb(size, count), count)
    sets = np.zeros((len(chosen), size))
    sets[np.arange(len(chosen))[:, None], chosen] = 1.0
    return sets


@lru_cache(maxsize=32)
def _list_covers(sizes: tuple[int, ...], need: int) -> Floats:
    """Return [subsets, size]: a row of ones and zeros for every choice of at least `need`, without a superfluous node.

    The rows with the smallest sums come first, so that among equal costs as little as possible is chosen.
    """
    sets = ((np.arange(1 << len(sizes))[:, None] >> np.arange(len(sizes))) & 1).astype(np.float64)
    totals, smallest = sets @ np.array(sizes, np.float64), np.where(sets > 0, sizes, inf).min(axis=1)
    kept = np.flatnonzero((totals >= need) & (totals - smallest < need))
    covers: Floats = sets[kept[np.argsort(totals[kept], kind="stable")]]
    return covers
